"""The bounded mailbox of one actor: calls wait here, in order, for a slot of their group.

A group of slots runs at most `concurrency` endpoints at once; each slot is one long-lived task, started when it is
first needed, which takes the next call from the queue. Bounds are kept by the credits of the senders.

    MB-1 a slot has one cancel scope for many calls: it is that of the call that runs, and is replaced when it has been
         cancelled. So nothing of one call, neither its cancel nor its deadline, is left for the next.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

# By name: to find anything in the module `trio`, which knows of deprecated names, costs as much as a call.
from trio.lowlevel import checkpoint_if_cancelled, current_task, wait_task_rescheduled

from trimesh._runtime.peers.incoming import IncomingCall
from trimesh._runtime.tasks.crossing import wake

if TYPE_CHECKING:
    from trimesh._runtime.recording import CallRecorder

_BATCH = 16
"""Calls that one slot serves before it lets other tasks run, when the endpoints themselves never wait."""


class SlotGroup:
    """The queue of one group and the tasks that serve it.

    Attributes:
        is_watched: Whether `mailbox.on_crowded` has been told of a call that has to wait for a slot.
        queue: The calls that wait.
        running: The calls that hold slots, and the tasks that run them.
    """

    __slots__ = ("_idle", "_is_waiting_here", "_tasks", "concurrency", "is_watched", "mailbox", "queue", "running")

    def __init__(self, mailbox: Mailbox, concurrency: int) -> None:
        self.mailbox = mailbox
        self.concurrency = concurrency
        self.is_watched = False
        self.queue: deque[IncomingCall] = deque()
        self.running: dict[IncomingCall, trio.lowlevel.Task] = {}
        self._tasks = 0
        self._idle: list[trio.lowlevel.Task] = []
        self._is_waiting_here = False

    @property
    def is_full(self) -> bool:
        """Whether every slot runs a call."""
        return len(self.running) >= self.concurrency

    def put(self, call: IncomingCall) -> None:
        """Queue a call and see to it that a slot takes it when one is free."""
        self.queue.append(call)
        if self._is_waiting_here:
            self._is_waiting_here = False  # its slot takes this one, and another slot the next
        elif self._idle:
            wake(self._idle.pop())
        elif self._tasks < self.concurrency:
            self._tasks += 1
            self.mailbox.start_task(self._slot)
        elif not self.is_watched and self.mailbox.on_crowded is not None:
            self.is_watched = True
            self.mailbox.on_crowded(self)

    def put_all(self, calls: Sequence[IncomingCall]) -> None:
        """Queue several calls, as `put` does each."""
        if self._is_waiting_here or self._idle or self._tasks < self.concurrency:
            for call in calls:
                self.put(call)
        else:
            self.queue.extend(calls[:-1])
            self.put(calls[-1])  # no slot is free for any of them

    @trio.lowlevel.enable_ki_protection
    async def _slot(self) -> None:
        try:
            while True:
                await self._serve_until_cancelled()
        finally:
            self._tasks -= 1

    def _abort(self, task: trio.lowlevel.Task, _: object) -> trio.lowlevel.Abort:
        self._idle.remove(task)
        return trio.lowlevel.Abort.SUCCEEDED

    def _wait_here(self) -> bool:
        """Wait for a call that comes at once, without a turn of Trio's loop. Return whether the slot can go on."""
        self._is_waiting_here = True
        has_come = self.mailbox.wait_here()
        self._is_waiting_here = False
        return has_come or bool(self.queue)

    async def _serve_until_cancelled(self) -> None:
        """Serve calls until one of them has been cancelled, and with it the scope (MB-1)."""
        call: IncomingCall | None = None
        mailbox, task = self.mailbox, current_task()
        began, ended = mailbox.began, mailbox.ended
        abort = partial(self._abort, task)
        try:
            with trio.CancelScope() as scope:
                served = 0
                while True:
                    while self.queue:
                        await checkpoint_if_cancelled()  # then nothing is started any more
                        call = self.queue.popleft()
                        self.running[call] = task
                        call.scope = scope
                        if call.deadline != math.inf:
                            scope.deadline = call.deadline
                        number = began(call)
                        try:
                            rest = mailbox.serve(call)
                            if rest is not None:
                                await rest
                        finally:
                            call.scope = None
                            ended(number, call)
                            self.running.pop(call, None)
                            if mailbox.changed is not None:
                                mailbox.tell_change()
                        if (call.cancelled_by is not None or call.deadline != math.inf) and _is_spent(scope):
                            return
                        call = None  # if it is still to be answered, that is not the slot's to do
                        served += 1
                        if served % _BATCH == 0:
                            await trio.lowlevel.checkpoint()
                    if not self._wait_here():
                        self._idle.append(task)
                        await wait_task_rescheduled(abort)
        except BaseException:
            # Cancelled from outside of the call: the actor ends, and then tells its callers why.
            if call is not None and not call.ended:
                mailbox.on_interrupted(call)
            raise
        if scope.cancelled_caught:
            assert call is not None
            call.unwound()


def _not_begun(_: IncomingCall) -> int:
    return 0


def _not_ended(_: int, __: IncomingCall) -> None:
    return


def _not_here() -> bool:
    return False


def _is_spent(scope: trio.CancelScope) -> bool:
    """Forget the deadline of a call; return whether its scope has been cancelled, so that no other may run in it."""
    scope.deadline = math.inf
    return scope.cancel_called


