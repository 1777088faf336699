"""A member that does not acknowledge a cancel in time: its owner is told (rule C2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from trimesh._runtime.peers.parcel import Parcel
from trimesh._runtime.values.reference import MeshInfo
from trimesh._wire import messages
from trimesh.ids import MeshId, ProcId

if TYPE_CHECKING:
    from trimesh._runtime.peers.peer import Peer


class KnownMesh(Protocol):
    """A mesh that a process has a handle on; see `Membership`."""

    @property
    def info(self) -> MeshInfo:
        """What travels in references."""
        ...


class CancellingProc(Protocol):
    """The process whose cancel was not acknowledged; see `Proc`."""

    @property
    def memberships(self) -> Mapping[MeshId, KnownMesh]:
        """The meshes that it has handles on."""
        ...

    def peer(self, proc_id: ProcId) -> Peer:
        """Return the record of a process."""
        ...


def report_silent(proc: CancellingProc, peer: Peer, mesh: MeshId, what: str) -> None:
    """Tell the owner of an actor that it did not acknowledge a cancel in time (rule C2)."""
    known = proc.memberships.get(mesh)
    if known is not None:
        proc.peer(known.info.owner).send(Parcel(messages.encode(messages.Silent(mesh, peer.proc_id, what))))
