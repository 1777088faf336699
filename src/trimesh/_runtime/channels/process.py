"""What this room asks of its process, and of what other rooms keep in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from trimesh._runtime.peers.peer import Peer, Route
from trimesh._runtime.values.codec import Values
from trimesh._wire import messages
from trimesh.ids import ProcId

if TYPE_CHECKING:
    from trimesh._runtime.tasks.background import Tasks


class ChannelProc(Protocol):
    """The process that has channels, and ports of others; see `Proc`."""

    nursery: Tasks

    @property
    def proc_id(self) -> ProcId:
        """This incarnation."""
        ...

    @property
    def values(self) -> Values:
        """How its values travel."""
        ...

    @property
    def routes(self) -> dict[type[messages.Message], Route]:
        """Who takes the messages that are no calls and no answers."""
        ...

    @property
    def on_gone(self) -> list[Callable[[Peer], None]]:
        """Told of each peer that is gone."""
        ...

    @property
    def on_link(self) -> list[Callable[[Peer], None]]:
        """Told of each peer that has got a link."""
        ...

    @property
    def family(self) -> ChannelFamily | None:
        """Who makes its links."""
        ...

    @property
    def me(self) -> Peer:
        """This process as a peer of itself."""
        ...

    def peer(self, proc_id: ProcId) -> Peer:
        """Return the record of a process."""
        ...


class PortMail(Protocol):
    """What an end of a channel asks of all the channels of its process; see `Channels`."""

    @property
    def proc(self) -> ChannelProc:
        """The process."""
        ...

    def tell(self, peer: Peer, message: messages.Message) -> None:
        """Send a message on the DATA lane, now or when there is a link."""


class ChannelFamily(Protocol):
    """Who makes the links of a process; see `Family`."""

    async def connect(self, peers: Sequence[Peer]) -> None:
        """Make links to peers that have none."""

    async def find_out(self, peer: Peer) -> None:
        """Find out what has become of a peer without a link."""
