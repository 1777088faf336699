"""What one incarnation shows to others, and whom it trusts."""

from __future__ import annotations

from typing import Final

import msgspec

from trimesh.errors import TrimeshError
from trimesh.ids import ID_MAX, ProcId


class IdentityError(TrimeshError):
    """A certificate, key or token is not what it must be, or cannot be had."""


class Credentials(msgspec.Struct, frozen=True):
    """Certificate, key and authority of one incarnation. Its text shows no key.

    Attributes:
        chain: PEM: the own certificate, then those up to the authority.
        key: PEM of the private key, without a password.
        authority: PEM of who certifies the peers.
        peers: Names that peers may have in their certificates; () = the names of the mesh, which sessions check.
        is_plain: There are none, and nothing is encrypted: `insecure=` of a job says so.
    """

    chain: bytes
    key: bytes
    authority: bytes
    peers: tuple[str, ...] = ()
    is_plain: bool = False

    def __repr__(self) -> str:
        return f"Credentials({len(self.chain)} bytes of certificates, key not shown, peers={self.peers})"

    @property
    def has_names(self) -> bool:
        """Whether certificates carry names of the mesh."""
        return not self.peers and not self.is_plain

    def accepts(self, name: str | None) -> bool:
        """Tell whether a peer may have this name; it is None where the peer has shown no certificate."""
        return self.has_names or self.is_plain or name in self.peers


PLAIN: Final = Credentials(b"", b"", b"", is_plain=True)
"""What a process has where sessions are plain."""


def name_of(mesh: bytes, incarnation: ProcId) -> str:
    """Return the name of an incarnation, as certificates have it."""
    if len(mesh) != 16 or not 1 <= incarnation <= ID_MAX:
        raise ValueError(f"a name needs a mesh of 16 bytes and an incarnation from 1 on, got {mesh!r}, {incarnation}")
    return f"trimesh://{mesh.hex()}/{incarnation:016x}"
