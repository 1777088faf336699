"""An `async with` whose body is in an asyncio task, and whose block is in a Trio task of its own.

It is a `HeldBlock` (BD-1, BD-2). When Trio cancels the block, the asyncio task that has entered it is cancelled, once;
leaving takes that request back, as `asyncio.TaskGroup` does, so that only cancels from elsewhere are left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from types import TracebackType
from typing import TypeVar, cast

import trio

from trimesh._runtime.tasks import HeldBlock, Site
from trimesh.aio.crossing import Crossing, TaskSite, cancelled_in_trio
from trimesh.aio.trio_run import TrioRun, lease

T = TypeVar("T")

site_variable: ContextVar[Site[TrioRun] | None] = ContextVar("trimesh_aio_site", default=None)


def find_site(loop: asyncio.AbstractEventLoop) -> Site[TrioRun] | None:
    """Return the site of the innermost open block of `loop` that the running code is in."""
    site = site_variable.get()
    while site is not None and not (site.is_open and site.run.loop is loop and _is_for_this_task(site)):
        site = site.parent
    return site


def _is_for_this_task(site: Site[TrioRun]) -> bool:
    return not isinstance(site, TaskSite) or site.is_here


class Body(HeldBlock[T, TrioRun], AbstractAsyncContextManager[T, "bool | None"]):
    """A block of Trio for a body in asyncio; used once.

    Args:
        enter: Enters the block, in Trio.
        leave: Leaves it, in the same task; gets what the body has raised, returns whether that is settled.
        token: Of the Trio run, if it is one of another thread.
    """

    def __init__(
        self,
        enter: Callable[[], Awaitable[T]],
        leave: Callable[[BaseException | None], Awaitable[bool | None]],
        token: trio.lowlevel.TrioToken | None = None,
    ) -> None:
        super().__init__(enter, leave)
        self._token = token
        self._is_used = False
        self._is_entered = False
        self._value: T | None = None
        self._has_cancelled_owner = False

    async def __aenter__(self) -> T:
        """Enter the block.

        Raises:
            asyncio.CancelledError: The task was cancelled; nothing of the block is left.
            RuntimeError: It was entered before.
        """
        if self._is_used:
            raise RuntimeError("a block can be entered once: make another one")
        self._is_used = True
        run = self._run = await lease(self._token)
        try:
            loop = run.loop
            self._owner = cast("asyncio.Task[object]", asyncio.current_task())
            self._cancels_before = self._owner.cancelling()
            around = find_site(loop) or run.root
            self._site = Site(run, around)
            self._crossing = Crossing[None](around, on_broken=self._cancel_owner)
            self._crossing.start(self._live)
            cancelled = await self._crossing.wait(lambda: self._is_entered or self._crossing.is_done)
            if cancelled is not None or not self._is_entered:
                await self._leave(cancelled)
                raise cancelled or await cancelled_in_trio(around)
        except BaseException:
            await run.release()
            raise
        site_variable.set(self._site)
        value, self._value = self._value, None
        return cast("T", value)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """Leave the block.

        Raises:
            BaseException: What the block raises; the cancel of the task otherwise.
        """
        if site_variable.get() is self._site:
            site_variable.set(self._site.parent)
        if isinstance(error, GeneratorExit):
            self._abandon()
            return False
        try:
            return await self._leave(error)
        finally:
            await self._run.release()

    async def _leave(self, error: BaseException | None) -> bool:
        """Let the block be left; return whether it has swallowed what the body has raised."""
        crossing = self._crossing
        self._site.is_open = False
        is_ours = self._has_one_cancel()
        cancelled = error if isinstance(error, asyncio.CancelledError) and not is_ours else None
        if cancelled is not None:
            crossing.cancel()
        elif not isinstance(error, asyncio.CancelledError):
            self._body_error = error
        self._let_go()
        try:
            cancelled = await crossing.wait_done(self._has_one_cancel) or cancelled
            if self._has_cancelled_owner:
                self._has_cancelled_owner = False
                self._owner.uncancel()
            if crossing.error is not None and crossing.error is not error:
                raise crossing.error
            if crossing.error is not None or (error is not None and not self._is_suppressed):
                return False
            if cancelled is not None or crossing.was_cancelled:
                raise cancelled or await cancelled_in_trio(self._site)
            return self._is_suppressed
        finally:
            del crossing, error, cancelled  # no cycle of an error, its traceback and this frame

    def _has_one_cancel(self) -> bool:
        """Tell whether the cancel of the owner is the only one since the block was entered."""
        return self._has_cancelled_owner and self._owner.cancelling() - 1 <= self._cancels_before

    def _abandon(self) -> None:
        """Leave without waiting: the coroutine of the body is being closed, so there is nothing to wait in."""
        self._site.is_open = False
        self._crossing.cancel()
        self._let_go()
        self._run.give_up()

    def _entered(self, value: T) -> None:
        self._value, self._is_entered = value, True
        self._site.is_open = True
        self._crossing.wake()

    def _tell_cancel(self) -> bool:
        return self._site.run.tell(self._cancel_owner)

    def _cancel_owner(self) -> None:
        if self._site.is_open:
            self._has_cancelled_owner = self._owner.cancel("the block around it was cancelled")
