"""One piece of work that an asyncio task has done in Trio, and waits for; see `_runtime.tasks.crossing`.

An error that the work raises wins over a cancel of the task, as it does in `asyncio.TaskGroup`. A cancel that comes
from Trio's side is `asyncio.CancelledError` here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar, cast

import trio

from trimesh._runtime.tasks import Site, crossing
from trimesh.aio.sites import TaskSite
from trimesh.aio.trio_run import TrioRun

T = TypeVar("T")


class Crossing(crossing.Crossing[T, TrioRun]):
    """Work in Trio for one asyncio task."""

    _waiter: asyncio.Future[None] | None = None

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

    def cancel(self, reason: str = "the asyncio task was cancelled") -> None:
        """Cancel the work, from asyncio's side."""
        super().cancel(reason)


async def cancelled_in_trio(site: Site[TrioRun]) -> asyncio.CancelledError:
    """Return what a cancel from Trio's side is in asyncio, in the task whose work at `site` was cancelled.

    Where Trio cancels that task, too, it is that cancel: a second one would come in the midst of its clean-up.
    """
    if isinstance(site, TaskSite) and site.is_here:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError as error:
            return error
    return asyncio.CancelledError("the block around it was cancelled")


async def run_in_trio(
    site: Site[TrioRun], work: Callable[[], Awaitable[T]], put_back: Callable[[T], None] | None = None
) -> T:
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
            raise cancelled or await cancelled_in_trio(site)
        value = cast("T", crossing.value)
        if cancelled is not None:
            if put_back is not None:
                with suppress(trio.RunFinishedError):
                    site.run.post(partial(put_back, value))
            raise cancelled
        return value
    finally:
        del crossing, cancelled  # no cycle of an error, its traceback and this frame
