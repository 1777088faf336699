"""A member that does not acknowledge a cancel in time: its owner is told (rule C2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimesh._runtime.peers.parcel import Parcel
from trimesh._wire import messages
from trimesh.ids import MeshId

if TYPE_CHECKING:
    from trimesh._runtime.life.proc import Proc
    from trimesh._runtime.peers.peer import Peer


def report_silent(proc: Proc, peer: Peer, mesh: MeshId, what: str) -> None:
    """Tell the owner of an actor that it did not acknowledge a cancel in time (rule C2)."""
    known = proc.memberships.get(mesh)
    if known is not None:
        proc.peer(known.info.owner).send(Parcel(messages.encode(messages.Silent(mesh, peer.proc_id, what))))
