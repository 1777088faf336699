"""Who is called."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from trimesh.ids import MeshId

if TYPE_CHECKING:
    from trimesh._runtime.peers.peer import Peer


class Target(msgspec.Struct, frozen=True):
    """One actor: its process and its mesh."""

    peer: Peer
    mesh: MeshId
