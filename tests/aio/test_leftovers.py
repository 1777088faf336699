"""Work that outlives the calls of asyncio actors: executor jobs, tasks, generators; actors end with it, or after it."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import trio
from tests.conformance.probe import Probe

import trimesh
from trimesh import MeshErrorGroup, ProcDied, endpoint, leaves, this_host

pytestmark = pytest.mark.real

colour: contextvars.ContextVar[str] = contextvars.ContextVar("colour", default="none")


class Threaded(trimesh.aio.Actor):
    """Has threads of executors, and what ends them."""

    def __init__(self, tell: Any = None) -> None:
        self.tell = tell
        self.go = threading.Event()
        self.begun = asyncio.Event()
        self.kept: list[Any] = []

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        colour.set("of lifespan")
        yield
        self.go.set()
        if self.tell is not None:
            await self.tell.note.call_one("left")

    @endpoint
    async def compute(self, number: int) -> list[Any]:
        """Use the default executor, one of its own and `to_thread`."""
        loop = asyncio.get_running_loop()
        first = await loop.run_in_executor(None, pow, number, 2)
        with ThreadPoolExecutor(1) as executor:
            second = await loop.run_in_executor(executor, pow, number, 3)
        third = await asyncio.to_thread(pow, number, 4)
        return [first, second, third, await asyncio.to_thread(colour.get)]

    @endpoint
    async def fail_in_executor(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, partial(int, "no number"))

    @endpoint(concurrency=4)
    async def wait_in_executor(self) -> bool:
        self.begun.set()
        return await asyncio.get_running_loop().run_in_executor(None, self.go.wait)

    @endpoint
    async def leave_in_executor(self) -> None:
        """Start a job that ends with the actor, and do not wait for it."""
        self.kept.append(asyncio.get_running_loop().run_in_executor(None, self.go.wait))

    @endpoint
    async def sleep_in_executor(self) -> None:
        """Start a job that does not end, and do not wait for it."""
        self.kept.append(asyncio.get_running_loop().run_in_executor(None, threading.Event().wait))

    @endpoint
    async def leave_tasks(self, count: int) -> None:
        """Start tasks that take several turns to unwind; the last one starts another while it does."""
        self.kept += [asyncio.create_task(self._unwind(number == 0)) for number in range(count)]
        await asyncio.sleep(0)

    async def _unwind(self, is_first: bool) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(10):
                await asyncio.sleep(0)
            if is_first:
                self.kept.append(asyncio.create_task(self._unwind(False)))
            self.go.set()
            if self.tell is not None:
                await self.tell.note.call_one("task over")

    @endpoint
    async def leave_generator(self) -> int:
        """Leave an async generator that is not exhausted."""
        generator = self._numbers()
        self.kept.append(generator)
        return await anext(generator)

    async def _numbers(self) -> AsyncGenerator[int, None]:
        try:
            yield 1
        finally:
            await asyncio.sleep(0)
            self.go.set()

    @endpoint(concurrency=4)
    async def wait_begun(self) -> None:
        await self.begun.wait()

    @endpoint(concurrency=4)
    async def let_go(self) -> None:
        self.go.set()


async def test_executors_work_inside_of_an_asyncio_actor() -> None:
    """K05: `run_in_executor(None, ...)`, an executor of its own and `to_thread`, which has the context of the call."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        threaded = await procs.spawn("threaded", Threaded)
        for number in range(5):
            found = await threaded.compute.call_one(number)
            assert found == [number**2, number**3, number**4, "of lifespan"]
        with pytest.raises(ValueError, match="no number"):
            await threaded.fail_in_executor.call_one()


async def test_loop_serves_while_the_executor_works() -> None:
    """K05: calls that wait for threads hold neither the loop nor other calls."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        threaded = await procs.spawn("threaded", Threaded)
        found: list[bool] = []

        async def wait() -> None:
            found.append(await threaded.wait_in_executor.call_one())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            nursery.start_soon(wait)
            await threaded.wait_begun.call_one()
            assert (await threaded.compute.call_one(2))[0] == 4
            await threaded.let_go.call_one()
        assert found == [True, True]


async def test_cancel_of_a_call_leaves_the_job_of_the_executor_alone() -> None:
    """C01, K05: as in asyncio, the task ends and the thread goes on; the actor serves meanwhile."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        threaded = await procs.spawn("threaded", Threaded)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(threaded.wait_in_executor.call_one)
            await threaded.wait_begun.call_one()
            nursery.cancel_scope.cancel()
        assert (await threaded.compute.call_one(3))[0] == 9
        await threaded.let_go.call_one()


async def test_actor_ends_while_an_executor_job_and_tasks_of_it_run() -> None:
    """K05, Z15: `lifespan` ends first and lets the job go; tasks unwind, those that they start meanwhile, too."""
    async with this_host().spawn_procs({"gpus": 1}, name="outside") as outside:
        notes = await outside.spawn("notes", Probe)
        async with this_host().spawn_procs({"gpus": 1}) as procs:
            async with procs.spawn("threaded", Threaded, notes) as threaded:
                await threaded.leave_in_executor.call_one()
                await threaded.leave_tasks.call_one(3)
                assert await threaded.leave_generator.call_one() == 1
            assert sorted(await notes.seen.call_one()) == ["left", *["task over"] * 4]
            again = await procs.spawn("again", Threaded)  # on a new loop, or the same
            assert (await again.compute.call_one(2))[0] == 4


@pytest.mark.parametrize("error", [None, LookupError("body")])
async def test_process_ends_while_an_executor_job_and_tasks_of_its_actors_run(error: Exception | None) -> None:
    """K05, Z01: with the block of the processes, or by an error of its body; with actors of both kinds in it."""
    with nullcontext() if error is None else pytest.raises(MeshErrorGroup) as caught:
        async with this_host().spawn_procs({"gpus": 2}) as procs:
            threaded = await procs.spawn("threaded", Threaded)
            probes = await procs.spawn("probes", Probe)
            await threaded.leave_in_executor.call()
            await threaded.leave_tasks.call(3)
            await threaded.leave_generator.call()
            assert (await probes.rank.call()).values() == (0, 1)
            if error is not None:
                raise error
    assert [*leaves(caught.value)] == [error] if caught is not None else error is None


async def test_job_of_an_executor_that_does_not_end_is_bounded_by_the_grace() -> None:
    """Z13, Z14, K05: its process is killed, and nothing else has failed."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with this_host().spawn_procs({"gpus": 1}, grace=0.2) as procs:
            threaded = await procs.spawn("threaded", Threaded)
            await threaded.sleep_in_executor.call_one()
    [leaf] = leaves(caught.value)
    assert isinstance(leaf, ProcDied)
    assert leaf.by == "grace"


async def test_call_that_waits_in_an_executor_ends_with_its_actor() -> None:
    """M3, K05: the block is left by an error, which cancels the call; `lifespan` lets the thread go."""
    with pytest.raises(ExceptionGroup) as caught:
        async with this_host().spawn_procs({"gpus": 1}) as procs:
            threaded = await procs.spawn("threaded", Threaded)
            await threaded.wait_in_executor.broadcast()
            await threaded.wait_begun.call_one()
            raise LookupError("body")
    assert [type(leaf) for leaf in leaves(caught.value)] == [LookupError]