class Mailbox:
    """All calls that one actor has accepted and not ended.

    Attributes:
        serve: Runs one call, to its terminal frame (None) or as far as it goes without waiting; returns the rest.
        start_task: Starts a task in the context of the actor.
        on_interrupted: Told of a call that is not answered, because the actor itself is ending.
        on_crowded: Told of the first call of a group that has to wait for a slot, and again once its `is_watched` is
            False.
        on_early: Told of the first call that comes before the actor serves, and again once `is_watched` is False.
        is_open: Whether slots take calls; before that they queue (the actor is starting).
        changed: Set by `tell_change`; None while no task waits for that.
        wait_here: Waits for messages in the running task; see `Transport.wait_here`.
        began, ended: Keep which calls slots have taken, and how they ended; see `CallRecorder`.
    """

    __slots__ = (
        "_early",
        "_groups",
        "began",
        "changed",
        "ended",
        "is_open",
        "is_watched",
        "on_crowded",
        "on_early",
        "on_interrupted",
        "serve",
        "start_task",
        "wait_here",
    )

    def __init__(
        self,
        serve: Callable[[IncomingCall], Awaitable[None] | None],
        start_task: Callable[[Callable[[], Coroutine[Any, Any, None]]], None],
        on_interrupted: Callable[[IncomingCall], None],
        on_crowded: Callable[[SlotGroup], None] | None = None,
        recorder: CallRecorder | None = None,
        wait_here: Callable[[], bool] | None = None,
        on_early: Callable[[Mailbox], None] | None = None,
    ) -> None:
        self.serve = serve
        self.start_task = start_task
        self.on_interrupted = on_interrupted
        self.on_crowded = on_crowded
        self.on_early = on_early
        self.is_watched = False
        self.began = _not_begun if recorder is None else recorder.began
        self.ended = _not_ended if recorder is None else recorder.ended
        self.wait_here = _not_here if wait_here is None else wait_here
        self.is_open = False
        self._groups: dict[str, SlotGroup] = {}
        self._early: deque[IncomingCall] = deque()
        self.changed: trio.Event | None = None

    def put(self, call: IncomingCall) -> None:
        if not self.is_open:
            self._early.append(call)
            self._tell_early()
            return
        key = call.spec.slots
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = SlotGroup(self, call.spec.concurrency)
        group.put(call)

    def put_all(self, calls: Sequence[IncomingCall]) -> None:
        """Accept several calls of one endpoint."""
        if not self.is_open:
            self._early.extend(calls)
            self._tell_early()
        elif calls and (group := self.group_of(calls[0])) is not None:
            group.put_all(calls)
        else:
            for call in calls:  # the first makes the group
                self.put(call)

    def _tell_early(self) -> None:
        if not self.is_watched and self.on_early is not None:
            self.is_watched = True
            self.on_early(self)

    def is_early(self, call: IncomingCall) -> bool:
        """Return whether a call waits for the actor to serve."""
        return call in self._early

    def open(self) -> None:
        """Let slots take calls, those that came early first."""
        self.is_open = True
        while self._early:
            self.put(self._early.popleft())

    def groups(self) -> Iterable[SlotGroup]:
        """Return the groups that have served a call."""
        return self._groups.values()

    def group_of(self, call: IncomingCall) -> SlotGroup | None:
        """Return the group whose slots `call` needs, or None while the actor is starting."""
        return self._groups.get(call.spec.slots)

    def queued(self) -> Iterator[IncomingCall]:
        yield from self._early
        for group in self._groups.values():
            yield from group.queue

    def running(self) -> Iterator[IncomingCall]:
        for group in self._groups.values():
            yield from group.running

    def call_of(self, task: trio.lowlevel.Task | None) -> IncomingCall | None:
        """Return the running call that a task is part of: its slot's task, or one in a nursery that the call waits for.

        Cost: grows with the number of calls that run.
        """
        running = {slot: call for group in self._groups.values() for call, slot in group.running.items()}
        while task is not None and task not in running:
            task = None if task.parent_nursery is None else task.parent_nursery.parent_task
        return None if task is None else running[task]

    def remove(self, call: IncomingCall) -> bool:
        """Take a call out of its queue; return False when it has left it already."""
        for queue in (self._early, *(group.queue for group in self._groups.values())):
            if call in queue:
                queue.remove(call)
                self.tell_change()
                return True
        return False

    def take_queued(self) -> list[IncomingCall]:
        """Take all calls out that wait."""
        taken = list(self.queued())
        for queue in (self._early, *(group.queue for group in self._groups.values())):
            queue.clear()
        self.tell_change()
        return taken

    async def wait_idle(self) -> None:
        """Wait until nothing is queued and nothing runs."""
        while not self.is_idle():
            await self.wait_changed()

    async def wait_changed(self) -> None:
        """Wait until a call has ended, left its queue, or been cancelled while it runs."""
        if self.changed is None:
            self.changed = trio.Event()
        await self.changed.wait()

    def is_idle(self) -> bool:
        """Return whether nothing is queued and nothing runs."""
        return not self._early and not any(group.queue or group.running for group in self._groups.values())

    def tell_change(self) -> None:
        """Let those look again who wait for a change."""
        if self.changed is not None:
            self.changed.set()
            self.changed = None
