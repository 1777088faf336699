"""The asyncio loop for the actors of a process that are asyncio programs: one, in a thread of its own.

    none --lease()--> starting --> running --last release()--> ending --> none

LH-1 the first actor that needs it starts it, and the last one to go ends it; in between all share it.
LH-2 it is served as long as the links of the process are: what actors do while they unwind works.
LH-3 an end that no actor has asked for ends everything that waits for the loop, with an error.
"""

from __future__ import annotations

import asyncio
import contextvars
from functools import partial
from typing import cast

import trio

from trimesh._runtime.life import Proc
from trimesh._runtime.tasks import Waiting
from trimesh.aio.actor_tasks import broken_loop, start_task
from trimesh.aio.body import open_trio
from trimesh.aio.trio_run import TrioRun, find_run
from trimesh.errors import TrimeshInternalError


class LoopThread:
    """The loop, and the thread that it runs in.

    Attributes:
        run: The Trio run of the process as the loop sees it; there once it runs.
        works: What waits in Trio for a task of the loop.
    """

    def __init__(self) -> None:
        self.run: TrioRun
        self.works: set[Waiting] = set()
        self._users = 0
        self._is_running = False
        self._started = trio.Event()
        self._unused = trio.Event()
        self._ended = trio.Event()
        self._stop: asyncio.Event
        self._error: BaseException | None = None

    # ---- Trio's side -----------------------------------------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        """Whether it takes no more work."""
        return self._unused.is_set() or self._ended.is_set()

    async def release(self) -> None:
        """Stop to use it; the last one ends it and waits for that, whatever cancels come meanwhile."""
        self._users -= 1
        if not self._users:
            self._unused.set()
            with trio.CancelScope(shield=True):
                await self._ended.wait()

    def broken(self) -> TrimeshInternalError:
        """Return the error of those who need a loop that has ended by itself."""
        return broken_loop(self._error)

    async def _wait_started(self) -> None:
        await self._started.wait()
        if not self._is_running:
            raise self.broken()

    @trio.lowlevel.enable_ki_protection
    async def _serve(self) -> None:
        """Run the thread until the last user has gone, or the links of the process are served no more."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._wait_thread, trio.lowlevel.current_trio_token())
            try:
                await self._unused.wait()
            finally:
                self._unused.set()
                if self._is_running:
                    self._tell_stop()

    async def _wait_thread(self, token: trio.lowlevel.TrioToken) -> None:
        context = contextvars.Context()  # the actor that comes first is not the one that all tasks belong to
        try:
            with trio.CancelScope(shield=True):
                # Its own limiter: it would take one of the threads that the program counts on for all its life.
                limiter = trio.CapacityLimiter(1)
                await trio.to_thread.run_sync(lambda: context.run(self._run_loop, token), limiter=limiter)
        except BaseException as error:  # noqa: BLE001 - told to the actors, which fail by it
            self._error = error
        self._is_running = False
        self._ended.set()
        self._started.set()
        for work in list(self.works):
            work.fail(self.broken())
        self._unused.set()

    def _runs(self, run: TrioRun) -> None:
        self.run, self._is_running = run, True
        self._started.set()
        if self._unused.is_set():  # it was never waited for
            self._tell_stop()

    def _tell_stop(self) -> None:
        self.run.tell(self._stop.set)

    # ---- asyncio's side --------------------------------------------------------------------------------------

    def _run_loop(self, token: trio.lowlevel.TrioToken) -> None:
        with asyncio.Runner() as runner:
            runner.get_loop().set_task_factory(start_task)
            runner.run(self._serve_loop(token))

    async def _serve_loop(self, token: trio.lowlevel.TrioToken) -> None:
        self._stop = asyncio.Event()
        async with open_trio(trio_token=token):
            run = find_run(asyncio.get_running_loop())
            assert run is not None
            run.post(partial(self._runs, run))
            await self._stop.wait()


async def lease_thread(proc: Proc) -> LoopThread:
    """Use the loop in a thread of the running process, in one of its Trio tasks; the first one starts it. Release it.

    Raises:
        RuntimeError: The process is ending.
    """
    thread = cast("LoopThread | None", proc.above.get(LoopThread))
    if thread is None or thread.has_ended:
        thread = proc.above[LoopThread] = LoopThread()
        if not proc.serve(thread._serve):  # noqa: SLF001 - its own module
            raise RuntimeError("an actor cannot begin in a process that is ending")
    thread._users += 1  # noqa: SLF001 - the same
    try:
        await thread._wait_started()  # noqa: SLF001 - the same
    except BaseException:
        await thread.release()
        raise
    return thread
