"""Sending end of a channel: a port can be sent to any process and keeps its channel open while it lives."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn, TypeVar

import msgspec
import trio

from trimesh import limits
from trimesh._routing.channel_accounts import Share, port_window
from trimesh._routing.collector import SendWindow
from trimesh._runtime.actors.context import refuse_if_forked
from trimesh._runtime.channels.receiver import Receiver
from trimesh._runtime.peers.peer import Parcel, Peer
from trimesh._runtime.tasks.crossing import in_trio, in_trio_now, wake
from trimesh._runtime.values.codec import place_payload
from trimesh._wire import messages
from trimesh._wire.memory import Sink
from trimesh._wire.typed.annotations import ItemType, item_type_described
from trimesh._wire.typed.codec import DecodeSource, ValueKind, register_kind
from trimesh.errors import ProtocolError
from trimesh.ids import ProcId

if TYPE_CHECKING:
    from trimesh._runtime.channels.registry import Channels


T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class Port(trio.abc.SendChannel[T_contra], Generic[T_contra]):
    """The sending end of a channel.

    It can be sent as an argument or a result of an endpoint, as an item of another channel, or inside of one: a port
    of the same channel arrives. All ports of one process share one window of `capacity` items. The receiver gets
    `EndOfChannel` when every process has closed or dropped its ports, or has died, and no message carries one.

    Attributes:
        capacity: Items of each process that may wait for the receiver.
    """

    __slots__ = ("__weakref__", "_holding", "_is_closed")

    def __init__(self, holding: Holding | None) -> None:
        self._is_closed = holding is None
        self._holding = holding
        if holding is not None:
            holding.share.refer()

    @property
    def holding(self) -> Holding | None:
        """State of the channel in this process, or None if this port is closed."""
        return None if self._is_closed else self._holding

    @property
    def capacity(self) -> int:
        """Items of each process that may wait for the receiver."""
        return 0 if self._holding is None else self._holding.capacity

    @trio.lowlevel.enable_ki_protection
    async def send(self, value: T_contra) -> None:
        """Send an item; wait while `capacity` items of this process, or `limits.MAILBOX_BYTES`, wait for the receiver.

        With a capacity of 0 it returns when the receiver has taken the item. Items of one process arrive in the order
        in which they were sent. Items are copied: after this returns their memory may be written to.

        Raises:
            trio.ClosedResourceError: This port is closed.
            trio.BrokenResourceError: The receiver is closed, or its process has ended; then its death is the cause.
            TypeError: The item cannot be serialised; with pickle="off" also: it does not fit the type of the channel.
            PayloadError: With pickle="off": the type of the channel cannot be imported in this process.

        Blocking: a checkpoint, cancellable: cancelled, it has sent nothing. With a capacity of 0 a cancel recalls the
        item; if the receiver's process does not answer that within `limits.CANCEL_ACK_SECONDS`, it may still take it.
        """
        await in_trio(self._send)(value)

    async def _send(self, value: T_contra) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        holding = self._check()
        parcel = self._encode(holding, value)
        if holding.home.link is None:
            refuse_if_forked()
            await holding.channels.connect(holding.home)
            self._check()
        await holding.send(self, parcel)

    @trio.lowlevel.enable_ki_protection
    def send_nowait(self, value: T_contra) -> None:
        """Send an item now.

        Raises:
            trio.WouldBlock: There is no room for it, or no link to the receiver's process yet; nothing was sent. Always
                with a capacity of 0, because only the receiver's process knows whether a task waits there.
            trio.ClosedResourceError, trio.BrokenResourceError, TypeError, PayloadError: See `send`.
        """
        in_trio_now(self._send_nowait)(value)

    def _send_nowait(self, value: T_contra) -> None:
        holding = self._check()
        parcel = self._encode(holding, value)
        if holding.home.link is None:
            refuse_if_forked()
            holding.channels.start_connecting(holding.home)
        if not holding.has_room(parcel.nbytes):
            raise trio.WouldBlock
        holding.transmit(parcel)

    @trio.lowlevel.enable_ki_protection
    def clone(self) -> Port[T_contra]:
        """Return another port of the same channel, to be closed separately.

        Raises:
            trio.ClosedResourceError: This port is closed.
        """
        if self._is_closed:
            self._raise_closed()
        return in_trio_now(Port[T_contra])(self._holding)

    @trio.lowlevel.enable_ki_protection
    def close(self) -> None:
        """Close this port, at once and without a checkpoint. Items that were sent still arrive. Idempotent."""
        in_trio_now(self._close)()

    def _close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        assert self._holding is not None
        self._holding.closed(self, self._raise_closed)
        self._holding.channels.release(self._holding)

    @trio.lowlevel.enable_ki_protection
    async def aclose(self) -> None:
        """Close this port; see `close`. A checkpoint."""
        await in_trio(self._aclose)()

    async def _aclose(self) -> None:
        self._close()
        await trio.lowlevel.checkpoint()

    def _check(self) -> Holding:
        if self._is_closed:
            self._raise_closed()
        assert self._holding is not None
        self._holding.check()
        return self._holding

    def _raise_closed(self) -> NoReturn:
        raise trio.ClosedResourceError("this port is closed")

    def _encode(self, holding: Holding, value: object) -> Parcel:
        encoded = holding.channels.proc.values.encode_sent(value, holding.item_type)
        payload, bodies = place_payload(encoded)
        head = messages.encode(messages.PortItem(holding.channel, payload))
        return Parcel(head, bodies, encoded.definitions, encoded.nbytes, encoded.attachments)

    def __reduce_ex__(self, protocol: object) -> Any:
        """Refuse: only messages carry ports, so that they are counted."""
        raise TypeError(
            "a port can only be sent in a message, as an argument, a result or an item, got one to be pickled or "
            "copied: for another port here, use port.clone()"
        )

    def __del__(self) -> None:
        # May run in the middle of any other code, so it only records the release.
        with contextlib.suppress(AttributeError):  # not fully initialised
            if not self._is_closed and self._holding is not None:
                self._is_closed = True
                self._holding.channels.note_release(self._holding)

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"of channel {self._holding and self._holding.channel}"
        return f"<port {state}>"


# ---- holding ---------------------------------------------------------------------------------------------------------

# State of a channel in one sending process: one window for all its ports of the channel.
#
# Senders wait here, in order, for credits of the receiver's process. A waiting item has not been sent, so a cancel
# withdraws it. With capacity 0 an item is sent at once and waits in the receiver's process until it is taken; a cancel
# recalls it, and `send` ends when the reply has arrived.


class Sending:
    """One `send` that has not returned.

    Attributes:
        port: Port that sends; closing it ends this.
        task: The parked task, or None once it was woken.
        cancel: Raises the cancel, once the item has been recalled.
        raising: Raises the error that it ends with, if it fails.
        over: Set when it was woken.
        began_at: When it was called.
    """

    __slots__ = ("began_at", "cancel", "over", "parcel", "port", "raising", "task")

    def __init__(self, port: object, parcel: Parcel) -> None:
        self.port = port
        self.parcel = parcel
        self.task: trio.lowlevel.Task | None = None
        self.cancel: Callable[[], NoReturn] | None = None
        self.raising: Callable[[], object] | None = None
        self.over = trio.Event()
        self.began_at: float = trio.current_time()

    async def park(self, abort: Callable[[Callable[[], NoReturn]], trio.lowlevel.Abort]) -> None:
        """Wait for `wake`; raise the error that it passes."""
        self.task = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(abort)
        if self.raising is not None:
            self.raising()

    def wake(self, raising: Callable[[], object] | None = None) -> None:
        """End the wait, if there is one."""
        task, self.task = self.task, None
        if task is not None:
            self.over.set()
            self.raising = raising
            wake(task)


class Holding:
    """State of one channel in one process, shared by its ports there.

    Attributes:
        home: Process of the receiver.
        channel: Number of the channel there.
        number: Number that this process gave to this holding.
        capacity: Items that may wait at the receiver.
        item_type: Type of the items, if nothing is pickled and the channel was opened for a type.
        share: Counts the references to it in this process.
        is_ended: Whether the receiver accepts no more items.
    """

    __slots__ = (
        "_offered",
        "_waiting",
        "_window",
        "capacity",
        "channel",
        "channels",
        "home",
        "is_ended",
        "item_type",
        "number",
        "share",
    )

    def __init__(self, channels: Channels, home: Peer, channel: int, number: int, capacity: int) -> None:
        self.channels = channels
        self.home = home
        self.channel = channel
        self.number = number
        self.capacity = capacity
        self.item_type: ItemType | None = None
        self.share = Share()
        self.is_ended = False
        self._waiting: deque[Sending] = deque()
        self._offered: Sending | None = None
        self._window: SendWindow = port_window(self.capacity)

    @property
    def key(self) -> tuple[ProcId, int]:
        """Key of the channel, unique in the family."""
        return self.home.proc_id, self.channel

    # ---- sending ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check that the receiver still exists.

        Raises:
            trio.BrokenResourceError: It is closed, or its process has ended; then its death is the cause.
        """
        if self.home.death is not None:
            text = "the process that receives from this channel has ended"
            raise trio.BrokenResourceError(text) from self.home.death(maybe_executed=True)
        if self.is_ended:
            raise trio.BrokenResourceError("the receiver of this channel is closed")

    def has_room(self, nbytes: int) -> bool:
        """Return whether an item would be sent at once and queued at the receiver."""
        return self.capacity > 0 and self._has_room(nbytes)

    def _has_room(self, nbytes: int) -> bool:
        return self.home.link is not None and not self._waiting and self._window.has_room(nbytes)

    async def send(self, port: object, parcel: Parcel) -> None:
        """Send an item as soon as there is room; with capacity 0, return when it has been taken."""
        one = Sending(port, parcel)
        if not self._has_room(parcel.nbytes):
            self._waiting.append(one)
        else:
            self._send_one(one)
            if self.capacity > 0:
                await trio.lowlevel.cancel_shielded_checkpoint()
                return
        await one.park(partial(self._abort, one))

    def _send_one(self, one: Sending) -> None:
        self.transmit(one.parcel)
        if self.capacity == 0:
            self._offered = one

    def transmit(self, parcel: Parcel) -> None:
        """Send a copy of an item; its buffers may be changed at once."""
        self._window.sent(parcel.nbytes)
        copied = msgspec.structs.replace(parcel, bodies=[bytes(body) for body in parcel.bodies])
        left = self.home.send(copied)
        if left is not None:
            self.channels.sent(left)

    def send_waiting(self) -> None:
        """Send waiting items as far as there is room."""
        while self.home.link is not None and self._waiting and self._window.has_room(self._waiting[0].parcel.nbytes):
            one = self._waiting.popleft()
            self._send_one(one)
            if self.capacity > 0:
                one.wake()

    def blocked(self) -> Iterator[Sending]:
        """Yield the waiting senders; first the one whose sent item is not yet taken, if any."""
        if self._offered is not None:
            yield self._offered
        yield from self._waiting

    def _abort(self, one: Sending, cancel: Callable[[], NoReturn]) -> trio.lowlevel.Abort:
        """Cancel a sender: withdraw a waiting item, or recall a sent one; then the reply ends the wait."""
        if one in self._waiting:
            self._waiting.remove(one)
            self.send_waiting()  # it may have blocked later, smaller ones
            return trio.lowlevel.Abort.SUCCEEDED
        one.cancel = cancel
        self.channels.tell(self.home, messages.Recall(self.channel))
        self.channels.proc.nursery.start_soon(self._give_up, one)
        return trio.lowlevel.Abort.FAILED

    @trio.lowlevel.enable_ki_protection
    async def _give_up(self, one: Sending) -> None:
        """Abandon an unanswered recall, as a cancelled call is abandoned (rule C2)."""
        try:
            with trio.move_on_after(limits.CANCEL_ACK_SECONDS):
                await one.over.wait()
        finally:
            one.wake(one.cancel)

    # ---- news of the receiver --------------------------------------------------------------------------------

    def room(self, message: messages.Room) -> None:
        """Update the credits by the receiver's count.

        Raises:
            ProtocolError: The count exceeds the items sent.
        """
        if not self._window.acknowledged(message.taken):
            return
        one, self._offered = self._offered, None
        if one is not None:
            one.wake(one.cancel if message.recalled else None)
        self.send_waiting()

    def end(self) -> None:
        """End all senders: the receiver is closed or its process is gone."""
        self.is_ended = True
        one, self._offered = self._offered, None
        if one is not None:
            one.wake(one.cancel or self.check)
        while self._waiting:
            self._waiting.popleft().wake(self.check)

    def closed(self, port: object, raising: Callable[[], NoReturn]) -> None:
        """End the senders of a port that has been closed."""
        for one in [one for one in self._waiting if one.port is port]:
            self._waiting.remove(one)
            one.wake(raising)
        offered = self._offered
        if offered is not None and offered.port is port:
            self.channels.tell(self.home, messages.Recall(self.channel))
            offered.wake(raising)
        self.send_waiting()


