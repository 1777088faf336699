"""What this room asks of its process, and of what other rooms keep in it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from trimesh._runtime.calls.process import CallingProc
from trimesh._runtime.peers.deaths import DeathOf
from trimesh._runtime.peers.peer import Peer, Route
from trimesh._transport.interface.base import Link, Transport
from trimesh._wire import messages
from trimesh.errors import ProtocolError
from trimesh.ids import ProcId


class ServingProc(CallingProc, Protocol):
    """The process that has services; see `Proc`."""

    def serve(self, service: Callable[..., Awaitable[object]], *args: Any) -> bool:
        """Run a task for as long as links are served; return False, and do not, when that is over."""
        ...

    def misbehaved(self, link: Link, error: ProtocolError) -> None:
        """End a link whose peer has broken the rules."""


class GrantingProc(Protocol):
    """The process that grants memory to others, and reaches theirs; see `Proc`."""

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
    def transport(self) -> Transport:
        """Its links, and what moves memory beside them."""
        ...

    @property
    def family(self) -> EndingFamily | None:
        """Who finds out how others have ended."""
        ...

    @property
    def on_gone(self) -> list[Callable[[Peer], None]]:
        """Told of each peer that is gone."""
        ...

    @property
    def routes(self) -> dict[type[messages.Message], Route]:
        """Who takes each kind of message."""
        ...

    @property
    def sites(self) -> MovingSite | None:
        """Where a test interferes; None outside of tests."""
        ...

    def peer(self, proc_id: ProcId) -> Peer:
        """Return the record of a process."""
        ...

    def death_of(self, proc_id: ProcId) -> DeathOf | None:
        """Return how a process has ended, or None if nothing is known of its end."""
        ...

    def serve(self, service: Callable[..., Awaitable[object]], *args: Any) -> bool:
        """Run a task for as long as links are served; return False, and do not, when that is over."""
        ...


class EndingFamily(Protocol):
    """Who finds out how processes have ended; see `Family`."""

    async def connect(self, peers: Sequence[Peer]) -> None:
        """See to it that every peer has a link or is known to be gone."""
        ...

    async def learn_end(self, peer: Peer) -> DeathOf:
        """Return how a process has ended that is known to have."""
        ...

    async def learn_loss(self, peer: Peer) -> DeathOf | None:
        """Return how a process has ended that a connection was lost to; None if it may live."""
        ...


class MovingSite(Protocol):
    """What a test does when a buffer is about to be moved; see `Sites`."""

    def moving(self, proc_id: ProcId) -> Callable[[], Awaitable[None]] | None:
        """Return what a transfer of a process waits for before it is made, and fails if that raises; mostly None."""
        ...
