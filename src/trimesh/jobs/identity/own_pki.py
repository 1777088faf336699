"""Certificates of an authority of the user's, from files: what cert-manager, SPIFFE helpers and people leave there."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from trimesh import limits
from trimesh.errors import LimitExceeded
from trimesh.ids import ProcId
from trimesh.jobs.identity.credentials import Credentials, IdentityError


def read_own_pki(
    *, certificate: str | Path, key: str | Path, authority: str | Path, peers: tuple[str, ...]
) -> Credentials:
    """Return credentials from three files in PEM. Nothing is looked for elsewhere, and nothing is left out.

    Args:
        certificate: The own certificate, then those up to the authority.
        key: Its private key, without a password: of this user, and readable by no other.
        authority: Who certifies the peers.
        peers: Names that peers may have: URIs, or else names of DNS, in their certificates. An authority of a site
            certifies others, too, so none is taken for granted.

    Raises:
        IdentityError: A file cannot be read, the key can be read by others, or no peer is named.
    """
    if not peers:
        raise IdentityError(
            "own certificates need peers=(...), the names that peers may have in theirs: an authority has others, "
            'too; write peers=("n1.example", "n2.example")'
        )
    return Credentials(
        chain=_read(certificate, "certificate"),
        key=_read(key, "key", is_secret=True),
        authority=_read(authority, "authority"),
        peers=tuple(peers),
    )


class ForeignAuthority:
    """The place of an `Authority` in a mesh that certifies none of its hosts: others have, or sessions are plain.

    Hosts join by a token all the same. Their certificates say nothing of incarnations, so each connection of one has
    to prove the token by which it has joined (FA-1).

    Args:
        credentials: Of this process.

    Attributes:
        pin: 32 bytes that no other mesh has; no digest of a key.
        mesh: The first 16 of them.
    """

    def __init__(self, credentials: Credentials) -> None:
        self.pin = secrets.token_bytes(32)
        self.mesh = self.pin[:16]
        self.own = credentials
        self._joined = set[ProcId]()

    def credentials(self, incarnation: ProcId, now: float) -> Credentials:
        """Return certificate and key of this process."""
        del incarnation, now
        return self.own

    def has_joined(self, incarnation: ProcId) -> bool:
        """Tell whether an incarnation has ever joined."""
        return incarnation in self._joined

    def admit(self, incarnation: ProcId) -> None:
        """Note that an incarnation has joined.

        Raises:
            IdentityError: It has before.
            LimitExceeded: `limits.CERTIFIED_MAX` have.
        """
        if incarnation in self._joined:
            raise IdentityError(f"an incarnation joins once, and {incarnation:016x} has joined")
        if len(self._joined) >= limits.CERTIFIED_MAX:
            raise LimitExceeded("CERTIFIED_MAX", limits.CERTIFIED_MAX, "too many hosts have joined this mesh")
        self._joined.add(incarnation)


def _read(path: str | Path, what: str, *, is_secret: bool = False) -> bytes:
    try:
        with Path(path).expanduser().open("rb") as file:
            if is_secret:
                _check_secret(os.fstat(file.fileno()), path)  # of what was opened, not of what the path is by now
            text = file.read(limits.PKI_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise IdentityError(f"the {what} needs to be a readable file, got {path}: {error.strerror}") from error
    if len(text) > limits.PKI_FILE_BYTES_MAX:
        raise IdentityError(f"the {what} needs to be a file of at most {limits.PKI_FILE_BYTES_MAX} bytes, got {path}")
    if b"-----BEGIN " not in text:
        raise IdentityError(f"the {what} needs to be a file in PEM, got {path} without a line -----BEGIN ...")
    return text


def _check_secret(found: os.stat_result, path: str | Path) -> None:
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        raise IdentityError(
            f"a private key needs to be readable by its owner only, got {path} with mode {mode:04o}; "
            f"write: chmod 600 {path}"
        )
    if found.st_uid not in (os.geteuid(), 0):
        raise IdentityError(
            f"a private key needs to belong to this user ({os.geteuid()}) or to root, got {path} of user {found.st_uid}"
        )
