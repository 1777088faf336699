"""Mailbox slots of asyncio actors whose loop drives Trio.

A slot is a stand-in: an asyncio task steps its coroutine, so a call is taken from the mailbox, run and answered without
a switch to Trio. Each call has an asyncio task of its own: `asyncio.current_task()`, `cancelling()` and done callbacks
belong to one call.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
from asyncio import tasks as asyncio_tasks
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar

import outcome
import trio

from trimesh._runtime.tasks import Waiting, effective_deadline, woken_elsewhere
from trimesh.aio.asyncio_work import cancelled_by_itself
from trimesh.aio.body import site_variable
from trimesh.aio.sites import (
    AbortFunction,
    AsyncioWait,
    RaiseCancel,
    StandIn,
    TaskSite,
    as_task,
    outside_trio,
    stepped,
    wait_for_asyncio,
    wait_in_trio,
)
from trimesh.aio.trio_run import TrioRun

T = TypeVar("T")
V = TypeVar("V")

_slots: Final[dict[trio.lowlevel.Task, AsyncioSlot]] = {}


def running_slot() -> AsyncioSlot | None:
    """Return the slot whose coroutine is running; None in any other Trio task."""
    return _slots.get(trio.lowlevel.current_task())


class AsyncioSlot(StandIn):
    """A slot of the mailbox of an asyncio actor.

    Args:
        run: The Trio run of the loop.
        works: Registry of work that fails if the loop ends by itself.

    Attributes:
        steps_task: The asyncio task that steps it.
    """

    steps_task: asyncio.Task[None]

    def __init__(self, run: TrioRun, works: set[Waiting]) -> None:
        assert run.driver is not None
        super().__init__(run.loop, run.driver)
        self.run = run
        self._works = works
        self._result: outcome.Outcome[None] | None = None
        self._call: SlotCall[Any] | None = None

    @trio.lowlevel.enable_ki_protection
    async def live(self, serve: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run the Trio task, while an asyncio task steps the coroutine of `serve`."""
        self.begin()
        _slots[self.task] = self
        self._works.add(self)
        self.steps_task = asyncio.Task(self._serve(serve()), loop=self.loop, name="a slot of an actor")
        try:
            while self._result is None:
                self.rescheduled(await wait_in_trio(_refuse))
        finally:
            self._works.discard(self)
            del _slots[self.task], woken_elsewhere[self.task]
        result, self._result = self._result, None
        result.unwrap()

    async def _serve(self, coroutine: Coroutine[Any, Any, None]) -> None:
        result: outcome.Outcome[None] = outcome.Value(None)
        try:
            await stepped(self.steps(coroutine, self.task.context))
        except BaseException as error:  # noqa: BLE001 - the Trio task raises it
            result = outcome.Error(error)
        finally:
            del coroutine
        self._result = result
        trio.lowlevel.reschedule(self.task)

    def fail(self, error: BaseException) -> None:
        """End the running call with an error: the loop has ended by itself. The slot ends with its actor."""
        if self._call is not None:
            self._call.fail(error)

    async def call(self, work: Callable[[], Awaitable[T]], name: str) -> T:
        """Run `work` in an asyncio task and return its result. The rules are NA-1 to NA-4 of `AsyncioWork`.

        Raises:
            trio.Cancelled: The call was cancelled, and the work has unwound.
            BaseException: Error of the work.
        """
        __tracebackhide__ = True
        call: SlotCall[T] = SlotCall(self, name)  # a class with its parameter costs more than the object
        self._call = call
        context = contextvars.copy_context()
        context.run(site_variable.set, call)
        outside_trio(self.task, call.begin, work, context)
        del work
        assert call.task is not None
        if not call.task.done():
            call.is_waited_for = True
            await wait_for_asyncio(AsyncioWait(call.task, call.abort))
        self._call = None
        return await call.end()


