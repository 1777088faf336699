"""What this room asks of its process; see `Proc`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from trimesh._runtime.actors.cell import Cell
from trimesh._runtime.deadlock.suspicion import Deadlocks
from trimesh._runtime.peers.peer import Peer, Route
from trimesh._runtime.values.reference import MeshInfo
from trimesh._wire import messages
from trimesh.ids import MeshId, ProcId


class DebuggedFamily(Protocol):
    """Who has started a process; see `Family`."""

    @property
    def parent(self) -> ProcId | None:
        """The process that has started it."""
        ...

    @property
    def own_mesh(self) -> MeshInfo | None:
        """The mesh of processes that it is a member of."""
        ...


class DebuggedProc(Protocol):
    """A process whose threads may be held, or that waits for one whose are."""

    routes: dict[type[messages.Message], Route]
    now: Callable[[], float]

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
    def family(self) -> DebuggedFamily | None:
        """Who has started it."""
        ...

    @property
    def cells(self) -> Mapping[MeshId, Cell]:
        """Actors that live in it."""
        ...

    @property
    def deadlocks(self) -> Deadlocks:
        """Knows which task is part of which call."""
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

    def pump(self, seconds: float) -> None:
        """Read what has come, and wait for something at most `seconds`, without letting any task run."""
