r"""Sites: places in Trio where parts of an asyncio program run; stand-ins: Trio tasks that asyncio tasks step.

A stand-in is a parked Trio task in the nursery of a block, under the block's cancel scopes and deadlines. An asyncio
task steps a Trio coroutine while the stand-in counts as Trio's current task. Work that does not wait costs no turn of
Trio and no task switch. Work that waits makes the stand-in wait.

    idle --perform()--> working <--> waiting in Trio
                       \-----------------------> idle, or over

SI-1 a cancel of the asyncio task cancels the scope of the work, and the task waits until the work has ended. An error
     of the work wins over the cancel, a value does not (CX-1, CX-2).
SI-2 a cancel in Trio is `trio.Cancelled` in the work and `asyncio.CancelledError` in the task (CX-3).
SI-3 a stand-in whose scope was cancelled ends, so that no cancel is left for the next work.
"""

from __future__ import annotations

import asyncio
import contextvars
import types
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NoReturn, ParamSpec, TypeVar

import outcome
import trio

from trimesh import limits
from trimesh._runtime.tasks import Site, split_cancelled, woken_elsewhere
from trimesh.aio.driver import NAMES

if TYPE_CHECKING:
    from trimesh.aio.driver import LoopDriver
    from trimesh.aio.slots import SlotCall
    from trimesh.aio.trio_run import TrioRun


P = ParamSpec("P")
T = TypeVar("T")
RaiseCancel = Callable[[], NoReturn]
AbortFunction = Callable[[RaiseCancel], trio.lowlevel.Abort]

_names: Final[Any] = NAMES
"""None means that no stand-in is made."""


class _Nothing:
    """Outcome of a wait without a result; reusable, which an `outcome.Value` is not."""

    def unwrap(self) -> None:
        """Return None."""


_NOTHING: Final = _Nothing()


class AsyncioWait:
    """Trap with which a coroutine that a stand-in steps waits for an asyncio task.

    Args:
        task: The asyncio task.
        abort: Called at most once, when the work is cancelled in Trio; the wait goes on.
    """

    __slots__ = ("abort", "task")

    def __init__(self, task: asyncio.Task[Any], abort: AbortFunction) -> None:
        self.task = task
        self.abort = abort


