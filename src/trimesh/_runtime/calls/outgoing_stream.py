r"""Outgoing stream: a call whose ranks send many values before their one terminal frame.

    open --next()--> ... --every rank has settled--> at its end
       \--------------close()----------------------> closed

OS-1 `next` returns all items that a rank sent before its terminal frame before the stream is at its end.
OS-2 with `fail_fast` the first failure cancels the other ranks, at once and whether or not a task waits in `next`.
OS-3 `close` returns when every rank has unwound, or was silent for `patience` seconds after its cancel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import trio

from trimesh._routing.collector import POSTED, Merge, MergedItem, Outcome, Returned
from trimesh._runtime.calls.outgoing import AnyWait, OutgoingCall
from trimesh._runtime.peers.peer import Target
from trimesh._runtime.tasks.background import effective_deadline
from trimesh._runtime.values.codec import take_payload
from trimesh._transport.interface import Lane
from trimesh._wire import messages
from trimesh.errors import ProtocolError
from trimesh.ids import CallId

if TYPE_CHECKING:
    from trimesh._runtime.calls.invocation import Request
    from trimesh._runtime.life.proc import Proc
    from trimesh._runtime.peers.peer import Peer


class OutgoingStream(OutgoingCall):
    """A stream that was opened and has not ended.

    Attributes:
        window: Items that each rank may be ahead, or 0 when each has one result.
        consumer: Task that opened it or, later, last waited for an item.
        is_closed: Whether the consumer has left.
        on_over: Called once every rank has settled, also while no task waits for items.
    """

    __slots__ = ("_depth", "_merge", "_opener", "_silent_at", "consumer", "is_closed", "on_over", "window")

    window: int
    consumer: trio.lowlevel.Task
    is_closed: bool
    on_over: Callable[[], None] | None
    _merge: Merge
    _opener: trio.lowlevel.Task
    _depth: int
    _silent_at: float

    def __init__(
        self,
        proc: Proc,
        call_id: CallId,
        request: Request,
        targets: Sequence[Target],
        *,
        fail_fast: bool,
        budget: float | None = None,
        window: int = 0,
    ) -> None:
        super().__init__(proc, call_id, request, targets, fail_fast=fail_fast, budget=budget)
        self.window = window
        self.consumer = self._opener = trio.lowlevel.current_task()
        self._depth = len(self._opener.child_nurseries)
        self.is_closed = False
        self.on_over = None
        self._merge = Merge(len(targets), window or 1)
        self._silent_at = math.inf

    @property
    def any_wait(self) -> AnyWait:
        return self

    @property
    def waiting_task(self) -> trio.lowlevel.Task | None:
        return self.waiter  # an item, or the end, has woken it

    @property
    def only_consumer(self) -> trio.lowlevel.Task | None:
        """The only task that can take items, or None if a task that it started may take some."""
        task = self.consumer
        if task is not self._opener or any(nursery.child_tasks for nursery in task.child_nurseries[self._depth :]):
            return None
        return task

    def received_from(self, peer: Peer) -> int:
        """Return how many items of a rank have arrived."""
        return self._merge.received(self._index[peer])

    def reported_to(self, peer: Peer) -> int:
        """Return how many taken items were reported to a rank."""
        return self._merge.reported(self._index[peer])

    @property
    def part_of(self) -> trio.lowlevel.Task:
        return self.consumer

    # ---- arrivals --------------------------------------------------------------------------------------------

    def item(self, peer: Peer, payload: bytes, bodies: list[memoryview], carried: object = None) -> None:
        """Receive one item of a rank.

        Raises:
            ProtocolError: The rank is not part of the stream, has ended, or is too far ahead.
        """
        index = self._index.get(peer)
        if not self.window or index is None or not self.collector.is_running(index):
            raise ProtocolError(f"items must come from running ranks of a stream, got another for call {self.call_id}")
        self._merge.put(MergedItem(index, *take_payload(payload, bodies), carried))
        self._wake()

    def terminal(self, peer: Peer, outcome: Outcome, dequeued: int) -> None:
        """Process a terminal frame; the result of a non-generator endpoint is its one item."""
        if not isinstance(outcome, Returned):
            super().terminal(peer, outcome, dequeued)
            return
        super().terminal(peer, POSTED, dequeued)
        if not self.window:
            self._merge.put(MergedItem(self._index[peer], outcome.payload, outcome.bodies, outcome.carried))

    def _settle(self, index: int, outcome: Outcome) -> bool:
        is_first = super()._settle(index, outcome)
        self._wake()
        if self.on_over is not None and self.collector.is_complete:
            self.on_over()
        return is_first

    def cancel_rest(self, reason: str) -> None:
        """Cancel as `OutgoingCall.cancel_rest`; the ranks must acknowledge within a bound from now."""
        super().cancel_rest(reason)
        self._set_silent_at()

    def peer_stalled(self) -> None:
        if self.cancelled_at is not None:
            self._set_silent_at()
            self._wake()

    def _set_silent_at(self) -> None:
        assert self.cancelled_at is not None
        self._silent_at = min(self._silent_at, self.cancelled_at + self.patience)

    # ---- the consumer ----------------------------------------------------------------------------------------

    def take(self) -> MergedItem | None:
        """Return the next item if one has arrived and the consumer has not left, else None."""
        if self.is_closed or not self._merge:
            return None
        item, total = self._merge.take()
        if total is not None and self.window:
            self._report(item.index, total)
        return item

    async def next(self) -> MergedItem | None:
        """Return the next item; None when every rank has settled or failed to acknowledge a cancel in time.

        One task at a time may call it.

        Raises:
            trio.ClosedResourceError: The consumer has left the stream.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        self.consumer = trio.lowlevel.current_task()
        while not self.is_closed:
            item = self.take()
            if item is not None:
                await trio.lowlevel.cancel_shielded_checkpoint()
                return item
            if self.collector.is_complete or trio.current_time() >= self._silent_at:
                await trio.lowlevel.cancel_shielded_checkpoint()
                return None
            self.is_bounded = effective_deadline() != math.inf
            self.proc.deadlocks.awaits_any(self)
            with trio.CancelScope(deadline=self._silent_at):
                await self._park()
        raise trio.ClosedResourceError("the block of this stream has been left")

    def _report(self, index: int, total: int) -> None:
        link = self.targets[index].peer.link
        if link is not None:
            link.send(messages.encode(messages.Taken(self.call_id, total)), lane=Lane.CONTROL)

    async def close(self, reason: str) -> None:
        """Cancel running ranks; wait, shielded, until they unwind. Idempotent; no checkpoint if complete."""
        self.is_closed = True
        self._merge.close()
        self._wake()
        try:
            if not self.collector.is_complete:
                self.cancel_rest(reason)
                with trio.CancelScope(shield=True) as scope:
                    while not self.collector.is_complete:
                        scope.deadline = self._silent_at
                        await self._park()
        finally:
            self.forget()


def serve_streams(proc: Proc) -> None:
    """Register the message handlers of streams."""

    def take_item(peer: Peer, message: messages.Item, bodies: list[memoryview]) -> None:
        stream = proc.calls.get(message.call)
        carried = peer.take_carried()
        if stream is None:
            proc.dropped_replies += 1
        elif isinstance(stream, OutgoingStream):
            stream.item(peer, message.payload, bodies, carried)
        else:
            raise ProtocolError(f"an item must belong to a stream, got one for call {message.call}")

    def take_taken(peer: Peer, message: messages.Taken, bodies: list[memoryview]) -> None:
        del bodies
        call = peer.inbound.get(message.call)
        if call is None:
            return  # the stream has ended meanwhile
        if call.items is None:
            raise ProtocolError(f"a count of taken items must belong to a stream, got one for call {message.call}")
        call.items.taken(message.count)

    proc.routes[messages.Item] = take_item
    proc.routes[messages.Taken] = take_taken
