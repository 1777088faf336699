"""One piece of work that an asyncio task has done in Trio, and waits for.

CX-1 the asyncio task goes on only after the work in Trio has ended, however often it is cancelled meanwhile.
CX-2 a cancel of the asyncio task cancels the scope of the work; an error that the work raises all the same wins over
     the cancel, as it does in `asyncio.TaskGroup`; a value does not.
CX-3 a cancel that comes from Trio's side is `asyncio.CancelledError` here.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Generic, TypeVar, cast

import attrs
import trio

from trimesh._runtime.tasks.cancelled import split_cancelled
from trimesh.aio.trio_run import Site

T = TypeVar("T")


@attrs.define(eq=False)
class Crossing(Generic[T]):
    """Work in Trio for one asyncio task.

    Attributes:
        site: Where in Trio.
        scope: Around it, there.
        is_done: Whether it has ended; told by asyncio's side, as all that follows.
        value: What it has returned.
        error: What it has raised, without the cancel.
        was_cancelled: Whether a cancel has ended it.
        on_broken: Called when Trio has ended without a word about it.
    """

    site: Site
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    is_done: bool = False
    value: T | None = None
    error: BaseException | None = None
    was_cancelled: bool = False
    on_broken: Callable[[], object] | None = None
    _waiter: asyncio.Future[None] | None = None

    def start(self, work: Callable[[], Awaitable[T]]) -> None:
        """Begin the work, with the context variables of the caller.

        Raises:
            trio.RunFinishedError: Trio has ended.
        """
        context = contextvars.copy_context()
        self.site.run.waiting.add(self)
        try:
            self.site.run.post(lambda: context.run(self._begin, work))
        except trio.RunFinishedError:
            self.site.run.waiting.discard(self)
            raise

    def _begin(self, work: Callable[[], Awaitable[T]]) -> None:
        assert self.site.nursery is not None
        try:
            self.site.nursery.start_soon(self._work, work)
        except RuntimeError as error:  # the run of another thread has ended meanwhile
            self.site.run.tell(partial(self._end, error=error))

    @trio.lowlevel.enable_ki_protection
    async def _work(self, work: Callable[[], Awaitable[T]]) -> None:
        value: T | None = None
        error: BaseException | None = None
        is_cancelled = False
        try:
            with self.scope:
                value = await work()
            is_cancelled = self.scope.cancelled_caught
        except BaseException as raised:  # noqa: BLE001 - it is the asyncio task's to raise
            cancelled, error = split_cancelled(raised)
            if cancelled is not None:
                is_cancelled = True
                raise cancelled from None
        finally:
            self.site.run.tell(partial(self._end, value, error, is_cancelled=is_cancelled))
            del error

    def _end(self, value: T | None = None, error: BaseException | None = None, *, is_cancelled: bool = False) -> None:
        self.value, self.error, self.was_cancelled = value, error, is_cancelled
        self.is_done = True
        self.site.run.waiting.discard(self)
        self.wake()

    def fail(self, error: BaseException) -> None:
        """End the wait with an error: Trio has ended without a word about the work."""
        self._end(error=error)
        if self.on_broken is not None:
            self.on_broken()

    def wake(self) -> None:
        """Let the asyncio task look at what has changed."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(
        self, until: Callable[[], bool], is_known: Callable[[], bool] | None = None
    ) -> asyncio.CancelledError | None:
        """Wait until something is so; return the first cancel that has come meanwhile: it has cancelled the work.

        Args:
            until: Asked whenever something has changed.
            is_known: Asked whether a cancel that comes is one of our own, which Trio has asked for.
        """
        cancelled: asyncio.CancelledError | None = None
        while not until():
            self._waiter = self.site.run.loop.create_future()
            try:
                await self._waiter
            except asyncio.CancelledError as error:
                if is_known is None or not is_known():
                    cancelled = cancelled or error
                    self.cancel()
        self._waiter = None
        return cancelled

    async def wait_done(self, is_known: Callable[[], bool] | None = None) -> asyncio.CancelledError | None:
        """Wait until the work has ended; see `wait`."""
        return await self.wait(lambda: self.is_done, is_known)

    def cancel(self) -> None:
        """Cancel the work, from asyncio's side."""
        if not self.is_done:
            with suppress(trio.RunFinishedError):  # then `fail` is called
                self.site.run.post(partial(self.scope.cancel, reason="the asyncio task was cancelled"))

    def __repr__(self) -> str:
        return f"<work in Trio, {'done' if self.is_done else 'under way'}>"


def cancelled_in_trio() -> asyncio.CancelledError:
    """Return what a cancel from Trio's side is in asyncio."""
    return asyncio.CancelledError("the block around it was cancelled")


async def run_in_trio(site: Site, work: Callable[[], Awaitable[T]], put_back: Callable[[T], None] | None = None) -> T:
    """Have `work` done at `site` and return its result.

    Args:
        site: Where.
        work: What.
        put_back: Given, in Trio, a result that the task does not get, because it was cancelled.

    Raises:
        asyncio.CancelledError: The task was cancelled, or the block that it is in.
        Exception: What the work has raised.
    """
    crossing = Crossing[T](site)
    crossing.start(work)
    cancelled = await crossing.wait_done()
    try:
        if crossing.error is not None:
            raise crossing.error
        if crossing.was_cancelled:
            raise cancelled or cancelled_in_trio()
        value = cast("T", crossing.value)
        if cancelled is not None:
            if put_back is not None:
                with suppress(trio.RunFinishedError):
                    site.run.post(partial(put_back, value))
            raise cancelled
        return value
    finally:
        del crossing, cancelled  # no cycle of an error, its traceback and this frame