class StandIn:
    """A Trio task whose coroutines an asyncio task steps.

    Args:
        loop: The loop of the asyncio task.
        driver: The driver of the Trio run.

    Attributes:
        task: The Trio task, once `begin` was called.
        coroutine: The coroutine that is being stepped.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, driver: LoopDriver) -> None:
        self.task: Any = None
        self.coroutine: Any = None
        self.loop = loop
        self._settle_soon = driver.settle_soon if driver.must_settle else None
        # The dicts of thread-local data of this thread: an attribute of the data takes several times as long.
        self._here: dict[str, Any] = _names.context.__dict__
        self._library: dict[str, Any] = _names.library.__dict__
        self._cancelled: asyncio.CancelledError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._sent: Any = None

    def begin(self) -> None:
        """Register the running Trio task as the stand-in."""
        self.task = trio.lowlevel.current_task()
        woken_elsewhere[self.task] = self.wake

    def wake(self) -> None:
        """Resume work that waits in Trio, without a result and without a turn of Trio."""
        self.task._abort_func = None
        self.rescheduled(_NOTHING)

    def rescheduled(self, sent: Any) -> None:
        """Resume work that waits in Trio, with the outcome that its task was rescheduled with."""
        self._sent = sent
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def steps(
        self,
        coroutine: Any,
        context: contextvars.Context,
        scope: trio.CancelScope | None = None,
        aborting: Callable[[AbortFunction], AbortFunction] | None = None,
    ) -> Generator[Any, Any, Any]:
        """Step a coroutine of Trio in the running asyncio task, and return its result.

        Args:
            coroutine: The coroutine.
            context: Its context variables.
            scope: Cancelled when the asyncio task is; None ignores such cancels.
            aborting: Wraps the abort function of each wait in Trio.

        Raises:
            BaseException: Whatever the coroutine raises.
        """
        waits, yields, task, settle_soon = _names.waits, _names.yields, self.task, self._settle_soon
        step: Callable[[Any], Any] = coroutine.send
        sent: Any = None
        before, self.coroutine = self.coroutine, coroutine
        try:
            while True:
                task._abort_func = None
                try:
                    trap = self._step(context, step, sent)
                except StopIteration as stop:
                    return stop.value
                finally:
                    if settle_soon is not None:
                        settle_soon()
                task._schedule_points += 1
                step, sent = coroutine.send, _NOTHING
                if type(trap) is waits:
                    task._cancel_points += 1
                    abort: AbortFunction = trap.abort_func
                    self.abort_by(abort if aborting is None else aborting(abort))
                    while self._sent is None:
                        waiter = self._waiter = self.loop.create_future()
                        try:
                            yield from waiter
                        except asyncio.CancelledError as error:
                            self._cancel(error, scope)
                        except GeneratorExit:
                            self._abandon(coroutine)
                            raise
                    sent, self._sent, self._waiter = self._sent, None, None
                elif trap is yields:
                    yield from self._yield(scope)
                elif type(trap) is AsyncioWait:
                    yield from self._wait_for_task(trap, scope, coroutine)
                else:
                    text = f"code that runs in Trio must await operations of Trio, got {trap!r} of another library"
                    step, sent = coroutine.throw, TypeError(text)
        finally:
            self.coroutine = before
            del coroutine, step, sent, before  # no cycle of an error, its traceback and this frame

    def _step(self, context: contextvars.Context, step: Callable[[Any], Any], sent: Any) -> Any:
        """Run one step as the Trio task; return its trap."""
        here, libraries = self._here, self._library
        task, library = here.get("task"), libraries.get("name")
        here["task"], libraries["name"] = self.task, "trio"
        try:
            return context.run(step, sent)
        finally:
            libraries["name"] = library
            if task is None:
                del here["task"]
            else:
                here["task"] = task
            del step, sent  # as in `steps`

    def abort_by(self, abort: AbortFunction) -> None:
        """Set the function that a cancel in Trio calls."""
        self.task._abort_func = abort
        if self.task._cancel_status.effectively_cancelled:
            self.task._attempt_delivery_of_any_pending_cancel()

    def _wait_for_task(
        self, wait: AsyncioWait, scope: trio.CancelScope | None, coroutine: Any
    ) -> Generator[Any, Any, None]:
        """Wait until an asyncio task, for which a coroutine waits, has ended."""
        if self.coroutine is coroutine:  # else the task works in Trio since its first step, in scopes of its own
            self.abort_by(wait.abort)
        while not wait.task.done():
            try:
                yield from wait.task
            except asyncio.CancelledError as error:
                self._cancel(error, scope)

    def _yield(self, scope: trio.CancelScope | None) -> Generator[Any, Any, None]:
        """Let other asyncio tasks run."""
        try:
            yield
        except asyncio.CancelledError as error:
            self._cancel(error, scope)

    def _cancel(self, error: asyncio.CancelledError, scope: trio.CancelScope | None) -> None:
        if scope is not None:
            self._cancelled = self._cancelled or error
            scope.cancel(reason="the asyncio task was cancelled")

    def do(
        self,
        work: Callable[[], Awaitable[T]],
        put_back: Callable[[T], None] | None,
        context: contextvars.Context,
        scope: trio.CancelScope,
        aborting: Callable[[AbortFunction], AbortFunction] | None = None,
    ) -> Generator[Any, Any, T]:
        """Run work in the running asyncio task; see `crossing.run_in_trio`.

        Args:
            work: The work.
            put_back: Called with a result that the task does not get, because it was cancelled.
            context: Context variables of the work.
            scope: Cancelled when the task is.
            aborting: See `steps`.
        """
        cancelled: asyncio.CancelledError | None = None
        in_trio = error = None
        try:
            if getattr(asyncio.current_task(), "_must_cancel", False):  # raise the cancel before any work begins
                yield
            try:
                value: T = yield from self.steps(_coroutine_of(work()), context, scope, aborting)
            except BaseException as raised:
                in_trio, error = split_cancelled(raised)
                if in_trio is None:
                    raise
                if error is not None:
                    raise error from None
            else:
                if self._cancelled is None:
                    return value
                if put_back is not None:
                    put_back(value)
                del value
            cancelled, self._cancelled = self._cancelled, None
            raise cancelled or asyncio.CancelledError("the block around it was cancelled")
        finally:
            self._cancelled = None
            del cancelled, error, in_trio, work  # no cycle of an error, its traceback and this frame

    def _abandon(self, coroutine: Any) -> None:
        """Handle work that waits in Trio when the coroutine of the asyncio task is closed."""
        with suppress(RuntimeError):
            coroutine.close()


def as_task(task: trio.lowlevel.Task, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function that does not wait, from asyncio code, with `task` as the current Trio task."""
    context = _names.context
    before = getattr(context, "task", None)
    context.task = task
    try:
        return function(*args, **kwargs)
    finally:
        if before is None:
            del context.task
        else:
            context.task = before


