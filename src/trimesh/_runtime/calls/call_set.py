"""Many calls of this process, each to one actor, that one task waits for without a task for each.

The task that drains the links notes the end of a call and wakes the waiting task, which decodes what came.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import trio

from trimesh import limits
from trimesh._routing.collector import Outcome
from trimesh._runtime.calls.invocation import Request, budget_until, encode_request
from trimesh._runtime.calls.outgoing import AnyWait, OutgoingCall
from trimesh._runtime.peers.peer import Outbox, Parcel, Target
from trimesh._wire import messages
from trimesh._wire.messages import Calls
from trimesh.ids import AGENT, CallId

if TYPE_CHECKING:
    from trimesh._runtime.life.proc import Proc


Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
SendCall: TypeAlias = Callable[[Any, Arguments], None]
"""Sends a call: the key by which the user of the set knows it, and its arguments."""


class SetCall(OutgoingCall):
    """One call of a set.

    Attributes:
        key: What the set's user knows it by.
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
        """The task that waits for it and the other calls of the set."""
        return self._set.consumer

    @property
    def any_wait(self) -> AnyWait:
        return self._set

    @property
    def part_of(self) -> trio.lowlevel.Task:
        return self._set.consumer

    def counted(self, box: Outbox, position: int) -> None:
        """Learn that it is about to leave with others, at this position on the link; the credits have been counted."""
        self.collector.positions[0] = position
        box.load += 1

    def left(self, position: int, lent: trio.Event | None) -> None:
        """Learn that it has left with others; see `Link.send`."""
        self.collector.positions[0] = position
        if lent is not None:
            self._lent = (lent,)

    def check_end(self) -> None:
        """Tell the set when the call is complete, once."""
        if not (self.collector.remaining or self._has_ended):
            self._has_ended = True
            self.forget()
            self._set.end(self)

    def give_up(self) -> None:
        """Forget the call; a late reply is dropped and counted."""
        self._has_ended = True
        self.forget()

    def peer_stalled(self) -> None:
        self._set.look_at_silence()

    _wake = check_end


