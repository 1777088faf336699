"""Mailbox of one actor: bounded queues in which calls wait, in order, for a slot of their group.

A group of slots runs at most `concurrency` endpoints at once. Each slot is a long-lived task, started when first
needed, that takes the next call from the queue. The senders' credits enforce the bounds.

    MB-1 a slot reuses one cancel scope, that of the running call, for many calls, and replaces it once it has been
         cancelled. So neither the cancel nor the deadline of one call affects the next.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

# Imported by name: an attribute of `trio`, which handles deprecated names, costs as much as a call.
from trio.lowlevel import checkpoint_if_cancelled, current_task, wait_task_rescheduled

from trimesh._runtime.peers.incoming import IncomingCall
from trimesh._runtime.tasks.crossing import wake

if TYPE_CHECKING:
    from trimesh._runtime.recording import CallRecorder

_BATCH = 16
"""Calls that a slot serves before it yields to other tasks, if the endpoints themselves never wait."""


class SlotGroup:
    """The queue of one group and the tasks that serve it.

    Attributes:
        is_watched: Whether `mailbox.on_crowded` was notified of a call that has to wait for a slot.
        queue: Waiting calls.
        running: Calls that hold slots, and the tasks that run them.
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
        """True while every slot runs a call."""
        return len(self.running) >= self.concurrency

    def put(self, call: IncomingCall) -> None:
        """Queue a call and wake or start a slot if one is free."""
        self.queue.append(call)
        if self._is_waiting_here:
            self._is_waiting_here = False  # its slot takes this call, another slot the next one
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
        """Wait briefly for a call without a turn of Trio's loop. Return whether the slot can go on."""
        self._is_waiting_here = True
        has_come = self.mailbox.wait_here()
        self._is_waiting_here = False
        return has_come or bool(self.queue)

    async def _serve_until_cancelled(self) -> None:
        """Serve calls until one of them, and with it the scope, is cancelled (MB-1)."""
        call: IncomingCall | None = None
        mailbox, task = self.mailbox, current_task()
        began, ended = mailbox.began, mailbox.ended
        abort = partial(self._abort, task)
        try:
            with trio.CancelScope() as scope:
                served = 0
                while True:
                    while self.queue:
                        await checkpoint_if_cancelled()  # if cancelled, no further call is started
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
                        call = None  # the slot is not responsible for its reply from here on
                        served += 1
                        if served % _BATCH == 0:
                            await trio.lowlevel.checkpoint()
                    if not self._wait_here():
                        self._idle.append(task)
                        await wait_task_rescheduled(abort)
        except BaseException:
            # Cancelled from outside the call: the actor is ending and reports the reason to its callers.
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
    """Clear the deadline of a call; return whether its scope was cancelled and must not be reused."""
    scope.deadline = math.inf
    return scope.cancel_called


class Mailbox:
    """Unfinished calls that one actor has accepted.

    Attributes:
        serve: Runs one call, to its terminal frame (None) or as far as it goes without waiting; returns the rest.
        start_task: Starts a task in the context of the actor.
        on_interrupted: Called with a call that is not answered because the actor itself is ending.
        on_crowded: Called with the first call of a group that has to wait for a slot, and again once its `is_watched`
            is False.
        on_early: Called with the first call before the actor serves, and again once `is_watched` is False.
        is_open: Whether slots take calls; before that they queue (the actor is starting).
        changed: Set by `tell_change`; None while no task waits for it.
        wait_here: Waits for messages in the running task; see `Transport.wait_here`.
        began, ended: Record which calls slots took and how they ended; see `CallRecorder`.
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
            for call in calls:  # the first creates the group
                self.put(call)

    def _tell_early(self) -> None:
        if not self.is_watched and self.on_early is not None:
            self.is_watched = True
            self.on_early(self)

    def is_early(self, call: IncomingCall) -> bool:
        """Return whether a call waits for the actor to serve."""
        return call in self._early

    def open(self) -> None:
        """Let slots take calls, early arrivals first."""
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
        """Return the running call that a task belongs to: as its slot, or in a nursery that the call waits for.

        Cost: linear in the number of running calls.
        """
        running = {slot: call for group in self._groups.values() for call, slot in group.running.items()}
        while task is not None and task not in running:
            task = None if task.parent_nursery is None else task.parent_nursery.parent_task
        return None if task is None else running[task]

    def remove(self, call: IncomingCall) -> bool:
        """Remove a call from its queue; return False if it has already left it."""
        for queue in (self._early, *(group.queue for group in self._groups.values())):
            if call in queue:
                queue.remove(call)
                self.tell_change()
                return True
        return False

    def take_queued(self) -> list[IncomingCall]:
        """Remove and return all waiting calls."""
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
        """Wake the tasks that wait for a change."""
        if self.changed is not None:
            self.changed.set()
            self.changed = None