class CarriedPorts:
    """References to the ports of a received message, held until this object is dropped."""

    __slots__ = ("channels", "holdings")

    def __init__(self, channels: Channels) -> None:
        self.channels = channels
        self.holdings: list[Holding] = []

    def __del__(self) -> None:
        for holding in self.holdings:
            self.channels.note_release(holding)


# ---- encoding of both ends of a channel in a family where nothing is pickled (`pickle="off"`) ------------------------


def _take_port_apart(port: Port[Any], sink: Sink) -> tuple[Any, ...]:
    if port.holding is None:
        raise TypeError("a port must be open to be sent, got a closed one")
    rebuild, parts = port.holding.channels.reducers()[Port](port, sink)
    item_type = port.holding.item_type
    return rebuild.__module__, rebuild.__qualname__, None if item_type is None else item_type.described, *parts


def _put_port_together(source: DecodeSource, module: Any, name: Any, described: Any, *parts: Any) -> Any:
    rebuild = source.bindings.get((module, name))
    if rebuild is None:
        raise ProtocolError(f"a port must be rebuilt by the function for ports of this process, got {module}.{name}")
    item_type = None if described is None else item_type_described(described, may_import=source.may_import)
    port: Port[Any] = rebuild(*parts)
    if port.holding is not None and port.holding.item_type is None:
        port.holding.item_type = item_type
    return port


def _refuse_receiver(_: DecodeSource, *parts: Any) -> Receiver[Any]:
    raise ProtocolError(f"a receiver stays where its channel was opened, got one with {parts!r:.100}")


_KINDS: Final = (
    ValueKind("receiver", Receiver, lambda receiver, _: receiver.__reduce_ex__(5), _refuse_receiver),
    ValueKind("port", Port, _take_port_apart, _put_port_together, stands_for=lambda cls: cls is trio.abc.SendChannel),
)


def register_kinds() -> None:
    """Register the kinds of a receiver and of a port. Idempotent."""
    for kind in _KINDS:
        register_kind(kind)
