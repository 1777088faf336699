"""What this room asks of its process; see `Proc`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from trimesh._runtime.actors.cell import Cell
from trimesh._runtime.calls.outgoing import OutgoingCall
from trimesh._runtime.deadlock.suspicion import Deadlocks
from trimesh._runtime.debugging.holds import Holds
from trimesh._runtime.meshes.block import Block
from trimesh._runtime.meshes.member import Member
from trimesh._runtime.meshes.stopping_blocks import StoppingBlocks
from trimesh._runtime.peers.peer import Peer, Route
from trimesh._runtime.recording.recorder import FlightRecorder
from trimesh._runtime.services.bulk import Bulk
from trimesh._runtime.spawner.siblings import Siblings
from trimesh._runtime.values.reference import MeshInfo
from trimesh._runtime.watch.journal import Journal
from trimesh._wire import messages
from trimesh.ids import MeshId, ProcId


class ObservedProc(Protocol):
    """The process that is looked at."""

    routes: dict[type[messages.Message], Route]
    now: Callable[[], float]
    recorder: FlightRecorder | None

    @property
    def proc_id(self) -> ProcId:
        """This incarnation."""
        ...

    @property
    def host_name(self) -> str:
        """Name of its machine."""
        ...

    @property
    def pid(self) -> int:
        """Its number on that machine."""
        ...

    @property
    def plain_hosts(self) -> Collection[str]:
        """Names of its hosts to which sessions are without TLS."""
        ...

    @property
    def is_simulated(self) -> bool:
        """Whether the processes that it talks to are in this one."""
        ...

    @property
    def family(self) -> ObservedFamily | None:
        """Who has started it."""
        ...

    @property
    def cells(self) -> Mapping[MeshId, Cell]:
        """Actors that live in it."""
        ...

    @property
    def members(self) -> Mapping[ProcId, Member]:
        """Child processes that it owns."""
        ...

    @property
    def blocks(self) -> Sequence[Block]:
        """Its open blocks."""
        ...

    @property
    def stopping_blocks(self) -> StoppingBlocks:
        """Those that are being left."""
        ...

    @property
    def deadlocks(self) -> Deadlocks:
        """Looks for calls that wait for themselves."""
        ...

    @property
    def holds(self) -> Holds:
        """Threads that debuggers hold."""
        ...

    @property
    def journal(self) -> Journal:
        """What has happened to the members that it owns."""
        ...

    @property
    def bulk(self) -> Bulk:
        """What it has granted to others."""
        ...

    @property
    def on_gone(self) -> list[Callable[[Peer], None]]:
        """Told of each peer that is gone."""
        ...

    def peers(self) -> Sequence[Peer]:
        """Return every process that it knows and that is not gone."""
        ...

    def find_peer(self, proc_id: int) -> Peer | None:
        """Return the record of a process that is known and not gone, or None."""
        ...

    def serve(self, service: Callable[..., Awaitable[object]], *args: Any) -> bool:
        """Run a task for as long as links are served; return False, and do not, when that is over."""
        ...

    def unended_calls(self) -> Sequence[OutgoingCall]:
        """Return its calls that wait for an outcome."""
        ...


class ObservedFamily(Protocol):
    """Who has started a process; see `Family`."""

    @property
    def parent(self) -> ProcId | None:
        """The process that has started it."""
        ...

    @property
    def root(self) -> ProcId | None:
        """The controller, if it is another one."""
        ...

    @property
    def siblings(self) -> Siblings | None:
        """The spawners and agents of a controller on a real machine."""
        ...

    @property
    def own_mesh(self) -> MeshInfo | None:
        """The mesh of processes that this one is a member of."""
        ...
