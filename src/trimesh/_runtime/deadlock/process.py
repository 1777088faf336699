"""What this room asks of its process; see `Proc`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from trimesh._runtime.actors.cell import Cell
from trimesh._runtime.actors.supervision_log import LoggingProc
from trimesh._runtime.calls.process import CallingProc
from trimesh._runtime.peers.peer import Peer
from trimesh.ids import MeshId


class DeadlockProc(CallingProc, LoggingProc, Protocol):
    """The process whose calls may wait for themselves."""

    @property
    def cells(self) -> Mapping[MeshId, Cell]:
        """Actors that live in it."""
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
