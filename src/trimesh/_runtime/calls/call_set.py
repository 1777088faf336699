"""Many calls of this process, each to one actor, that one task waits for without a task for each.

The task that drains the links notes the end of a call and wakes the waiting task, which decodes what came.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import trio

from trimesh import limits
from trimesh._routing.collector import Outcome
from trimesh._runtime.calls.invocation import budget_until, encode_request
from trimesh._runtime.calls.outgoing import AnyWait, OutgoingCall
from trimesh._runtime.calls.process import CallingProc
from trimesh._runtime.calls.request import Request
from trimesh._runtime.peers.peer import Outbox, Peer
from trimesh._runtime.peers.target import Target
from trimesh.ids import CallId


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
        proc: CallingProc,
        call_id: CallId,
        request: Request,
        target: Target,
        key: Any,
        calls: CallSet,
        *,
        budget: float | None,
    ) -> None:
        super().__init__(proc, call_id, request, [target], fail_fast=False, budget=budget)
        self.key = key
        self._set = calls
        self._has_ended = False

    @property
    def consumer(self) -> trio.lowlevel.Task:
        """The task that waits for it and the other calls of the set."""
        return self._set.consumer

    @property
    def any_wait(self) -> AnyWait:
        """See `OutgoingCall.any_wait`."""
        return self._set

    @property
    def part_of(self) -> trio.lowlevel.Task:
        """See `OutgoingCall.part_of`."""
        return self._set.consumer

    def terminal(self, peer: Peer, outcome: Outcome) -> Outbox:
        """See `OutgoingCall.terminal`: of one rank, so that the call is complete."""
        box = self._boxes[0]
        if box.peer is not peer or not self.collector.settle(0, outcome):
            return super().terminal(peer, outcome)  # which refuses it
        self._leave(0)
        self.check_end()
        return box

    def check_end(self) -> None:
        """Tell the set when the call is complete, once."""
        if not (self.collector.remaining or self._has_ended):
            self._has_ended = True
            self.proc.forget(self)
            self._set.end(self)

    def give_up(self) -> None:
        """Forget the call; a late reply is dropped and counted."""
        self._has_ended = True
        self._give_up()

    def peer_stalled(self) -> None:
        """See `OutgoingCall.peer_stalled`."""
        self._set.look_at_silence()

    _wake = check_end


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

    @property
    def is_cancelled(self) -> bool:
        """Whether what runs has been cancelled, so that nothing more may begin."""
        return self.silent_at != math.inf

    @property
    def waiting_task(self) -> trio.lowlevel.Task | None:
        """See `AnyWait.waiting_task`."""
        return None if self.is_cancelled or self.ended or not self.is_all() else self.consumer

    def begin(
        self,
        proc: CallingProc,
        target: Target,
        request: Request,
        key: Any,
        deadline: float,
        arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
    ) -> None:
        """Send a call.

        Args:
            proc: The calling process.
            target: Who is called.
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
        call = SetCall(proc, call_id, request, target, key, self, budget=budget)
        self.running[call] = None
        try:
            proc.begin(call, parcel)
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
