"""What one process holds of a channel whose receiver may be elsewhere: one window for all its ports of the channel.

Senders wait here, in order, for the credits of the receiver's process; what waits here has not been sent, so a cancel
takes it back. An item of a channel without room has been sent and waits over there until it is taken; a cancel recalls
it, and `send` ends when the answer is in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import msgspec
import trio

from trimesh import limits
from trimesh._routing.channel_accounts import Share, port_window
from trimesh._routing.collector import SendWindow
from trimesh._runtime.peers.parcel import Parcel
from trimesh._runtime.peers.peer import Peer
from trimesh._runtime.tasks.crossing import wake
from trimesh._wire import messages
from trimesh._wire.typed.annotations import ItemType
from trimesh.ids import ProcId

if TYPE_CHECKING:
    from trimesh._runtime.channels.registry import Channels


class Sending:
    """One `send` that has not returned.

    Attributes:
        port: Who sends: closing it ends this.
        task: Parked here, or None when it has been woken.
        cancel: Raises what has cancelled it, once its item has been recalled.
        raising: Raises what it ends with, if it fails.
        over: Set when it has been woken.
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
        """Wait until `wake`, and raise what that says."""
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
    """The ports of one channel in one process.

    Attributes:
        home: Where the receiver is.
        channel: The channel's number there.
        number: This process's number for this holding.
        capacity: Items that may wait there for the receiver.
        item_type: What they are, where nothing is pickled and the channel was opened for a type.
        share: Whether anything here refers to it.
        is_ended: Whether the receiver takes no items any more.
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
        """The channel in the whole family."""
        return self.home.proc_id, self.channel

    # ---- sending ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Refuse to send to a receiver that is no more.

        Raises:
            trio.BrokenResourceError: It is closed, or its process is gone; then the cause says how.
        """
        if self.home.death is not None:
            text = "the process that receives from this channel has ended"
            raise trio.BrokenResourceError(text) from self.home.death(maybe_executed=True)
        if self.is_ended:
            raise trio.BrokenResourceError("the receiver of this channel is closed")

    def has_room(self, nbytes: int) -> bool:
        """Return whether an item would go out at once, and be kept there."""
        return self.capacity > 0 and self._has_room(nbytes)

    def _has_room(self, nbytes: int) -> bool:
        return self.home.link is not None and not self._waiting and self._window.has_room(nbytes)

    async def send(self, port: object, parcel: Parcel) -> None:
        """Send an item as soon as there is room; without any, return when it has been taken."""
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
        """Send an item; what it was made from may be changed again at once."""
        self._window.sent(parcel.nbytes)
        copied = msgspec.structs.replace(parcel, bodies=[bytes(body) for body in parcel.bodies])
        left = self.home.send(copied)
        if left is not None:
            self.channels.sent(left)

    def send_waiting(self) -> None:
        """Send what waits, as far as there is room."""
        while self.home.link is not None and self._waiting and self._window.has_room(self._waiting[0].parcel.nbytes):
            one = self._waiting.popleft()
            self._send_one(one)
            if self.capacity > 0:
                one.wake()

    def blocked(self) -> Iterator[Sending]:
        """Yield the senders that wait: first the one whose item is over there and not taken, if there is one."""
        if self._offered is not None:
            yield self._offered
        yield from self._waiting

    def _abort(self, one: Sending, cancel: Callable[[], NoReturn]) -> trio.lowlevel.Abort:
        """Cancel a sender: what waits here is taken back, what waits at home is asked for; the answer ends the wait."""
        if one in self._waiting:
            self._waiting.remove(one)
            self.send_waiting()  # it may have kept later, smaller ones waiting
            return trio.lowlevel.Abort.SUCCEEDED
        one.cancel = cancel
        self.channels.tell(self.home, messages.Recall(self.channel))
        self.channels.proc.nursery.start_soon(self._give_up, one)
        return trio.lowlevel.Abort.FAILED

    @trio.lowlevel.enable_ki_protection
    async def _give_up(self, one: Sending) -> None:
        """Leave a recall that is not answered, as a cancelled call is left (rule C2)."""
        try:
            with trio.move_on_after(limits.CANCEL_ACK_SECONDS):
                await one.over.wait()
        finally:
            one.wake(one.cancel)

    # ---- news of the receiver --------------------------------------------------------------------------------

    def room(self, message: messages.Room) -> None:
        """Take the receiver's count.

        Raises:
            ProtocolError: It counts more than was sent.
        """
        if not self._window.acknowledged(message.taken):
            return
        one, self._offered = self._offered, None
        if one is not None:
            one.wake(one.cancel if message.recalled else None)
        self.send_waiting()

    def end(self) -> None:
        """Learn that the receiver takes nothing any more, or that its process is gone: every sender learns it."""
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
