"""`OwnPKI`: certificates of a user's own authority; and the opt-in to sessions without TLS, with its warning."""

from __future__ import annotations

import os
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final

import attrs

if TYPE_CHECKING:
    from trimesh.jobs.identity import Credentials


UNDERSTOOD: Final = "I understand"
"""Value of `insecure=` that a job requires."""


def checked_insecure(insecure: Any, pki: object = None) -> str:
    """Return what a job says of plain sessions: "" or `UNDERSTOOD`.

    Raises:
        ValueError: It is another text, or certificates are given, too.
    """
    if insecure not in ("", UNDERSTOOD):
        raise ValueError(
            f"insecure= takes the text {UNDERSTOOD!r} and no other, got {insecure!r}: sessions between hosts are then "
            "without TLS, so whoever is in the network reads all of it and can change it; leave it out for TLS"
        )
    if insecure and pki is not None:
        raise ValueError("a job has certificates (pki=), or does without (insecure=), got both: leave one out")
    return str(insecure)


def plain_warning(whose: str) -> str:
    """Return the warning that every start logs."""
    return (
        f"sessions between the hosts of {whose} are INSECURE, without TLS: whoever is in the network reads all of it, "
        "and can change it and run code"
    )


# ---- certificates of an authority of the user's, as a job or a door is given them ------------------------------------


def _text_of(path: str | os.PathLike[str]) -> str:
    return os.fspath(path)


def _names_of(peers: Any) -> tuple[Any, ...]:
    return (peers,) if isinstance(peers, str) else tuple(peers)


@attrs.frozen
class OwnPKI:
    """Files with certificates of your authority, which a mesh uses in place of those that it would make.

    They are read when the block is entered: by the program on its host, by each agent on its own. Each may have other
    ones under these paths: what cert-manager, a SPIFFE helper or a person has put there.

    Attributes:
        certificate: The own certificate in PEM, then those up to the authority. Its first URI, else its first name of
            DNS, is the name of its host.
        key: Its private key in PEM, without a password: of this user or root, and readable by no other.
        authority: Who certifies the peers, in PEM.
        peers: The names that peers may have, of the program's host and of all others.
    """

    certificate: str = attrs.field(converter=_text_of)
    key: str = attrs.field(converter=_text_of)
    authority: str = attrs.field(converter=_text_of)
    peers: tuple[str, ...] = attrs.field(converter=_names_of)

    def __attrs_post_init__(self) -> None:
        """Refuse what can be no files, and no names; also in what a file of jobs says."""
        for what, path in (("certificate", self.certificate), ("key", self.key), ("authority", self.authority)):
            if not PurePath(path).is_absolute() and not path.startswith("~/"):
                raise ValueError(
                    f"{what} of an OwnPKI must be an absolute path, or begin with ~/, as each host reads its own, "
                    f"got {path!r}"
                )
        if not self.peers or not all(self.peers):
            raise ValueError(
                "peers of an OwnPKI must name whom to trust, as an authority certifies others, too; got "
                f'{self.peers!r}: write peers=("n1.example", "n2.example")'
            )

    def read(self) -> Credentials:
        """Return what the files of this host say.

        Raises:
            IdentityError: A file cannot be read, the key can be read by others, or it is no PEM.
        """
        from trimesh.jobs.identity import read_own_pki  # noqa: PLC0415 - not before a block is entered

        return read_own_pki(certificate=self.certificate, key=self.key, authority=self.authority, peers=self.peers)

    @property
    def arguments(self) -> tuple[str, ...]:
        """The same as options of `trimesh host join`."""
        files = ("--certificate", self.certificate, "--key", self.key, "--authority", self.authority)
        return (*files, *(word for name in self.peers for word in ("--peer", name)))
