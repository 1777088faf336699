"""What this room asks of its process, and of what other rooms keep in it; `cell` and `agent` add what names actors."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Protocol

from trimesh._runtime.calls.membership import HandlingProc
from trimesh._runtime.calls.process import CallWatch
from trimesh._runtime.peers.peer import Peer
from trimesh.ids import MeshId, ProcId

if TYPE_CHECKING:
    from trimesh._runtime.actors.mailbox import Mailbox, SlotGroup
    from trimesh._runtime.peers.deaths import DeathOf
    from trimesh._runtime.recording.recorder import FlightRecorder


class ActorProc(HandlingProc, Protocol):
    """The process that actors live in; see `Proc`."""

    @property
    def host_name(self) -> str:
        """Name of its machine."""
        ...

    @property
    def pid(self) -> int:
        """Its number on that machine."""
        ...

    @property
    def me(self) -> Peer:
        """This process as a peer of itself."""
        ...

    @property
    def owners(self) -> MutableMapping[MeshId, FailureHandler]:
        """The actor meshes that it owns."""
        ...

    @property
    def recorder(self) -> FlightRecorder | None:
        """Keeps what happens in a file; None without."""
        ...

    @property
    def on_gone(self) -> list[Callable[[Peer], None]]:
        """Told of each peer that is gone."""
        ...

    @property
    def deadlocks(self) -> SlotWatch:
        """Looks for calls that wait for themselves."""
        ...

    def find_peer(self, proc_id: int) -> Peer | None:
        """Return the record of a process that is known and not gone, or None."""

    def declare_gone(self, peer: Peer, death: DeathOf) -> None:
        """Settle everything that waits for `peer`. Idempotent."""


class SlotWatch(CallWatch, Protocol):
    """Is also told of calls that wait for a slot; see `Deadlocks`."""

    def crowded(self, group: SlotGroup) -> None:
        """Learn that a call has to wait for a slot."""

    def early(self, mailbox: Mailbox) -> None:
        """Learn that a call has to wait until an actor serves."""


class FailureHandler(Protocol):
    """The owner of an actor mesh, as its process sees it."""

    def actor_failed(self, peer: Peer, endpoint: str, error: Exception, *, ended: bool) -> None:
        """Learn of a failure without a caller in the member that lives in `peer`; it may have `ended` by it."""

    def actor_ended(self, peer: Peer) -> None:
        """Learn that the member that lives in `peer` has ended by itself, without an error."""

    def member_silent(self, proc_id: ProcId, what: str, *, is_logged: bool) -> None:
        """Learn that the member that lives in a process did not acknowledge the cancel of a call to `what`."""
