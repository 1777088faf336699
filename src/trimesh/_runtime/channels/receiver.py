"""Receiving end of a channel, in the process that opened it: queued items and remaining senders."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

import msgspec
import trio

from trimesh._routing.channel_accounts import Holders, Intake
from trimesh._runtime.peers.peer import Peer
from trimesh._runtime.tasks.crossing import in_trio, in_trio_now, in_trio_taking
from trimesh._runtime.values.codec import take_payload
from trimesh._transport.interface import Buffer, Lane
from trimesh._wire import messages
from trimesh._wire.typed.annotations import ItemType
from trimesh.errors import ProtocolError
from trimesh.ids import ProcId

if TYPE_CHECKING:
    from trimesh._runtime.channels.ports import CarriedPorts
    from trimesh._runtime.channels.registry import Channels

T_co = TypeVar("T_co", covariant=True)


class Source(msgspec.Struct, frozen=True):
    """A sending process, for as long as it holds ports of the channel.

    Attributes:
        holding: Number that it gave to its holding.
    """

    peer: Peer
    holding: int
    intake: Intake


class WaitingItem(msgspec.Struct, frozen=True):
    """An item that has arrived and was not taken; still encoded."""

    source: Source
    payload: Buffer
    bodies: Sequence[memoryview]
    nbytes: int
    carried: CarriedPorts | None


class ReturnedItem(msgspec.Struct, frozen=True):
    """An item that was taken for code outside of Trio that was cancelled at that moment."""

    value: Any


class Home:
    """A channel, in the process that opened it.

    Attributes:
        capacity: Items of one process that may wait.
        item_type: Type of the items, if nothing is pickled and the channel was opened for a type.
        holders: Processes that may send.
        is_closed: Whether the receiver is closed.
    """

    __slots__ = (
        "_items",
        "_receivers",
        "_sources",
        "capacity",
        "channels",
        "holders",
        "is_closed",
        "item_type",
        "number",
    )

    def __init__(
        self,
        channels: Channels,
        number: int,
        capacity: int,
        item_type: ItemType | None = None,
    ) -> None:
        self.channels = channels
        self.number = number
        self.capacity = capacity
        self.item_type = item_type
        self.holders = Holders()
        self.is_closed = False
        self._sources: dict[ProcId, Source] = {}
        self._items: deque[WaitingItem | ReturnedItem] = deque()
        self._receivers = trio.lowlevel.ParkingLot()

    # ---- holders ---------------------------------------------------------------------------------------------

    def begin(self, me: Peer, holding: int) -> None:
        """Register the process itself as the first holder."""
        self.holders.begin(me.proc_id)
        self._sources[me.proc_id] = Source(me, holding, Intake(self.capacity))

    def taken(self, peer: Peer, message: messages.Accepted, *, is_gone: bool) -> bool:
        """Count a port that has arrived at `peer`; return False if the channel is over."""
        is_new = not self.holders.holds(peer.proc_id)
        if not self.holders.taken(ProcId(message.sender), message.transit, peer.proc_id, is_gone=is_gone):
            return False
        if is_new:
            self._sources[peer.proc_id] = Source(peer, message.holding, Intake(self.capacity))
        return True

    def dropped(self, peer: Peer, units: int) -> None:
        """Count ports that `peer` has released."""
        self.holders.dropped(peer.proc_id, units)
        if not self.holders.holds(peer.proc_id):
            self._sources.pop(peer.proc_id, None)
        self.look()

    def gone(self, peer: Peer) -> None:
        """Remove a dead process and query the processes that it had sent ports to."""
        self._sources.pop(peer.proc_id, None)
        for holder in self.holders.gone(peer.proc_id):
            self.channels.tell(self.channels.proc.peer(holder), messages.Settle(self.number, peer.proc_id))
        self.look()

    def look(self) -> None:
        """Wake the receivers if the channel is at its end."""
        if self.holders.is_over:
            self._receivers.unpark_all()

    # ---- items -----------------------------------------------------------------------------------------------

    def arrived(
        self, peer: Peer, message: messages.PortItem, bodies: list[memoryview], carried: CarriedPorts | None
    ) -> None:
        """Receive an item.

        Raises:
            ProtocolError: Its sender holds no port, or had no room.
        """
        if self.holders.is_over:
            return
        source = self._sources.get(peer.proc_id)
        if source is None:
            raise ProtocolError(f"only a holder of a port may send, got an item of process {peer.proc_id}, without one")
        nbytes = len(message.payload) + sum(body.nbytes for body in bodies)
        source.intake.arrived(nbytes)
        payload, buffers = take_payload(message.payload, bodies)
        self._items.append(WaitingItem(source, payload, buffers, nbytes, carried))
        self._report(source)
        self._receivers.unpark()

    def recall(self, peer: Peer) -> None:
        """Return a process's waiting item to it, if there is one."""
        for item in self._items:
            if isinstance(item, WaitingItem) and item.source.peer is peer:
                self._items.remove(item)
                self._count(item, recalled=True)
                return

    def _count(self, item: WaitingItem, *, recalled: bool = False) -> None:
        item.source.intake.take(item.nbytes)
        self._report(item.source, recalled=recalled)

    def _report(self, source: Source, *, recalled: bool = False) -> None:
        link = source.peer.link
        if source.intake.is_due and link is not None:
            room = messages.Room(source.holding, source.intake.report(), recalled)
            link.send(messages.encode(room), lane=Lane.CONTROL)

    # ---- receiving -------------------------------------------------------------------------------------------

    async def receive(self) -> Any:
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._items and not self.is_closed:
            item = self._take()
            await trio.lowlevel.cancel_shielded_checkpoint()
        else:
            if self.is_closed or self.holders.is_over:
                await trio.lowlevel.checkpoint()
            while not (self._items or self.is_closed or self.holders.is_over):
                await self._receivers.park()
            item = self._take()
        return self._decode(item)

    def receive_nowait(self) -> Any:
        return self._decode(self._take())

    def put_back(self, value: Any) -> None:
        """Requeue an item that did not reach its receiver; the next receiver gets it."""
        if not self.is_closed:
            self._items.appendleft(ReturnedItem(value))
            self._receivers.unpark()

    def _take(self) -> WaitingItem | ReturnedItem:
        if self.is_closed:
            raise trio.ClosedResourceError("this receiver is closed")
        if not self._items:
            raise trio.EndOfChannel if self.holders.is_over else trio.WouldBlock
        item = self._items.popleft()
        if isinstance(item, WaitingItem):
            self._count(item)
        return item

    def _decode(self, item: WaitingItem | ReturnedItem) -> Any:
        if isinstance(item, ReturnedItem):
            return item.value
        return self.channels.proc.values.decode_sent(item.payload, item.bodies, self.item_type)

    def close(self) -> None:
        """Close the channel and notify every holder. Idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        self._items.clear()
        self._receivers.unpark_all()
        for source in self._sources.values():
            self.channels.tell_ended(source.peer, self.number)
        self._sources.clear()
        self.channels.closed(self)


class Receiver(trio.abc.ReceiveChannel[T_co], Generic[T_co]):
    """The receiving end of a channel; it stays in the process that opened it.

    `async for item in receiver` ends when no port is left anywhere, after the last item.
    """

    __slots__ = ("_home",)

    def __init__(self, home: Home) -> None:
        self._home = home

    @trio.lowlevel.enable_ki_protection
    async def receive(self) -> T_co:
        """Return the next item; wait for it.

        Raises:
            trio.EndOfChannel: No port is left, and everything that was sent has been received.
            trio.ClosedResourceError: This receiver is closed.
            PayloadError: The item cannot be rebuilt in this process; it is lost, the next ones are not.

        Blocking: a checkpoint, cancellable: cancelled, it has taken nothing.
        """
        item: T_co = await in_trio_taking(self._home.receive, self._home.put_back)
        return item

    @trio.lowlevel.enable_ki_protection
    def receive_nowait(self) -> T_co:
        """Return the next item without waiting.

        Raises:
            trio.WouldBlock: No item has arrived.
            trio.EndOfChannel, trio.ClosedResourceError, PayloadError: See `receive`.
        """
        item: T_co = in_trio_now(self._home.receive_nowait)()
        return item

    @trio.lowlevel.enable_ki_protection
    def close(self) -> None:
        """Close the channel, at once and without a checkpoint: sending to it fails from now on. Idempotent.

        Items that arrived and were not received are lost.
        """
        in_trio_now(self._home.close)()

    @trio.lowlevel.enable_ki_protection
    async def aclose(self) -> None:
        """Close the channel; see `close`. A checkpoint."""
        await in_trio(self._aclose)()

    async def _aclose(self) -> None:
        self._home.close()
        await trio.lowlevel.checkpoint()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse: a receiver stays where its channel was opened."""
        raise TypeError(
            "a receiver stays in the process that opened its channel, got one to be sent or copied: open the channel "
            "in the receiving process, and send its port here"
        )

    def __repr__(self) -> str:
        return f"<receiver of channel {self._home.number}{', closed' if self._home.is_closed else ''}>"
