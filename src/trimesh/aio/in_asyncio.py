"""What a Trio task has done in asyncio, by its shape: a call, the items of a generator, a block around a body."""

from __future__ import annotations

import contextvars
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

import trio

from trimesh.aio.asyncio_work import AsyncioWork
from trimesh.aio.body import site_variable

if TYPE_CHECKING:
    from trimesh.aio.loop_thread import LoopThread
    from trimesh.aio.main_loop import MainLoop

T = TypeVar("T")

_MISSING: Final = object()


async def run_in_asyncio(loop: LoopThread | MainLoop, work: Callable[[], Awaitable[T]], name: str) -> T:
    """Have `work` done in a task of the loop and return its result.

    Args:
        loop: The loop.
        work: What; its context variables are those of the caller.
        name: What errors call it.

    Raises:
        trio.Cancelled: The Trio task was cancelled, and the work has unwound.
        BaseException: What the work has raised.
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

    What is raised at a `yield` here is raised at the one there; a cancel cancels the task.
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
    """A block of asyncio, entered and left in one task of the loop, around a body in Trio.

    What the body raises goes through the block; a cancel cancels its task. When the block ends by itself, by an error
    of a task group in it, say, the body is cancelled, and the error raised. Context variables that entering sets are
    set for the body, too.
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
    """Be in a block until the body in Trio has been left."""
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