def outside_trio(task: trio.lowlevel.Task, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call an asyncio function from a step of a Trio task, with no current Trio task."""
    here, libraries = _names.context.__dict__, _names.library.__dict__
    library, libraries["name"] = libraries["name"], None
    del here["task"]
    try:
        return function(*args, **kwargs)
    finally:
        here["task"], libraries["name"] = task, library


@types.coroutine
def stepped(steps: Generator[Any, Any, T]) -> Generator[Any, Any, T]:
    """Await a generator that steps a coroutine."""
    return (yield from steps)


@types.coroutine
def wait_for_asyncio(wait: AsyncioWait) -> Generator[AsyncioWait, Any, None]:
    """Wait for an asyncio task, in a coroutine that a stand-in steps."""
    yield wait


@types.coroutine
def wait_in_trio(abort: AbortFunction) -> Generator[Any, Any, outcome.Outcome[Any]]:
    """Wait until the running Trio task is rescheduled; return the outcome."""
    sent: outcome.Outcome[Any] = yield _names.waits(abort)
    return sent


@types.coroutine
def go_on(coroutine: Any, sent: outcome.Outcome[Any]) -> Generator[Any, Any, None]:
    """Run the rest of a coroutine in Trio."""
    with suppress(StopIteration):
        while True:
            sent = yield coroutine.send(sent)


def _coroutine_of(work: Awaitable[Any]) -> Any:
    return work if hasattr(work, "send") else _await(work)


async def _await(work: Awaitable[T]) -> T:
    return await work


# ---- sites -----------------------------------------------------------------------------------------------------------

_NO_CONTEXT: Final = contextvars.Context()


class SpareStandIn(StandIn):
    """A reusable stand-in of a site, for any asyncio task.

    When the coroutine of the asyncio task is closed in the middle, the work is cancelled, and Trio runs the rest of it.

    Args:
        site: Its nursery holds the stand-in.
    """

    def __init__(self, site: AsyncioSite) -> None:
        assert site.run.driver is not None
        super().__init__(site.run.loop, site.run.driver)
        self.scope = trio.CancelScope()
        self._site = site
        self._is_idle = True
        self._is_over = False
        self._rest: Any = None

    # ---- Trio's side -----------------------------------------------------------------------------------------

    @trio.lowlevel.enable_ki_protection
    async def live(self) -> None:
        """Run the Trio task: wait for work, for results of waits, and for the end."""
        self.begin()
        try:
            with self.scope:
                while not self._is_over:
                    sent = await wait_in_trio(self._abort)
                    if self._is_idle:
                        sent.unwrap()
                    elif self._rest is None:
                        self.rescheduled(sent)
                    else:
                        await self._finish_rest(sent)
                        return
        finally:
            woken_elsewhere.pop(self.task, None)

    async def _finish_rest(self, sent: outcome.Outcome[Any]) -> None:
        """Run the rest of abandoned work; drop its error, because the task that would get it is gone."""
        try:
            await go_on(self._rest, sent)
        except BaseException as error:  # noqa: BLE001 - as said above
            cancelled = split_cancelled(error)[0]
            if cancelled is not None:
                raise cancelled from None
        finally:
            self._rest = None

    def _abort(self, _: object) -> trio.lowlevel.Abort:
        return trio.lowlevel.Abort.SUCCEEDED if self._is_idle else trio.lowlevel.Abort.FAILED

    # ---- asyncio's side --------------------------------------------------------------------------------------

    @property
    def can_work(self) -> bool:
        """True while it is parked and not cancelled."""
        return self.task is not None and self.task._abort_func is not None

    async def perform(self, work: Callable[[], Awaitable[T]], put_back: Callable[[T], None] | None = None) -> T:
        """Run `work` in the running asyncio task; see `crossing.run_in_trio`."""
        run = self._site.run
        run.users += 1
        self._is_idle = False
        context = self.task.context = contextvars.copy_context()
        try:
            return await stepped(self.do(work, put_back, context, self.scope))
        finally:
            del work, put_back
            self._give_back()
            if run.users > 1:
                run.users -= 1
            else:
                await run.release()

    def _give_back(self) -> None:
        if self._rest is not None:
            return
        task = self.task
        self._is_idle = True
        task.context = _NO_CONTEXT
        self.abort_by(self._abort)
        if self.scope.cancel_called or not self._site.keep(self):
            self.end()

    def end(self) -> None:
        """End the stand-in, which is idle."""
        self._is_over = True
        if self.can_work:  # else its cancel is under way
            trio.lowlevel.reschedule(self.task)

    def _abandon(self, coroutine: Any) -> None:
        self._rest = coroutine
        del woken_elsewhere[self.task]
        self.scope.cancel(reason="the asyncio task is gone")
        if self._sent is not None:  # the result of its wait has arrived already
            sent, self._sent = self._sent, None
            trio.lowlevel.reschedule(self.task, sent)


class AsyncioSite(Site["TrioRun"]):
    """A site for asyncio tasks.

    Attributes:
        parent: The enclosing site.
        spare: Idle stand-ins.
    """

    parent: AsyncioSite | None

    def __init__(self, run: TrioRun, parent: AsyncioSite | None) -> None:
        super().__init__(run, parent)
        self.spare: list[SpareStandIn] = []

    def stand_in(self) -> SpareStandIn | SlotCall[Any] | None:
        """Return a stand-in for the running asyncio task; None if a new Trio task has to do the work."""
        while self.spare:
            stand_in = self.spare.pop()
            if stand_in.can_work:
                return stand_in
        driver = self.run.driver
        if driver is None or driver.is_ticking or self.nursery is None:
            return None
        stand_in = SpareStandIn(self)
        try:
            self.nursery.start_soon(stand_in.live, name="a task of asyncio")
        except RuntimeError:  # the nursery is closed
            return None
        driver.tick()
        return stand_in if stand_in.can_work else None

    def keep(self, stand_in: SpareStandIn) -> bool:
        """Keep an idle stand-in; return False if the site is closed or has enough."""
        if not self.is_open or len(self.spare) >= limits.SPARE_STAND_INS_MAX:
            return False
        self.spare.append(stand_in)
        return True

    def end_spare(self) -> None:
        """End all idle stand-ins."""
        for stand_in in self.spare:
            stand_in.end()
        self.spare.clear()


class TaskSite(AsyncioSite):
    """A site for one asyncio task: a cancel of its work in Trio cancels that task, too.

    Attributes:
        task: The asyncio task.
        is_cancelled: Whether Trio has cancelled it.
    """

    task: asyncio.Task[Any] | None = None
    is_cancelled = False

    @property
    def is_here(self) -> bool:
        """True in the task of the site."""
        return self.task is not None and self.task is asyncio.current_task()

    def stand_in(self) -> SpareStandIn | SlotCall[Any] | None:
        return None
