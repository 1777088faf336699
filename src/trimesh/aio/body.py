"""Blocks with their body in an asyncio task, held open by a Trio task.

Each is a `HeldBlock` (BD-1, BD-2). When Trio cancels the block, the asyncio task that entered it is cancelled once;
leaving withdraws that request, as `asyncio.TaskGroup` does, so that only cancels from elsewhere remain. A cancel of the
whole task, as of an endpoint, counts as that of its blocks.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, suppress
from contextvars import ContextVar
from functools import partial
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, cast

import trio

from trimesh._runtime.tasks import HeldBlock, Site, crossing
from trimesh.aio.sites import AsyncioSite, TaskSite
from trimesh.aio.time_limits import LimitedSite, TimeLimit, TimeOver, current_limit
from trimesh.aio.trio_run import TrioRun, find_run, find_token, lease, running_loop

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
        enter: Function that enters the block, in Trio.
        leave: Function that leaves it, in the same task; takes the error of the body, returns whether to suppress it.
        token: Token of the Trio run, if it is in another thread.
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
            raise RuntimeError("a block can be entered once, got a second `async with`: make another one")
        self._is_used = True
        run = self._run = await lease(self._token)
        try:
            loop = run.loop
            self._owner = cast("asyncio.Task[object]", asyncio.current_task())
            self._cancels_before = self._owner.cancelling()
            around = find_site(loop) or run.root
            self._site = AsyncioSite(run, around)
            self._crossing: Crossing[None] = Crossing(around, on_broken=self._cancel_owner)
            if (limit := current_limit()) is not None:
                self._limit = limit
                self._enter_block = partial(self._enter_within, limit, self._enter_block)
            self._crossing.start(self._live)
            if run.driver is not None and not getattr(self._owner, "_must_cancel", False):
                run.driver.tick()  # most blocks are entered in one turn of Trio, without a turn of the loop
            cancelled = await self._crossing.wait(lambda: self._is_entered or self._crossing.is_done)
            if cancelled is not None or not self._is_entered:
                await self._leave(cancelled)
                assert cancelled is not None, "leaving raises what else has ended the block"
                raise cancelled
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
            BaseException: Error of the block; else the cancel of the task.
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
        """Let Trio leave the block; return whether it suppressed the error of the body."""
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
        """Enter the block, in Trio, within a time limit. Afterwards the limit cancels the owner task instead."""
        self._enter_block = enter  # no cycle
        scope = self._crossing.scope
        scope.deadline = limit.deadline_in_trio()
        value = await enter()
        scope.deadline = math.inf
        return value

    async def _cancelled_in_trio(self) -> asyncio.CancelledError:
        """Return the error by which the owner sees a cancel of the block from Trio's side."""
        if self._limit is not None and self._crossing.scope.cancelled_caught:
            return await self._limit.cut()
        return await cancelled_in_trio(self._site)

    def _has_one_cancel(self) -> bool:
        """Return whether our cancel of the owner is its only one since the block was entered."""
        return self._has_cancelled_owner and self._owner.cancelling() - 1 <= self._cancels_before

    def _abandon(self) -> None:
        """Leave without waiting: the coroutine of the body is being closed and cannot await."""
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
        elif not self._is_owner_cancelled():
            self._has_cancelled_owner = self._owner.cancel("the block around it was cancelled")

    def _is_owner_cancelled(self) -> bool:
        """Return whether a cancel of the Trio task that waits for the owner has cancelled it, as well as the block."""
        site = self._site.parent
        while site is not None and not isinstance(site, TaskSite):
            site = site.parent
        return site is not None and site.is_cancelled and site.task is self._owner


# ---- crossing --------------------------------------------------------------------------------------------------------

# Work in Trio for which an asyncio task waits; see `_runtime.tasks.crossing`.
#
# An error of the work wins over a cancel of the task, as in `asyncio.TaskGroup`. A cancel from Trio's side arrives as
# `asyncio.CancelledError`.


