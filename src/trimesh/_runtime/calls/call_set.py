"""Call sets: many calls, each to one actor, awaited by a single task.

The task that drains the links records the end of a call and wakes the waiting task, which decodes the result.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import trio

from trimesh import limits
from trimesh._routing.collector import Outcome, Returned
from trimesh._runtime.calls.invocation import Request, budget_until, encode_request
from trimesh._runtime.calls.outgoing import AnyWait, OutgoingCall
from trimesh._runtime.peers.peer import Outbox, Parcel, Peer, Target
from trimesh._wire import messages
from trimesh._wire.messages import Calls
from trimesh.ids import AGENT, CallId

if TYPE_CHECKING:
    from trimesh._runtime.life.proc import Proc


Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
SendCall: TypeAlias = Callable[[Any, Arguments], None]
"""Sends a call, given the key by which the set's user identifies it, and its arguments; does nothing once the set is
cancelled."""


class SetCall(OutgoingCall):
    """One call of a set.

    Attributes:
        key: Identifies the call to the set's user.
    """

    __slots__ = ("_has_ended", "_set", "key")

    key: Any
    _set: CallSet
    _has_ended: bool

    def __init__(
        self,
        proc: Proc,
        call_id: CallId,
        request: Request,
        targets: Sequence[Target],
        key: Any,
        calls: CallSet,
        budget: float | None,
        started_at: float,
    ) -> None:
        super().__init__(proc, call_id, request, targets, fail_fast=False, budget=budget, started_at=started_at)
        self.key = key
        self._set = calls
        self._has_ended = False

    @property
    def consumer(self) -> trio.lowlevel.Task:
        """The task that waits for the calls of the set."""
        return self._set.consumer

    @property
    def any_wait(self) -> AnyWait:
        return self._set

    @property
    def part_of(self) -> trio.lowlevel.Task:
        return self._set.consumer

    def left(self, position: int, lent: trio.Event | None) -> None:
        """Note that the call was sent in a batch; see `Link.send`."""
        self.collector.positions[0] = position
        if lent is not None:
            self._lent = (lent,)

    def terminal(self, peer: Peer, outcome: Outcome, dequeued: int) -> None:
        """Process the terminal frame as `OutgoingCall.terminal` does; a value, the common outcome, in one function."""
        collector, box = self.collector, self._boxes[0]
        is_running = collector.positions[0] and collector.outcomes[0] is None and peer is box.peer
        if not is_running or type(outcome) is not Returned:
            super().terminal(peer, outcome, dequeued)
            return
        collector.outcomes[0] = outcome
        collector.remaining = 0
        peer.calls.pop(self, None)
        box.load -= 1
        if not self._has_ended:
            self._has_ended = True
            self.proc.calls.pop(self.call_id, None)
            self._set.end(self)
        box.acknowledged(dequeued)

    def check_end(self) -> None:
        """Notify the set once when the call is complete."""
        if not (self.collector.remaining or self._has_ended):
            self._has_ended = True
            self.forget()
            self._set.end(self)

    def give_up(self) -> None:
        """Abandon the call; a late reply is dropped and counted."""
        self._has_ended = True
        self.forget()

    def peer_stalled(self) -> None:
        self._set.look_at_silence()

    _wake = check_end


class CallBatch:
    """Calls to one actor that are sent as one message (docs/design/calls.md).

    CB-1 it is open only while its task runs without waiting, and is sent before any other message to the actor.
    CB-2 a call uses credits of its actor when it is added, and gets its position on the link when the batch is sent.

    Attributes:
        box: Outbox that sends them.
        budget: Seconds left of the caller's deadline, or None.
    """

    __slots__ = ("_begin", "_calls", "_nbytes", "_parts", "box", "budget", "request")

    def __init__(self, box: Outbox, request: Request, budget: float | None) -> None:
        self.box = box
        self.request = request
        self.budget = budget
        self._begin = box.peer.calls_sent
        self._calls: list[SetCall] = []
        self._parts: list[tuple[int, bytes]] = []
        self._nbytes = 0

    def add(self, call: SetCall, payload: bytes) -> bool:
        """Add a call, whose credits are counted; return False, without effect, if there is no room for it."""
        parts, nbytes = self._parts, self._nbytes + len(payload)
        if len(parts) >= limits.CALLS_PER_MESSAGE or nbytes > limits.CALLS_PER_MESSAGE_BYTES:
            return False
        parts.append((call.call_id, payload))
        self._calls.append(call)
        self._nbytes = nbytes
        call.collector.positions[0] = self._begin + len(parts)
        self.box.load += 1
        return True

    def leave(self) -> None:
        """Send the calls if they were not sent yet."""
        box, request, parts = self.box, self.request, self._parts
        if box.batch is not self:
            return
        box.batch = None
        peer = box.peer
        position = peer.calls_sent
        peer.calls_sent = position + len(parts)
        lent = None
        if peer.link is not None:  # else the process is gone, and the calls were failed
            head = Calls(box.mesh, request.endpoint, self.budget, tuple(parts), request.view, request.caller)
            lent = peer.link.send(messages.encode(head), flow=box.mesh)
        if lent is not None or position != self._begin:  # other messages were sent to the process meanwhile
            for call in self._calls:
                position += 1
                call.left(position, lent)


class CallSet:
    """Running calls, and ended calls that were not yet collected.

    Attributes:
        consumer: Task that created the set or, later, waited last.
        running: Calls that have not ended, in the order of their start.
        ended: Calls that have ended, in the order of their end.
        on_failure: Called with each call that fails, by the task that drains the links.
        cancelled_at: When the running calls were cancelled (Trio time).
        silent_at: When cancelled calls count as silent (Trio time).
        is_all: Returns whether the consumer waits and only the running calls can end its wait.
        is_bounded: Whether the consumer had a deadline when it began to wait.
        number: Number given by a deadlock search; 0 before.
    """

    __slots__ = (
        "_news",
        "_open",
        "cancelled_at",
        "consumer",
        "ended",
        "is_all",
        "is_bounded",
        "number",
        "on_failure",
        "running",
        "silent_at",
    )

    def __init__(
        self,
        on_failure: Callable[[SetCall], None],
        is_all: Callable[[], bool],
    ) -> None:
        self.consumer: trio.lowlevel.Task = trio.lowlevel.current_task()
        self.running: dict[SetCall, None] = {}
        self.ended: deque[SetCall] = deque()
        self.on_failure = on_failure
        self.cancelled_at: float = math.inf
        self.silent_at: float = math.inf
        self.is_all = is_all
        self.is_bounded = False
        self.number = 0
        self._news: trio.Event | None = None
        self._open: list[CallBatch] = []

    @property
    def is_cancelled(self) -> bool:
        """True once the running calls were cancelled; no further call may begin."""
        return self.silent_at != math.inf

    @property
    def waiting_task(self) -> trio.lowlevel.Task | None:
        return None if self.is_cancelled or self.ended or not self.is_all() else self.consumer

    def begin(
        self,
        proc: Proc,
        target: Target,
        request: Request,
        key: Any,
        deadline: float,
        arguments: Arguments | None = None,
    ) -> None:
        """Send a call.

        Args:
            request: Endpoint and defaults; many calls may share one.
            key: Identifies the call to the set's user.
            deadline: When its budget ends (Trio time).
            arguments: Replace those of the request.

        Raises:
            TypeError: An argument cannot be serialised; nothing was sent.
        """
        budget = None if deadline == math.inf else budget_until(proc, deadline)
        call_id = proc.new_call_id()
        parcel = encode_request(proc, request, call_id, target.mesh, budget, arguments=arguments)
        self._begin(SetCall(proc, call_id, request, (target,), key, self, budget, proc.now()), parcel)

    def sender(self, proc: Proc, target: Target, request: Request, deadline: float) -> SendCall:
        """Return a function that sends calls to one actor as `begin` does, but batched with the following ones.

        Call `leave` before the task waits or runs code that may take long.
        """
        box, targets, spec = target.peer.outbox(target.mesh), (target,), request.spec
        budget = None if deadline == math.inf else budget_until(proc, deadline)
        if spec is None or request.definitions or target.peer.link is None:
            return self.sender_alone(proc, target, request, deadline)
        # Hot path of every item: a closure takes a third of the time of methods.
        new_call_id, calls = proc.new_call_id, proc.calls
        encode = proc.values.encode_call
        running, pending, try_sent = self.running, box.peer.calls, box.window.try_sent
        nbytes_max, now = limits.CALLS_PER_MESSAGE_BYTES, proc.now()
        batch: CallBatch | None = None

        def send(key: Any, arguments: Arguments) -> None:
            nonlocal batch
            if self.silent_at != math.inf:  # `is_cancelled`
                return
            value = encode(*arguments, request, spec)
            payload = value.payload
            nbytes = len(payload)
            call = SetCall(proc, new_call_id(), request, targets, key, self, budget, now)
            is_alone = value.buffers or value.definitions or value.attachments or nbytes > nbytes_max
            if is_alone or box.is_waiting or not try_sent(nbytes):
                self._begin(call, encode_request(proc, request, call.call_id, target.mesh, budget, value=value))
                return
            calls[call.call_id] = call
            running[call] = pending[call] = None
            if batch is None or box.batch is not batch or not batch.add(call, payload):
                if box.batch is not None:
                    box.batch.leave()
                batch = box.batch = CallBatch(box, request, budget)
                self._open.append(batch)
                batch.add(call, payload)

        return send

    def sender_alone(self, proc: Proc, target: Target, request: Request, deadline: float) -> SendCall:
        """Return a function that sends each call to one actor as a separate message."""

        def send(key: Any, arguments: Arguments) -> None:
            if not self.is_cancelled:
                self.begin(proc, target, request, key, deadline, arguments)

        return send

    def leave(self) -> None:
        """Send the calls that were added and not sent yet."""
        if self._open:
            for batch in self._open:
                batch.leave()
            self._open.clear()

    def _begin(self, call: SetCall, parcel: Parcel) -> None:
        self.running[call] = None
        try:
            call.start(parcel)
        except TypeError:
            del self.running[call]
            raise
        if not call.collector.remaining:
            call.check_end()

    def end(self, call: SetCall) -> None:
        """Record the end of a call."""
        self.running.pop(call, None)
        self.ended.append(call)
        if call.collector.failures:
            self.on_failure(call)
        if self._news is not None:
            self.wake()

    def wake(self) -> None:
        """Wake the waiting task."""
        if self._news is not None:
            self._news.set()
            self._news = None

    def tell_wait(self) -> None:
        """Notify the deadlock search that the wait for these calls may be the last edge of a cycle."""
        for call in self.running:
            call.proc.deadlocks.awaits_any(self)
            break

    async def wait(self) -> None:
        """Wait until a call ends, `wake` is called, or cancelled calls count as silent."""
        self.tell_wait()
        with trio.CancelScope(deadline=self.silent_at):
            await self._wait_for_news()

    async def _wait_for_news(self) -> None:
        if self._news is None:
            self._news = trio.Event()
        await self._news.wait()

    def cancel(self, reason: str) -> None:
        """Cancel the running calls, which must acknowledge within a bound from now (rule C2). Idempotent."""
        if self.is_cancelled:
            return
        self.cancelled_at = trio.current_time()
        self.silent_at = self.cancelled_at + limits.CANCEL_ACK_SECONDS
        for call in list(self.running):
            call.cancel_rest(reason)
            call.check_end()
        self.look_at_silence()
        self.wake()

    def look_at_silence(self) -> None:
        """Compute until when to wait for cancelled calls."""
        if self.is_cancelled and self.running:
            self.silent_at = self.cancelled_at + max(call.patience for call in self.running)
            self.wake()

    async def join(self) -> None:
        """Wait, shielded, until cancelled calls have ended, or abandon them. No checkpoint when nothing runs."""
        try:
            with trio.CancelScope(shield=True) as scope:
                while self.running:
                    scope.deadline = self.silent_at
                    await self._wait_for_news()
        finally:
            for call in self.running:
                call.give_up()


# ---- replied call ----------------------------------------------------------------------------------------------------

# A call whose outcomes one task takes as they arrive, each exactly once: the collector settles a rank once.


class RepliedCall(OutgoingCall):
    """A sent call whose outcomes are taken by one task as they arrive.

    Args:
        on_sent: Called once, when none of its messages waits for room.
    """

    __slots__ = ("_on_sent", "_untaken")

    def __init__(
        self,
        proc: Proc,
        call_id: CallId,
        request: Request,
        targets: Sequence[Target],
        *,
        on_sent: Callable[[], None],
    ) -> None:
        super().__init__(proc, call_id, request, targets, fail_fast=False)
        self._on_sent = on_sent
        self._untaken = dict.fromkeys(range(len(targets)))

    def start(self, parcel: Parcel) -> None:
        super().start(parcel)
        self._note_sent()

    def _sent(self, index: int, position: int, lent: trio.Event | None) -> None:
        had_to_wait = bool(self._pending)
        super()._sent(index, position, lent)
        if had_to_wait:
            self._note_sent()

    def _withdraw(self, index: int) -> None:
        super()._withdraw(index)
        self._note_sent()

    def _note_sent(self) -> None:
        if not self._pending:
            self._on_sent()

    def _settle(self, index: int, outcome: Outcome) -> bool:
        is_first = super()._settle(index, outcome)
        self._wake()
        return is_first

    def take_settled(self) -> list[int]:
        """Return the indices of ranks that have settled and were not returned before."""
        outcomes = self.collector.outcomes
        found = [index for index in self._untaken if outcomes[index] is not None]
        for index in found:
            del self._untaken[index]
        return found

    def take_rest(self) -> list[int]:
        """Return the indices of all ranks that were not returned before."""
        found = list(self._untaken)
        self._untaken.clear()
        return found

    async def wait_settled(self) -> list[int]:
        """Wait for newly settled ranks and return them; an empty list once all were returned."""
        while self._untaken:
            found = self.take_settled()
            if found:
                return found
            await self._park()
        return []

    async def end(self, reason: str) -> None:
        """Cancel running ranks; wait, shielded, until they have unwound or were abandoned. Idempotent."""
        if not self.collector.is_complete:
            self.cancel_rest(reason)
            await self._wait_for_acknowledgements()
        self.forget()


def begin_replied(proc: Proc, targets: Sequence[Target], request: Request, on_sent: Callable[[], None]) -> RepliedCall:
    """Send a call without a deadline, which the caller has to `end`.

    Raises:
        TypeError: An argument cannot be serialised; nothing was sent.
    """
    call_id = proc.new_call_id()
    parcel = encode_request(proc, request, call_id, targets[0].mesh if targets else AGENT, None)
    call = RepliedCall(proc, call_id, request, targets, on_sent=on_sent)
    call.start(parcel)
    return call
