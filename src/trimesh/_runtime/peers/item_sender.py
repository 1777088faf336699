"""The producer's end of a stream: its items go to the consumer, as far ahead as its window allows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import trio

from trimesh import limits
from trimesh._routing.collector import SendWindow
from trimesh._runtime.peers.parcel import Parcel
from trimesh._runtime.tasks.crossing import wake
from trimesh._runtime.tasks.deadline import effective_deadline
from trimesh._runtime.values.payload import place_payload
from trimesh._wire import messages

if TYPE_CHECKING:
    from trimesh._runtime.peers.incoming import IncomingCall
    from trimesh._wire.pickled.payload import Encoded


class ItemSender:
    """The producer's end of one stream.

    Attributes:
        window: Items that have been sent and not been taken.
        is_bounded: Whether the generator had a deadline when it began to wait for its consumer.
    """

    __slots__ = ("_task", "is_bounded", "window")

    def __init__(self, window: int) -> None:
        self.window = SendWindow(window, limits.STREAM_BYTES, limits.STREAM_REPORT_BYTES)
        self._task: trio.lowlevel.Task | None = None
        self.is_bounded = False

    def taken(self, total: int) -> None:
        """Learn how many items the consumer has taken.

        Raises:
            ProtocolError: More than were sent.
        """
        if self.window.acknowledged(total) and self._task is not None:
            task, self._task = self._task, None
            wake(task)

    async def send(self, call: IncomingCall, value: Encoded) -> None:
        """Send one item; return when the generator may go on to the next.

        The buffers of the item are the generator's again when this returns or raises.
        """
        nbytes = value.nbytes
        while not self.window.has_room(nbytes):
            await self._wait(call)
        payload, bodies = place_payload(value)
        head = messages.encode(messages.Item(call.call_id, payload))
        lent = call.peer.send(Parcel(head, bodies, value.definitions, nbytes, value.attachments))
        self.window.sent(nbytes)
        if lent is not None:
            await _wait_until_left(lent)
        while self.window.waiting >= self.window.messages_max:
            await self._wait(call)

    @property
    def is_waiting(self) -> bool:
        """Whether the generator waits for its consumer."""
        return self._task is not None

    async def _wait(self, call: IncomingCall) -> None:
        self._task = trio.lowlevel.current_task()
        self.is_bounded = effective_deadline() != math.inf
        call.peer.proc.deadlocks.producer_waits(call)

        def abort(_: object) -> trio.lowlevel.Abort:
            self._task = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)


async def _wait_until_left(lent: trio.Event) -> None:
    """Wait until the bytes of an item have left; for a moment also when cancelled, lest clean-up writes into them."""
    try:
        await lent.wait()
    except trio.Cancelled:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + limits.ITEM_LEAVE_SECONDS):
            await lent.wait()
        raise
