"""Certificates of an authority of the user's, from files: what cert-manager, SPIFFE helpers and people leave there."""

from __future__ import annotations

import os
import secrets
import stat
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

from trimesh import limits
from trimesh.errors import LimitExceeded
from trimesh.ids import ProcId
from trimesh.jobs.identity.authority import Credentials, IdentityError

if TYPE_CHECKING:
    from cryptography import x509


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


# ---- looking ---------------------------------------------------------------------------------------------------------

# Whether certificate files of a site can be what they are to be, on this host and now; for `trimesh doctor`.

_FORM: Final = "%Y-%m-%d %H:%M %Z"


def look_at(credentials: Credentials, now: datetime) -> datetime:
    """Check certificates, key and authority, as far as one host can; no peer is asked.

    Args:
        credentials: As `read_own_pki` returns them.
        now: The time, of any zone.

    Returns:
        When the first certificate that is needed expires.

    Raises:
        IdentityError: Something is not what it must be; the text names it.
    """
    from cryptography.exceptions import UnsupportedAlgorithm  # noqa: PLC0415 - as in `authority`, when it is needed
    from cryptography.hazmat.primitives import serialization  # noqa: PLC0415

    chain = _certificates(credentials.chain, "certificate")
    authorities = _certificates(credentials.authority, "authority")
    try:
        key = serialization.load_pem_private_key(credentials.key, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise IdentityError(f"the key needs to be a private key in PEM without a password: {error}") from None
    form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    if key.public_key().public_bytes(*form) != chain[0].public_key().public_bytes(*form):
        raise IdentityError("the key needs to be that of the first certificate of the file, and is another one")
    _check_names(chain[0])
    needed = [*chain, _issuer_of(chain, authorities)]
    for one in needed:
        _check_dates(one, now)
    return min(one.not_valid_after_utc for one in needed)


def _certificates(text: bytes, what: str) -> list[x509.Certificate]:
    from cryptography import x509  # noqa: PLC0415

    try:
        return x509.load_pem_x509_certificates(text)
    except ValueError as error:
        raise IdentityError(f"the {what} needs to be a file of certificates in PEM: {error}") from None


def _issuer_of(chain: list[x509.Certificate], authorities: list[x509.Certificate]) -> x509.Certificate:
    """Return who of the authorities has certified the last one, and check that each certifies the one before."""
    for one, issuer in pairwise(chain):
        if not _has_issued(issuer, one):
            raise IdentityError(
                f"each certificate of the file needs to be signed by the next one, and {_name(issuer)} has not signed "
                f"that of {_name(one)}"
            )
    for authority in authorities:
        if authority == chain[-1] or _has_issued(authority, chain[-1]):
            return authority
    raise IdentityError(
        f"the last certificate of the file, of {_name(chain[-1])}, needs to be signed by the authority, "
        f"{', '.join(map(_name, authorities))}, and is not: it was issued by {chain[-1].issuer.rfc4514_string()!r}"
    )


def _has_issued(issuer: x509.Certificate, one: x509.Certificate) -> bool:
    from cryptography.exceptions import InvalidSignature  # noqa: PLC0415

    try:
        one.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _check_names(one: x509.Certificate) -> None:
    from cryptography import x509  # noqa: PLC0415

    try:
        names = one.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        names = None
    kinds = (x509.UniformResourceIdentifier, x509.DNSName)
    if names is None or not any(names.get_values_for_type(kind) for kind in kinds):
        raise IdentityError("the certificate needs to name its host by a URI or a name of DNS, and names none")


def _check_dates(one: x509.Certificate, now: datetime) -> None:
    begins, ends = one.not_valid_before_utc, one.not_valid_after_utc
    if now < begins:
        raise IdentityError(f"the certificate of {_name(one)} is not valid before {begins:{_FORM}}")
    if now > ends:
        raise IdentityError(f"the certificate of {_name(one)} has expired, at {ends:{_FORM}}")


def _name(one: x509.Certificate) -> str:
    return repr(one.subject.rfc4514_string() or f"serial number {one.serial_number:x}")