class SlotCall(TaskSite, Generic[T]):
    """One call of a slot, and the site of its asyncio task: the slot stands in for that task, too.

    Args:
        slot: The slot.
        name: Name of the endpoint for errors.

    Attributes:
        is_waited_for: Whether the slot waits for the asyncio task, because its first step did not end the call.
    """

    def __init__(self, slot: AsyncioSlot, name: str) -> None:
        self.is_waited_for = False
        self._slot = slot
        self._name = name
        self._cut: RaiseCancel | None = None  # once the call was cancelled in Trio
        self._broken: BaseException | None = None  # once the loop has ended by itself
        self._result: outcome.Outcome[T] | None = None
        self._manager: Any = None  # of the nursery
        super().__init__(slot.run, slot.run.root)

    # ---- Trio's side -----------------------------------------------------------------------------------------

    def abort(self, raise_cancel: RaiseCancel) -> trio.lowlevel.Abort:
        """Cancel the asyncio task, and go on waiting for its end."""
        if self._cut is None:  # NA-2: once
            assert self.task is not None
            self._cut = raise_cancel
            self.is_cancelled = True
            self.task.cancel(f"{self._name} was cancelled")
        return trio.lowlevel.Abort.FAILED

    def fail(self, error: BaseException) -> None:
        """End with an error: the loop has ended by itself, and its tasks are being cancelled."""
        self._broken = error

    async def end(self) -> T:
        """Return the result of the work; see `AsyncioSlot.call`."""
        __tracebackhide__ = True
        self.is_open = False
        if self._manager is not None:
            with suppress(trio.Cancelled):  # the cancel of the call, which `_cut` raises below
                await self._manager.__aexit__(None, None, None)
        result, self._result = self._result, None
        try:
            if result is not None and not _is_cancel(result):
                return result.unwrap()
            if self._broken is not None:
                raise self._broken
            if self._cut is not None:
                self._cut()
            raise cancelled_by_itself(self._name) from getattr(result, "error", None)
        finally:
            self._broken = None
            del result  # no cycle of an error, its traceback and this frame

    # ---- asyncio's side --------------------------------------------------------------------------------------

    def begin(self, work: Callable[[], Awaitable[T]], context: contextvars.Context) -> None:
        slot = self._slot
        self.task = start_eagerly(slot.loop, slot.steps_task, self._live(work), context)

    async def _live(self, work: Callable[[], Awaitable[T]]) -> None:
        __tracebackhide__ = True
        if self.task is None:  # the eager first step runs before `begin` has the task
            self.task = asyncio.current_task()
        self.is_open = True
        try:
            self._result = outcome.Value(await work())
        except BaseException as raised:  # noqa: BLE001 - raised in the caller
            self._result = outcome.Error(raised)

    @property
    def nursery(self) -> trio.Nursery | None:
        """Nursery of blocks and other work that needs a Trio task; opened on first use."""
        if self._manager is None:
            self._manager = trio.open_nursery()
            self._nursery = as_task(self._slot.task, _first_result, self._manager.__aenter__())
        return self._nursery

    @property
    def keeper(self) -> trio.lowlevel.Task:
        task: trio.lowlevel.Task = self._slot.task
        return task

    @property
    def deadline(self) -> float:
        return as_task(self._slot.task, effective_deadline)

    def stand_in(self) -> SlotCall[T]:
        return self

    async def perform(self, work: Callable[[], Awaitable[V]], put_back: Callable[[V], None] | None = None) -> V:
        """Run `work` in the running asyncio task; see `crossing.run_in_trio`."""
        slot = self._slot
        task, around = slot.task, slot.task._cancel_status
        scope = trio.CancelScope()

        def aborting(abort: AbortFunction) -> AbortFunction:
            def abort_both(raise_cancel: RaiseCancel) -> trio.lowlevel.Abort:
                if around.effectively_cancelled:
                    self.abort(raise_cancel)
                return abort(raise_cancel)

            return abort_both

        as_task(task, scope.__enter__)
        try:
            return await stepped(slot.do(work, put_back, contextvars.copy_context(), scope, aborting))
        finally:
            as_task(task, scope.__exit__, None, None, None)
            task._abort_func = None
            if self.is_waited_for and self._cut is None:
                slot.abort_by(self.abort)  # a cancel may have come since the work was woken


