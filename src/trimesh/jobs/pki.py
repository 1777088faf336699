"""`OwnPKI`, certificates of your own authority for sessions between hosts; `insecure=`, the opt-out of TLS."""

from __future__ import annotations

import os
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final

import attrs

if TYPE_CHECKING:
    from trimesh.jobs.identity import Credentials


UNDERSTOOD: Final = "I understand"
"""Value of `insecure=` that turns TLS off; any other text is refused."""


def checked_insecure(insecure: Any, pki: object = None) -> str:
    """Return the value of `insecure=`: "" or `UNDERSTOOD`.

    Raises:
        ValueError: It is another text, or `pki` is given, too.
    """
    if insecure not in ("", UNDERSTOOD):
        raise ValueError(
            f"insecure= takes the text {UNDERSTOOD!r} and no other, got {insecure!r}: it turns TLS between hosts off, "
            "so any machine in the network can read and change all traffic; leave it out for TLS"
        )
    if insecure and pki is not None:
        raise ValueError("a job takes certificates (pki=) or no TLS (insecure=), got both: leave one out")
    return str(insecure)


def plain_warning(whose: str) -> str:
    """Return the warning that each start without TLS logs; `whose` names the job."""
    return (
        f"sessions between the hosts of {whose} are INSECURE, without TLS: any machine in the network can read and "
        "change all traffic, and run code"
    )


# ---- certificates of the user's own authority ------------------------------------------------------------------------


def _text_of(path: str | os.PathLike[str]) -> str:
    return os.fspath(path)


def _names_of(peers: Any) -> tuple[Any, ...]:
    return (peers,) if isinstance(peers, str) else tuple(peers)


@attrs.frozen
class OwnPKI:
    """Paths of certificates of your own authority, which a job uses instead of creating an authority of its own.

    The program and each agent read them on their own host when the block of the job is entered. The paths are the same
    on all hosts; the files may differ. Put them there yourself, or by cert-manager or a SPIFFE helper.

    Attributes:
        certificate: PEM file with the chain: the certificate of the host first, then those of intermediate authorities.
            Its first URI, else its first DNS name, is the name of the host.
        key: PEM file with its private key, without a password; owned by this user or root, readable by the owner only.
        authority: PEM file with the certificate of the authority by which peers are verified.
        peers: Names of all hosts that are accepted, the program's host included.
    """

    certificate: str = attrs.field(converter=_text_of)
    key: str = attrs.field(converter=_text_of)
    authority: str = attrs.field(converter=_text_of)
    peers: tuple[str, ...] = attrs.field(converter=_names_of)

    def __attrs_post_init__(self) -> None:
        """Refuse relative paths and missing names; validates tables of a job file, too."""
        for what, path in (("certificate", self.certificate), ("key", self.key), ("authority", self.authority)):
            if not PurePath(path).is_absolute() and not path.startswith("~/"):
                raise ValueError(
                    f"{what} of an OwnPKI must be an absolute path, or begin with ~/, as each host reads its own, "
                    f"got {path!r}"
                )
        if not self.peers or not all(self.peers):
            raise ValueError(
                "peers of an OwnPKI must name the hosts to trust, as an authority certifies others, too; got "
                f'{self.peers!r}: write peers=("n1.example", "n2.example")'
            )

    def read(self) -> Credentials:
        """Read the three files on this host. Blocking: file access.

        Raises:
            IdentityError: A file cannot be read or is no PEM, or others can read the key.
        """
        from trimesh.jobs.identity import read_own_pki  # noqa: PLC0415 - not before a block is entered

        return read_own_pki(certificate=self.certificate, key=self.key, authority=self.authority, peers=self.peers)

    @property
    def arguments(self) -> tuple[str, ...]:
        """These values as options of `trimesh host join`."""
        files = ("--certificate", self.certificate, "--key", self.key, "--authority", self.authority)
        return (*files, *(word for name in self.peers for word in ("--peer", name)))
