"""What this room asks of its process, and of what other rooms keep in it."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Protocol

import trio

from trimesh._runtime.calls.silence import CancellingProc
from trimesh._runtime.peers.parcel import Parcel
from trimesh._runtime.peers.peer import Peer, Route
from trimesh._runtime.values.codec import Values
from trimesh._runtime.values.reference import MeshInfo
from trimesh._transport.interface.base import Transport
from trimesh._wire import messages
from trimesh.ids import CallId, ProcId

if TYPE_CHECKING:
    from trimesh._runtime.calls.outgoing import AnyWait, OutgoingCall


class Clock(Protocol):
    """Gives the Trio time."""

    def __call__(self) -> float:
        """Return it."""
        ...


class CallNumbers(Protocol):
    """Gives the number of another call."""

    def __call__(self) -> CallId:
        """Return it."""
        ...


class CallingProc(CancellingProc, Protocol):
    """The process that calls; see `Proc`."""

    calls: dict[int, OutgoingCall]
    dropped_replies: int
    now: Clock
    new_call_id: CallNumbers

    @property
    def above(self) -> dict[type, object]:
        """What is kept for it, by class."""
        ...

    @property
    def proc_id(self) -> ProcId:
        """This incarnation."""
        ...

    @property
    def values(self) -> Values:
        """How its values travel."""
        ...

    @property
    def transport(self) -> Transport:
        """Its links."""
        ...

    @property
    def is_simulated(self) -> bool:
        """Whether the processes that it talks to are in this one."""
        ...

    @property
    def routes(self) -> dict[type[messages.Message], Route]:
        """Who takes the messages that are no calls and no answers."""
        ...

    @property
    def family(self) -> CallingFamily | None:
        """Who makes its links."""
        ...

    @property
    def actors(self) -> trio.Nursery:
        """Tasks of its actors."""
        ...

    @property
    def deadlocks(self) -> CallWatch:
        """Looks for calls that wait for themselves."""
        ...

    def chance(self) -> float:
        """Draw a number between 0 and 1."""
        ...

    def begin(self, call: OutgoingCall, parcel: Parcel) -> None:
        """Register a call and send it."""

    def forget(self, call: OutgoingCall) -> None:
        """Drop a call that has ended or was given up."""

    def cast(self, peers: Sequence[Peer], parcel: Parcel) -> trio.Event | None:
        """Send one parcel to several peers."""
        ...


class CallingFamily(Protocol):
    """Who makes the links of a process; see `Family`."""

    own_mesh: MeshInfo | None

    @property
    def neighbours(self) -> Container[ProcId]:
        """Controllers of other programs that this one has connected to."""
        ...

    def is_foreign(self, proc_id: ProcId) -> bool:
        """Return whether a process is of another program."""
        ...

    @property
    def root(self) -> ProcId | None:
        """The controller, if it is another one."""
        ...

    async def connect(self, peers: Sequence[Peer]) -> None:
        """Make links to peers that have none."""


class CallWatch(Protocol):
    """Is told of calls that may wait for themselves; see `Deadlocks`."""

    @property
    def circles(self) -> CallNotes:
        """Those that are known to."""
        ...

    def unsent(self, call: OutgoingCall) -> None:
        """Learn of a call that waits for room."""

    def awaits_any(self, wait: AnyWait) -> None:
        """Learn of a wait for whichever of several comes next."""


class CallNotes(Protocol):
    """What is known of calls that wait for themselves; see `Circles`."""

    def explain(self, cut: trio.Cancelled, call_id: int) -> None:
        """Note on the cancel of a call that it has waited for itself, if it is known to have."""