def _is_cancel(result: outcome.Outcome[Any]) -> bool:
    return isinstance(result, outcome.Error) and isinstance(result.error, asyncio.CancelledError)


def _first_result(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that does not wait."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise AssertionError("it has waited")


def _refuse(_: object) -> trio.lowlevel.Abort:
    return trio.lowlevel.Abort.FAILED


# ---- eager start of asyncio tasks: most calls end in their first step, and then need no turn of the loop -------------

TASKS: Final = ("_enter_task", "_leave_task")
"""Private functions of asyncio that not every release has."""

_HAS_TASKS: Final = all(hasattr(asyncio_tasks, name) for name in TASKS)


class _Begun(Coroutine[Any, Any, None]):
    """A coroutine whose first step has run, for the task that runs the rest.

    Args:
        coroutine: The coroutine.

    Attributes:
        waits_for: The future that its first step awaits, until the task takes it.
    """

    def __init__(self, coroutine: Any) -> None:
        self.waits_for: asyncio.Future[Any] | None = None
        self._coroutine = coroutine
        self.__name__ = coroutine.__name__
        self.__qualname__ = coroutine.__qualname__

    def send(self, value: Any) -> Any:
        if self.waits_for is None:
            return self._coroutine.send(value)
        future, self.waits_for = self.waits_for, None
        return future

    def throw(self, error: Any, *rest: Any) -> Any:
        """Raise in the coroutine. If the task was cancelled before it took the future, cancel the future instead.

        A future that is done cannot be cancelled: then the cancel is raised where the coroutine awaits it.
        """
        future, self.waits_for = self.waits_for, None
        if future is None or future.done():
            return self._coroutine.throw(error, *rest)
        future.cancel(*error.args)  # libraries recognise their cancels by the message
        return future

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, None]:
        steps: Generator[Any, Any, None] = self._coroutine.__await__()
        return steps

    # `Task.get_stack` and debuggers look at the frame, and at what it awaits.
    def __getattr__(self, name: str) -> Any:
        return getattr(self._coroutine, name)


def _start_at_once(
    loop: Any, running: asyncio.Task[Any], coroutine: Any, context: contextvars.Context
) -> asyncio.Task[None]:
    """Start a task as `eager_start` does in Python 3.12."""
    begun = _Begun(coroutine)
    task = asyncio.Task(begun, loop=loop, context=context)
    ready: Any = getattr(loop, "_ready", None) if _HAS_TASKS else None
    if not ready:  # another kind of loop, which runs the first step in a later turn
        return task
    first = ready.pop()
    asyncio_tasks._leave_task(loop, running)
    asyncio_tasks._enter_task(loop, task)
    try:
        begun.waits_for = context.run(coroutine.send, None)
    except StopIteration:
        future: Any = asyncio.Future  # `Task.set_result` raises; the base class does it
        future.set_result(task, None)
    else:
        ready.append(first)
    finally:
        asyncio_tasks._leave_task(loop, task)
        asyncio_tasks._enter_task(loop, running)
    return task


if sys.version_info >= (3, 12):

    def start_eagerly(
        loop: asyncio.AbstractEventLoop,
        running: asyncio.Task[Any],
        coroutine: Any,
        context: contextvars.Context,
    ) -> asyncio.Task[None]:
        """Start a task and run its first step.

        Args:
            loop: The running loop.
            running: The running task.
            coroutine: The coroutine. It must not raise.
            context: Its context variables.
        """
        del running
        return asyncio.Task(coroutine, loop=loop, context=context, eager_start=True)

else:
    start_eagerly = _start_at_once
