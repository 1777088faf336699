"""Work of this thread that is done in Trio: which run does it, and inside which block."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar, cast

import trio

from trimesh._runtime.tasks import Site
from trimesh.blocking.body import (
    AnyBody,
    CallFuture,
    Cancelled,
    Crossing,
    FutureCrossing,
    TimeLimit,
    body_of,
    current_limit,
    innermost,
)
from trimesh.blocking.trio_thread import InterruptGuard, ThreadRun, check_thread, find_token, lease, release

P = ParamSpec("P")
T = TypeVar("T")

_END: Final = object()


def run(function: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run an async function in Trio, inside the innermost block that the running code is in, and wait for its result.

    For what has no form without `await` here: `run(buffer.read_into, tensor)`, `run(trimesh.fetch, value)`, or a
    function of your own that uses the handles of `trimesh`.

    Raises:
        Cancelled: The time limit around it is over, or the block was cancelled.
        KeyboardInterrupt: Ctrl-C came, in the main thread; the work has been cancelled, and has ended.
        RuntimeError: The caller is in a Trio task.
        BaseException: What the function raises.
    """
    return wait(partial(function, *args, **kwargs))


def wait(
    work: Callable[[], Awaitable[T]], home: AnyBody | None = None, put_back: Callable[[T], None] | None = None
) -> T:
    """Have work done in Trio, and wait for it.

    Args:
        work: What.
        home: The block of the mesh that it is for: where it is done if the running code is in no block.
        put_back: Given a result that the caller does not get, because of a Ctrl-C.
    """
    check_thread()
    with InterruptGuard() as guard:
        body = _find_body(home)
        if body is None and find_token() is not None:
            # With the scopes and deadline of what has started the thread, and the limit of its own.
            return trio.from_thread.run(_within, current_limit(), work)
        if home is not None:
            home.check_failed(guard)
        site, leased = _find_site(body)
        crossing = Crossing[T](site)
        try:
            crossing.start(work)
            crossing.wait(guard, lambda: crossing.is_done)
            if guard.has_come and put_back is not None and crossing.error is None and not crossing.was_cancelled:
                put_back(cast("T", crossing.value))
            return crossing.result()
        except BaseException as error:
            if home is not None and not (isinstance(error, Cancelled) and error.limit is not None):
                home.check_failed(guard, crossing)
            raise
        finally:
            if leased is not None:
                release(leased)


def wait_now(function: Callable[[], T], home: AnyBody | None = None) -> T:
    """Have something done in Trio that does not wait."""

    async def call() -> T:
        return function()

    return wait(call, home)


def submit(work: Callable[[], Awaitable[T]], home: AnyBody | None = None, *, at_home: bool = False) -> CallFuture[T]:
    """Have work done in Trio; return its future. A block that is left waits for it.

    Args:
        work: What.
        home: The block of the mesh that it is for.
        at_home: Whether it belongs to that block even where the running code is in another one inside of it.
    """
    check_thread()
    with InterruptGuard() as guard:
        if home is not None:
            home.check_failed(guard)
        site, leased = _find_site(home if at_home and home is not None and home.is_open else _find_body(home))
        crossing = FutureCrossing[T](site)
        if leased is not None:
            crossing.future.add_done_callback(lambda _: release(leased))
        crossing.start(work)
        return crossing.future


def enter(block: AbstractAsyncContextManager[T]) -> AbstractContextManager[T]:
    """Make an async context manager of Trio one of this thread: `with tb.enter(buffer.map()) as view:`."""
    return body_of(block, repr(block))


class Each(Iterator[T]):
    """The items of an async iterator of Trio.

    Args:
        items: That iterator.
        home: The block of the mesh that it belongs to.
    """

    def __init__(self, items: AsyncIterator[T], home: AnyBody | None = None) -> None:
        self._items = items
        self._home = home
        self._taken: list[Any] = []

    @property
    def has_kept(self) -> bool:
        """Whether an item has come together with a Ctrl-C, and was not returned."""
        return bool(self._taken)

    def take_kept(self) -> T:
        """Return that item."""
        found: T = self._taken.pop()
        return found

    def __next__(self) -> T:
        """Wait for the next item; one that comes together with a Ctrl-C is not lost."""
        found = self._taken.pop() if self._taken else wait(self._step, self._home, self._taken.append)
        if found is _END:
            raise StopIteration
        return cast("T", found)

    async def _step(self) -> Any:
        try:
            return await anext(self._items)
        except StopAsyncIteration:
            return _END


def _find_body(home: AnyBody | None) -> AnyBody | None:
    body = innermost()
    if body is None and home is not None and home.is_open:
        body = home
    if body is not None and body.site.run.is_forgotten:
        raise RuntimeError(
            "this process was forked from the one that has the block, and shares nothing of it: open a block here, or "
            "use the handles where they were made"
        )
    return body


def _find_site(body: AnyBody | None) -> tuple[Site[ThreadRun], ThreadRun | None]:
    """Return where to do work, and what has been leased for it."""
    if body is not None:
        return body.site, None
    leased = lease()
    return leased.root, leased


async def _within(limit: TimeLimit | None, work: Callable[[], Awaitable[T]]) -> T:
    """Do work of a thread that Trio has started.

    Raises:
        Cancelled: The time limit that it is in is over, and the work has unwound.
    """
    if limit is None:
        return await work()
    with trio.CancelScope(deadline=trio.current_time() + limit.deadline - time.monotonic()):
        return await work()
    raise Cancelled("the time limit around it is over", limit)
