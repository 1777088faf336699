"""An `async with` whose body is in an asyncio task, and whose block is in a Trio task of its own.

It is a `HeldBlock` (BD-1, BD-2). When Trio cancels the block, the asyncio task that has entered it is cancelled, once;
leaving takes that request back, as `asyncio.TaskGroup` does, so that only cancels from elsewhere are left.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from functools import partial
from types import TracebackType
from typing import TypeVar, cast

import trio

from trimesh._runtime.tasks import HeldBlock
from trimesh.aio.crossing import Crossing, cancelled_in_trio
from trimesh.aio.sites import AsyncioSite, TaskSite
from trimesh.aio.time_limits import TimeLimit, current_limit
from trimesh.aio.trio_run import lease

T = TypeVar("T")

site_variable: ContextVar[AsyncioSite | None] = ContextVar("trimesh_aio_site", default=None)


def find_site(loop: asyncio.AbstractEventLoop) -> AsyncioSite | None:
    """Return the site of the innermost open block of `loop` that the running code is in."""
    site = site_variable.get()
    while site is not None and not (site.is_open and site.run.loop is loop and _is_for_this_task(site)):
        site = site.parent
    return site


def _is_for_this_task(site: AsyncioSite) -> bool:
    return not isinstance(site, TaskSite) or site.is_here


class Body(HeldBlock[T, AsyncioSite], AbstractAsyncContextManager[T, "bool | None"]):
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
        self._limit: TimeLimit | None = None

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
            self._site = AsyncioSite(run, around)
            self._crossing = Crossing[None](around, on_broken=self._cancel_owner)
            if (limit := current_limit()) is not None:
                self._limit = limit
                self._enter_block = partial(self._enter_within, limit, self._enter_block)
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
                raise cancelled or await self._cancelled_in_trio()
            return self._is_suppressed
        finally:
            del crossing, error, cancelled  # no cycle of an error, its traceback and this frame

    async def _enter_within(self, limit: TimeLimit, enter: Callable[[], Awaitable[T]]) -> T:
        """Enter the block, in Trio, until a deadline. From then on the cancel of the owner is enough."""
        self._enter_block = enter  # no cycle
        scope = self._crossing.scope
        scope.deadline = limit.deadline_in_trio()
        value = await enter()
        scope.deadline = math.inf
        return value

    async def _cancelled_in_trio(self) -> asyncio.CancelledError:
        """Return what a cancel of the block from Trio's side is for the owner."""
        if self._limit is not None and self._crossing.scope.cancelled_caught:
            return await self._limit.cut()
        return await cancelled_in_trio(self._site)

    def _has_one_cancel(self) -> bool:
        """Tell whether the cancel of the owner is the only one since the block was entered."""
        return self._has_cancelled_owner and self._owner.cancelling() - 1 <= self._cancels_before

    def _abandon(self) -> None:
        """Leave without waiting: the coroutine of the body is being closed, so there is nothing to wait in."""
        self._site.is_open = False
        self._crossing.cancel()
        self._let_go()
        self._run.give_up()

    def _let_go(self) -> None:
        self._site.end_spare()
        super()._let_go()

    def _entered(self, value: T) -> None:
        self._value, self._is_entered = value, True
        self._site.is_open = True
        self._crossing.wake()

    def _tell_cancel(self) -> bool:
        return self._site.run.tell(self._cancel_owner)

    def _cancel_owner(self) -> None:
        if not self._site.is_open:
            return
        if self._limit is not None and self._crossing.scope.cancel_called:  # as the block was entered
            self._limit.expire()
        else:
            self._has_cancelled_owner = self._owner.cancel("the block around it was cancelled")
