"""What this room asks of its process, and of what other rooms keep in it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from trimesh._runtime.values.codec import Values
from trimesh._transport.interface.base import Link
from trimesh.ids import ProcId

if TYPE_CHECKING:
    from trimesh._runtime.peers.incoming import IncomingCall
    from trimesh._runtime.peers.peer import Peer


class PeerProc(Protocol):
    """The process that has a peer; see `Proc`."""

    @property
    def proc_id(self) -> ProcId:
        """This incarnation."""
        ...

    @property
    def values(self) -> Values:
        """How its values travel."""
        ...

    @property
    def family(self) -> PeerFamily | None:
        """Who has started it; None for one without links to others."""
        ...

    @property
    def members(self) -> Container[ProcId]:
        """Child processes that it owns."""
        ...

    @property
    def channels(self) -> PortSender:
        """Its channels."""
        ...

    @property
    def deadlocks(self) -> ProducerWatch:
        """Looks for calls that wait for themselves."""
        ...

    def serve(self, service: Callable[..., Awaitable[object]], *args: Any) -> bool:
        """Run a task for as long as links are served; return False, and do not, when that is over."""
        ...


class PeerFamily(Protocol):
    """Who has started a process; see `Family`."""

    @property
    def parent(self) -> ProcId | None:
        """The process that has started it."""
        ...

    @property
    def root(self) -> ProcId | None:
        """The controller, if it is another one."""
        ...


class PortSender(Protocol):
    """Tells a peer of the ports that a message carries; see `Channels`."""

    def send(self, peer: Peer, link: Link, attachments: Sequence[object]) -> None:
        """Tell `peer` of the ports among `attachments`, right before their message."""


class ProducerWatch(Protocol):
    """Is told of a generator that waits for its consumer; see `Deadlocks`."""

    def producer_waits(self, call: IncomingCall) -> None:
        """Learn that the generator of `call` waits."""


class PeerCall(Protocol):
    """A call of this process in which a peer takes part; see `OutgoingCall`."""

    def peer_gone(self, peer: Peer) -> None:
        """Learn that a process that is addressed is gone."""

    def peer_stalled(self) -> None:
        """Learn that the loop of a process that is addressed does not run."""


class Carried(Protocol):
    """The ports of a message that has come; see `CarriedPorts`."""

    @property
    def holdings(self) -> Sequence[object]:
        """Each of them."""
        ...