class CallBatch:
    """Calls to one actor that leave as one message (docs/design/calls.md).

    CB-1 it is open only while its task runs on without waiting, and leaves before anything else is sent to the actor.
    CB-2 a call is counted by the credits of its actor when it is added, and has its place on the link when it leaves.

    Attributes:
        box: What they are sent by.
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

    def has_room(self, nbytes: int) -> bool:
        return len(self._parts) < limits.CALLS_PER_MESSAGE and self._nbytes + nbytes <= limits.CALLS_PER_MESSAGE_BYTES

    def add(self, call: SetCall, number: int, payload: bytes) -> int:
        """Take in a call for which there is room; return the position that it will have on the link."""
        self._parts.append((number, payload))
        self._calls.append(call)
        self._nbytes += len(payload)
        return self._begin + len(self._parts)

    def leave(self) -> None:
        """Send them, if that has not been done."""
        box, request, parts = self.box, self.request, self._parts
        if box.batch is not self:
            return
        box.batch = None
        peer = box.peer
        position = peer.calls_sent
        peer.calls_sent = position + len(parts)
        lent = None
        if peer.link is not None:  # else the process is gone, and the calls have heard of it
            head = Calls(box.mesh, request.endpoint, self.budget, tuple(parts), request.view, request.caller)
            lent = peer.link.send(messages.encode(head), flow=box.mesh)
        if lent is not None or position != self._begin:  # others were sent to the process meanwhile
            for call in self._calls:
                position += 1
                call.left(position, lent)


class CallSet:
    """Calls that run, and calls that have ended and were not looked at.

    Attributes:
        consumer: The task that has made the set or, later, has last waited.
        running: Calls that have not ended, in the order in which they began.
        ended: Those that have, in that order.
        on_failure: Called with each that fails, by the task that drains the links.
        cancelled_at: When what runs was cancelled (Trio time).
        silent_at: When calls that were cancelled count as silent (Trio time).
        is_all: Says whether the consumer waits, and nothing but what runs can end its wait.
        is_bounded: Whether the consumer had a deadline when it began to wait.
        number: Once it was asked for in a search for deadlocks; 0 before.
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
        """Whether what runs has been cancelled, so that nothing more may begin."""
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
            request: What is called; many calls may share one.
            key: What the user of the set knows it by.
            deadline: When its budget ends (Trio time).
            arguments: In place of those of the request.

        Raises:
            TypeError: An argument cannot be serialised; nothing was sent.
        """
        budget = None if deadline == math.inf else budget_until(proc, deadline)
        call_id = proc.new_call_id()
        parcel = encode_request(proc, request, call_id, target.mesh, budget, arguments=arguments)
        self._begin(SetCall(proc, call_id, request, (target,), key, self, budget, proc.now()), parcel)

    def sender(self, proc: Proc, target: Target, request: Request, deadline: float) -> SendCall:
        """Return what sends calls to one actor as `begin` does, but together with those that are sent next.

        It holds until the task waits, or lets code run that may take long: `leave` has to be called before that.
        """
        box, targets, spec = target.peer.outbox(target.mesh), (target,), request.spec
        budget = None if deadline == math.inf else budget_until(proc, deadline)
        if spec is None or request.definitions or target.peer.link is None:
            return self.sender_alone(proc, target, request, deadline)
        # On the way of every item: a closure takes a third of the time of methods.
        new_call_id, calls = proc.new_call_id, proc.calls
        encode = proc.values.encode_call
        running, pending, try_sent = self.running, box.peer.calls, box.window.try_sent
        nbytes_max, now = limits.CALLS_PER_MESSAGE_BYTES, proc.now()
        batch: CallBatch | None = None

        def send(key: Any, arguments: Arguments) -> None:
            nonlocal batch
            value = encode(*arguments, request, spec)
            payload = value.payload
            nbytes = len(payload)
            call = SetCall(proc, new_call_id(), request, targets, key, self, budget, now)
            is_alone = value.buffers or value.definitions or value.attachments or nbytes > nbytes_max
            if is_alone or box.is_waiting or not try_sent(nbytes):
                self._begin(call, encode_request(proc, request, call.call_id, target.mesh, budget, value=value))
                return
            if batch is None or box.batch is not batch or not batch.has_room(nbytes):
                if box.batch is not None:
                    box.batch.leave()
                batch = box.batch = CallBatch(box, request, budget)
                self._open.append(batch)
            number = call.call_id
            calls[number] = call
            running[call] = pending[call] = None
            call.counted(box, batch.add(call, number, payload))

        return send

    def sender_alone(self, proc: Proc, target: Target, request: Request, deadline: float) -> SendCall:
        """Return what sends each call to one actor as a message of its own."""

        def send(key: Any, arguments: Arguments) -> None:
            self.begin(proc, target, request, key, deadline, arguments)

        return send

    def leave(self) -> None:
        """Send the calls that were added and have not left."""
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
        """Learn that a call has ended."""
        self.running.pop(call, None)
        self.ended.append(call)
        if call.collector.failures:
            self.on_failure(call)
        if self._news is not None:
            self.wake()

    def wake(self) -> None:
        """Let the waiting tasks look again."""
        if self._news is not None:
            self._news.set()
            self._news = None

    def tell_wait(self) -> None:
        """Let those who look for deadlocks know that the wait for these calls may have become the last edge of one."""
        for call in self.running:
            call.proc.deadlocks.awaits_any(self)
            break

    async def wait(self) -> None:
        """Wait until a call ends, `wake` is called, or calls that were cancelled count as silent."""
        self.tell_wait()
        with trio.CancelScope(deadline=self.silent_at):
            await self._wait_for_news()

    async def _wait_for_news(self) -> None:
        if self._news is None:
            self._news = trio.Event()
        await self._news.wait()

    def cancel(self, reason: str) -> None:
        """Cancel what runs; it has to answer within a bound from now (rule C2). Idempotent."""
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
        """Find out how long what was cancelled is waited for."""
        if self.is_cancelled and self.running:
            self.silent_at = self.cancelled_at + max(call.patience for call in self.running)
            self.wake()

    async def join(self) -> None:
        """Wait, shielded, until what was cancelled has ended, or give it up. No checkpoint when nothing runs."""
        try:
            with trio.CancelScope(shield=True) as scope:
                while self.running:
                    scope.deadline = self.silent_at
                    await self._wait_for_news()
        finally:
            for call in self.running:
                call.give_up()


# ---- replied call ----------------------------------------------------------------------------------------------------

# A call whose outcomes are taken one by one, as they come, each exactly once: the collector settles a rank once.


class RepliedCall(OutgoingCall):
    """A call that has been sent, and whose outcomes are taken by one task.

    Args:
        on_sent: Called once when no message of it waits for room.
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
        """Return the indices of the ranks that have settled and were not taken before."""
        outcomes = self.collector.outcomes
        found = [index for index in self._untaken if outcomes[index] is not None]
        for index in found:
            del self._untaken[index]
        return found

    def take_rest(self) -> list[int]:
        """Return the indices of all ranks that were not taken before."""
        found = list(self._untaken)
        self._untaken.clear()
        return found

    async def wait_settled(self) -> list[int]:
        """Wait until ranks have settled that were not taken before, and take them; none when all were."""
        while self._untaken:
            found = self.take_settled()
            if found:
                return found
            await self._park()
        return []

    async def end(self, reason: str) -> None:
        """Cancel what runs, and wait, shielded, until it has unwound or was given up. Idempotent."""
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
