"""Who is called."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from trimesh.ids import MeshId

if TYPE_CHECKING:
    from trimesh._runtime.peer import Peer


@attrs.frozen
class Target:
    """One actor: its process and its mesh."""

    peer: Peer
    mesh: MeshId