class Crossing(crossing.Crossing[T, TrioRun]):
    """Work in Trio for one asyncio task."""

    _waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Wake the asyncio task to process changes."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(
        self, until: Callable[[], bool], is_known: Callable[[], bool] | None = None
    ) -> asyncio.CancelledError | None:
        """Wait until a condition holds; return the first cancel that arrived meanwhile, which cancelled the work.

        Args:
            until: The condition, evaluated after each change.
            is_known: Returns whether an arriving cancel is our own, requested by Trio.
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
    """Return the asyncio form of a cancel from Trio, for the task whose work at `site` was cancelled.

    If Trio cancels that task, too, return that cancel: a second one would interrupt its clean-up.
    """
    if isinstance(site, TaskSite):
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError as error:
            return error
    return asyncio.CancelledError("the block around it was cancelled")


async def run_in_trio(
    site: Site[TrioRun], work: Callable[[], Awaitable[T]], put_back: Callable[[T], None] | None = None
) -> T:
    """Run `work` at `site` and return its result.

    Args:
        site: Site in Trio.
        work: Function to call there.
        put_back: Called in Trio with a result that the task does not get, because it was cancelled.

    Raises:
        asyncio.CancelledError: The task was cancelled, or the block that it is in.
        Exception: Error of the work.
    """
    crossing: Crossing[T] = Crossing(site)
    crossing.start(work)
    try:
        cancelled = await crossing.wait_done()
    except GeneratorExit:
        crossing.cancel("the asyncio task is gone")
        raise
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


# ---- the portal from asyncio tasks to Trio, and the block that keeps Trio running ------------------------------------

P = ParamSpec("P")


class AsyncioPortal:
    """Runs work of asyncio tasks in the Trio run of their loop; see `foreign.Portal`."""

    def run(self, function: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
        """Run a coroutine function in Trio, inside the innermost block that the running task is in."""
        return self.take(partial(function, *args, **kwargs), None)

    def take(self, step: Callable[[], Awaitable[T]], put_back: Callable[[T], None] | None) -> Coroutine[Any, Any, T]:
        """Run a step in Trio; put its result back if the task is cancelled."""
        limit = current_limit()
        return self._start(step, put_back) if limit is None else self._within(limit, step, put_back)

    async def _within(
        self, limit: TimeLimit, work: Callable[[], Awaitable[T]], put_back: Callable[[T], None] | None
    ) -> T:
        with suppress(TimeOver):
            return await self._start(partial(limit.within, work), put_back)
        raise await limit.cut()

    def _start(self, work: Callable[[], Awaitable[T]], put_back: Callable[[T], None] | None) -> Coroutine[Any, Any, T]:
        loop = running_loop()
        site = find_site(loop)
        if site is None:
            run = find_run(loop)
            if run is None:
                return self._run_by_neighbour(work, put_back)
            site = run.root
        stand_in = site.stand_in()
        return self._run(site, work, put_back) if stand_in is None else stand_in.perform(work, put_back)

    async def _run(
        self, site: AsyncioSite, work: Callable[[], Awaitable[T]], put_back: Callable[[T], None] | None
    ) -> T:
        site.run.users += 1
        try:
            return await run_in_trio(site, work, put_back)
        finally:
            await site.run.release()

    async def _run_by_neighbour(self, work: Callable[[], Awaitable[T]], put_back: Callable[[T], None] | None) -> T:
        token = find_token()
        if token is None:
            raise RuntimeError(
                "a mesh handle works only in the asyncio loop, or Trio run, whose block owns its processes, got one in "
                "a loop without an open block: write `async with trimesh.aio.spawn_procs(...) as procs:`"
            )
        async with open_trio(trio_token=token):
            return await self.take(work, put_back)

    def block(
        self, enter: Callable[[], Awaitable[T]], leave: Callable[[BaseException | None], Awaitable[bool | None]]
    ) -> AbstractAsyncContextManager[T]:
        """Return a block of Trio for a body in asyncio."""
        running_loop()
        return Body(enter, leave)

    def run_now(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function that does not wait, in Trio's thread if the running loop uses a Trio run."""
        call = partial(function, *args, **kwargs)
        try:
            run = find_run(asyncio.get_running_loop())
        except RuntimeError:
            return call()  # no asyncio either
        if run is not None:
            result: T = run.run_now(call)
            return result
        token = None if trio.lowlevel.in_trio_run() else find_token()
        return call() if token is None else trio.from_thread.run_sync(call, trio_token=token)

    def place(self) -> Site[TrioRun] | None:
        """Return the site in Trio for work of the running asyncio task."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return None
        run = find_run(loop)
        site = find_site(loop) or (None if run is None else run.root)
        limit = current_limit()
        return site if site is None or limit is None else LimitedSite(site, limit)


def open_trio(*, trio_token: trio.lowlevel.TrioToken | None = None) -> AbstractAsyncContextManager[None]:
    """Use one Trio run for all meshes of the block: `async with trimesh.aio.open_trio():`.

    Each block of a mesh does so itself. Around several in a row this saves starting Trio again; and it lets a loop in
    a thread of its own use meshes of a Trio program.

    Args:
        trio_token: Token of a Trio run in another thread. If left out: the run that this thread has (the program made
            Trio a guest of its loop), or the one that started this thread (`trio.to_thread.run_sync(asyncio.run,
            ...)`), else a new guest of the running loop.
    """
    return Body(_do_nothing, _settle_nothing, trio_token)


async def _do_nothing() -> None:
    await trio.lowlevel.checkpoint()


async def _settle_nothing(error: BaseException | None) -> bool:
    await trio.lowlevel.checkpoint()
    return False


crossing.set_portal(AsyncioPortal())
