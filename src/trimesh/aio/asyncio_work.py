r"""Work of a Trio task in asyncio, such as an endpoint of an asyncio actor: the task waits for it.

    starting --> running --> ended
                    \--cancelled in Trio--> unwinding --> ended

NA-1 the Trio task goes on only after the asyncio task has ended, however often it is cancelled meanwhile.
NA-2 a cancel of the Trio task cancels the asyncio task, once. An error that it raises all the same wins over the
     cancel, and so does a value.
NA-3 mesh operations that the asyncio task awaits run inside the Trio task, under its scopes and deadlines. When these
     end an operation, the asyncio task sees the cancel of NA-2.
NA-4 `CancelledError` without a cancel is an error: in Trio nothing was cancelled.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn, TypeVar, cast

import trio

from trimesh._runtime.tasks import wake
from trimesh.aio.body import site_variable
from trimesh.aio.sites import TaskSite
from trimesh.errors import TrimeshInternalError

if TYPE_CHECKING:
    from trimesh.aio.actor import LoopThread, MainLoop


T = TypeVar("T")

_NO_ITEM: Final = object()


class AsyncioWork(Generic[T]):
    """Work in asyncio for one Trio task.

    Args:
        loop: The loop that runs the work.
        work: Function called in a task of the loop, with the context variables of the caller.
        name: Name of the work, for errors.

    Attributes:
        on_end: Called in Trio when the work has ended.
    """

    def __init__(self, loop: LoopThread | MainLoop, work: Callable[[AsyncioWork[T]], Awaitable[T]], name: str) -> None:
        self.on_end: Callable[[], object] | None = None
        self._loop = loop
        self._run = loop.run
        self._work = work
        self._name = name
        self._site = TaskSite(self._run, self._run.root)
        self._context = contextvars.copy_context()
        self._task: asyncio.Task[None] | None = None  # asyncio's side
        self._holding: asyncio.Future[None] | None = None  # asyncio's side
        self._waiter: trio.lowlevel.Task | None = None
        self._item: Any = _NO_ITEM
        self._is_done = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._raise_cancel: Callable[[], NoReturn] | None = None

    @property
    def asyncio_task(self) -> asyncio.Task[None] | None:
        """The asyncio task of the work, for introspection; None before it has begun."""
        return self._task

    # ---- Trio's side -----------------------------------------------------------------------------------------

    def start(self, nursery: trio.Nursery) -> None:
        """Begin the work.

        Args:
            nursery: Nursery of the caller for operations that the work awaits in Trio; open until the work has ended.
        """
        self._site.work_in(nursery)
        self._loop.works.add(self)
        if not self._run.tell(self._begin):
            self.fail(self._loop.broken())

    async def wait_done(self) -> T:
        """Wait until the work has ended; return its result.

        Raises:
            trio.Cancelled: The waiting task was cancelled, and the work has unwound.
            BaseException: Error of the work.
        """
        __tracebackhide__ = True
        while not self._is_done:
            await self._wait()
        try:
            if not isinstance(self._error, asyncio.CancelledError):
                if self._error is not None:
                    raise self._error
                return cast("T", self._value)
            if self._raise_cancel is not None:
                self._raise_cancel()
            raise cancelled_by_itself(self._name) from self._error
        finally:
            self._error = None  # no cycle of an error, its traceback and this object

    async def wait_item(self) -> tuple[Any] | None:
        """Wait for the next item that the work hands over; None when it has ended.

        The work continues after `go_on`.
        """
        while self._item is _NO_ITEM and not self._is_done:
            await self._wait()
        item, self._item = self._item, _NO_ITEM
        return None if item is _NO_ITEM else (item,)

    def go_on(self, error: BaseException | None = None) -> None:
        """Let the work continue after it has handed an item over; raise `error` there if it is given."""
        self._run.tell(lambda: self._answer(error))

    async def unwind(self) -> None:
        """Cancel the work and wait for its end; drop items that it still hands over.

        Raises:
            BaseException: An error that the work raised instead of its cancel.
        """
        with trio.CancelScope(shield=True):
            while not self._is_done:
                self._cancel()
                self._item = _NO_ITEM
                await self._wait()
        error, self._error = self._error, None
        if error is not None and not isinstance(error, asyncio.CancelledError):
            raise error

    async def _wait(self) -> None:
        """Wait for a change. A cancel is passed to the asyncio task, and the wait goes on."""
        self._waiter = trio.lowlevel.current_task()

        def abort(raise_cancel: Callable[[], NoReturn]) -> trio.lowlevel.Abort:
            self._raise_cancel = raise_cancel
            self._cancel()
            return trio.lowlevel.Abort.FAILED

        await trio.lowlevel.wait_task_rescheduled(abort)

    def _cancel(self) -> None:
        self._run.tell(self._cancel_task)

    def fail(self, error: BaseException) -> None:
        """End the wait with an error, because the loop has ended without reporting the work's end."""
        if not self._is_done:
            self._error = error
            self._ended()

    def _wake(self) -> None:
        task, self._waiter = self._waiter, None
        if task is not None:
            wake(task)

    def _ended(self) -> None:
        if self._is_done:
            return
        self._is_done = True
        self._loop.works.discard(self)
        self._wake()
        if self.on_end is not None:
            self.on_end()

    def _got(self, item: Any) -> None:
        self._item = item
        self._wake()

    # ---- asyncio's side --------------------------------------------------------------------------------------

    async def hand_over(self, item: Any) -> None:
        """Give the Trio task an item, and wait for `go_on`.

        Raises:
            BaseException: The argument of `go_on`.
        """
        self._holding = self._run.loop.create_future()
        self._run.post(lambda: self._got(item))
        await self._holding

    def _begin(self) -> None:
        # Not by the loop's task factory: an eager one would run asyncio code here, in a turn of Trio.
        self._task = start_task(self._run.loop, self._live(), context=self._context)
        self._task.add_done_callback(self._report)
        self._site.task = self._task
        self._site.is_open = True

    def _cancel_task(self) -> None:
        if self._task is not None:  # None if the loop has ended by itself
            self._site.is_cancelled = True
            self._task.cancel(f"{self._name} was cancelled")

    async def _live(self) -> None:
        __tracebackhide__ = True
        site_variable.set(self._site)
        try:
            self._value = await self._work(self)
        except BaseException as raised:  # noqa: BLE001 - the Trio task raises it
            if not self._is_done:  # else the loop is ending by itself, and this is a follow-on error
                self._error = raised

    def _report(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() and not self._is_done:  # before it has begun
            self._error = asyncio.CancelledError()
        self._site.is_open = False
        with suppress(trio.RunFinishedError):
            self._run.post(self._ended)

    def _answer(self, error: BaseException | None) -> None:
        holding, self._holding = self._holding, None
        if holding is None or holding.done():
            return  # it is being cancelled
        if error is None:
            holding.set_result(None)
        else:
            holding.set_exception(error)


def cancelled_by_itself(name: str) -> RuntimeError:
    """Return the error of work that has raised `CancelledError` without a cancel (NA-4)."""
    return RuntimeError(
        f"{name} must not raise asyncio.CancelledError unless it was cancelled, and it was not: "
        "catch the error where it awaits a task that it has cancelled itself"
    )


# ---- forms of work in asyncio for a Trio task: a call, the items of a generator, a block around a body ---------------

_MISSING: Final = object()


async def run_in_asyncio(loop: LoopThread | MainLoop, work: Callable[[], Awaitable[T]], name: str) -> T:
    """Run `work` in a task of the loop and return its result.

    Args:
        loop: The loop.
        work: Function to call, with the context variables of the caller.
        name: Name of the work, for errors.

    Raises:
        trio.Cancelled: The Trio task was cancelled, and the work has unwound.
        BaseException: Error of the work.
    """
    __tracebackhide__ = True
    one = AsyncioWork[T](loop, lambda _: work(), name)
    error: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            one.start(nursery)
            try:
                return await one.wait_done()
            except BaseException as raised:  # noqa: BLE001 - a nursery would make a group of it
                error = raised
        assert error is not None
        raise error
    finally:
        del error  # no cycle of it, its traceback and this frame


async def items_from_asyncio(
    loop: LoopThread | MainLoop, generate: Callable[[], AsyncGenerator[T, None]], name: str
) -> AsyncGenerator[T, None]:
    """Yield the items of an async generator that runs in one task of the loop.

    An exception raised at a `yield` here is raised at its `yield`; a cancel cancels the task.
    """
    __tracebackhide__ = True
    one = AsyncioWork[None](loop, lambda work: _advance(generate(), work), name)
    error: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            one.start(nursery)
            try:
                while (item := await one.wait_item()) is not None:
                    raised: BaseException | None = None
                    try:
                        yield item[0]
                    except (trio.Cancelled, GeneratorExit):
                        await one.unwind()
                        raise
                    except BaseException as at_yield:  # noqa: BLE001 - the generator's to handle
                        raised = at_yield
                    del item
                    one.go_on(raised)
                    del raised
                await one.wait_done()
            except BaseException as ended:  # noqa: BLE001 - a nursery would make a group of it
                error = ended
        if error is not None:
            raise error
    finally:
        del error


@asynccontextmanager
async def block_in_asyncio(
    loop: LoopThread | MainLoop, block: AbstractAsyncContextManager[Any], name: str
) -> AsyncGenerator[None, None]:
    """Hold an asyncio block open around a body in Trio; one task of the loop enters and leaves the block.

    Errors of the body pass through the block; a cancel cancels its task. If the block ends by itself, as by an error of
    a task group in it, the body is cancelled, and the error raised. Context variables that entering sets are set for
    the body, too.
    """
    one = AsyncioWork[None](loop, lambda work: _hold(block, work), name)
    error: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            one.start(nursery)
            try:
                if (entered := await one.wait_item()) is not None:
                    _adopt(entered[0])
                    with trio.CancelScope() as body:
                        one.on_end = body.cancel
                        raised: BaseException | None = None
                        try:
                            yield
                        except (trio.Cancelled, GeneratorExit):
                            await one.unwind()
                            raise
                        except BaseException as of_body:  # noqa: BLE001 - the block's to handle
                            raised = of_body
                        one.on_end = None
                        one.go_on(raised)
                        del raised
                await one.wait_done()
            except BaseException as ended:  # noqa: BLE001 - a nursery would make a group of it
                error = ended
        if error is not None:
            raise error
    finally:
        del error


async def _hold(block: AbstractAsyncContextManager[Any], work: AsyncioWork[None]) -> None:
    """Hold a block open until its body in Trio has been left."""
    async with block:
        await work.hand_over(contextvars.copy_context())


def _adopt(context: contextvars.Context) -> None:
    """Set the context variables of the running Trio task as they are in a task of asyncio."""
    for variable, value in context.items():
        if variable is not site_variable and variable.get(_MISSING) is not value:
            variable.set(value)


async def _advance(generator: AsyncGenerator[Any, None], work: AsyncioWork[None]) -> None:
    """Run a generator to its end; a cancel, too, is raised at its `yield`."""
    __tracebackhide__ = True
    step: Coroutine[Any, Any, Any] = generator.__anext__()
    while True:
        try:
            item = await step
        except StopAsyncIteration:
            return
        try:
            await work.hand_over(item)
        except BaseException as error:  # noqa: BLE001 - raised at the `yield`
            step = generator.athrow(error)
        else:
            step = generator.__anext__()


# ---- asyncio tasks that the code of an actor starts; the error for an ended loop -------------------------------------

Tasks = set["asyncio.Task[Any]"]

tasks_of_actor: ContextVar[Tasks | None] = ContextVar("trimesh_aio_tasks", default=None)
"""Unended asyncio tasks that the code of the running actor started."""


def start_task(
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any] | Generator[Any, None, Any], **options: Any
) -> asyncio.Task[Any]:
    """Start a task as asyncio does, and register it with its actor."""
    task = asyncio.Task(cast("Coroutine[Any, Any, Any]", coroutine), loop=loop, **options)
    context = options.get("context")
    tasks = tasks_of_actor.get() if context is None else context.get(tasks_of_actor)
    if tasks is not None:
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    return task


def broken_loop(error: BaseException | None) -> TrimeshInternalError:
    """Return the error for users of a loop that has ended by itself."""
    broken = TrimeshInternalError("the asyncio loop of this process has ended while actors were using it")
    broken.__cause__ = error
    return broken
