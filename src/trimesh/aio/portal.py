"""The portal between the tasks of asyncio and Trio, and the block that keeps it running."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar

import trio

from trimesh._runtime.tasks import Site, crossing
from trimesh.aio.body import Body, find_site
from trimesh.aio.crossing import run_in_trio
from trimesh.aio.sites import AsyncioSite
from trimesh.aio.time_limits import LimitedSite, TimeLimit, TimeOver, current_limit
from trimesh.aio.trio_run import TrioRun, find_run, find_token, running_loop

P = ParamSpec("P")
T = TypeVar("T")


class AsyncioPortal:
    """Brings the work of asyncio tasks to the Trio run of their loop; see `foreign.Portal`."""

    def run(self, function: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
        """Run a coroutine function in Trio, inside the innermost block that the running task is in."""
        return self.take(partial(function, *args, **kwargs), None)

    def take(self, step: Callable[[], Awaitable[T]], put_back: Callable[[T], None] | None) -> Coroutine[Any, Any, T]:
        """Run a step in Trio; what it has taken for a task that is cancelled is put back."""
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
                "a mesh handle works only in the asyncio loop, or Trio run, whose block owns its processes, and no "
                "block is open in this loop: write `async with trimesh.aio.spawn_procs(...) as procs:`"
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
        """Run a function that does not wait; in the thread of Trio, where the running loop uses a Trio run."""
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
        """Return where in Trio the work of the running task of asyncio is done."""
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

    The blocks of meshes do so themselves. Around several that follow each other it saves starting Trio anew; and
    it lets a loop in a thread of its own use meshes of a Trio program.

    Args:
        trio_token: Of a Trio run in another thread. Without it, it is the run that this thread has already (the
            program has made Trio a guest of its loop itself), or the one that has started this thread
            (`trio.to_thread.run_sync(asyncio.run, ...)`), else a guest of the running loop.
    """
    return Body(_do_nothing, _settle_nothing, trio_token)


async def _do_nothing() -> None:
    await trio.lowlevel.checkpoint()


async def _settle_nothing(error: BaseException | None) -> bool:
    await trio.lowlevel.checkpoint()
    return False


crossing.set_portal(AsyncioPortal())
