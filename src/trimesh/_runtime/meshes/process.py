"""What this room asks of its process; `block` and `member` add what names those."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from trimesh._runtime.actors.process import ActorProc
from trimesh._runtime.actors.supervision_log import LoggingProc
from trimesh._runtime.peers.deaths import DeathOf
from trimesh._runtime.peers.peer import Peer
from trimesh._runtime.watch.process import TaskProc
from trimesh._transport.interface.base import Link
from trimesh.ids import ProcId

if TYPE_CHECKING:
    from trimesh._runtime.watch.journal import Journal


class MeshProc(ActorProc, LoggingProc, TaskProc, Protocol):
    """The process that owns a mesh; see `Proc`."""

    @property
    def journal(self) -> Journal:
        """What has happened to the members of its meshes."""
        ...


class ParentProc(TaskProc, Protocol):
    """The process that owns a child process; see `Proc`."""

    @property
    def host_name(self) -> str:
        """Name of its machine."""
        ...

    def adopt_link(self, proc_id: ProcId, link: Link) -> Peer:
        """Take a link to `proc_id` into service."""
        ...

    def declare_gone(self, peer: Peer, death: DeathOf) -> None:
        """Settle everything that waits for `peer`, and cancel what it had asked for here. Idempotent."""
