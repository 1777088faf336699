"""Calls from any thread of any process of the program (K06)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import trio
from tests.patience import HANG_SECONDS

import trimesh
import trimesh.aio
import trimesh.blocking as tb
from trimesh import Actor, endpoint, this_host

pytestmark = [pytest.mark.real, pytest.mark.daily]


def in_thread(work: Callable[[], Any]) -> Any:
    """Run something in a thread that trimesh and Trio know nothing of."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:  # noqa: BLE001 - raised in the thread of the caller
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


class Worker(Actor):
    """Calls another one from threads."""

    def __init__(self) -> None:
        self.cancelled = False

    @endpoint
    async def step(self, number: int) -> int:
        return number + 1

    @endpoint
    async def hang(self) -> None:
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            self.cancelled = True
            raise

    @endpoint
    async def was_cancelled(self) -> bool:
        return self.cancelled

    @endpoint
    async def fail(self) -> None:
        raise LookupError("no such step")

    @endpoint(thread=True)
    def of_endpoint(self, other: Any) -> Any:
        return other.step.call_one.from_thread(1)

    @endpoint(thread=True)
    def of_own_thread(self, other: Any) -> Any:
        return in_thread(lambda: other.step.call_one.from_thread(1))

    @endpoint(thread=True)
    def of_function(self, other: Any) -> Any:
        async def twice() -> Any:
            return await other.step.call_one(await other.step.call_one(1))

        return in_thread(lambda: trimesh.from_thread.run(twice))

    @endpoint(thread=True)
    def hang_in_own_thread(self, other: Any) -> None:
        thread = threading.Thread(target=other.hang.call_one.from_thread, daemon=True)
        thread.start()

    @endpoint
    def inline(self, other: Any) -> Any:
        return other.step.call_one.from_thread(1)


class Server(trimesh.aio.Actor):
    """Calls others from an executor of asyncio."""

    @endpoint
    async def of_executor(self, other: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(None, lambda: other.step.call_one.from_thread(1))


@pytest.mark.parametrize("way", ["of_endpoint", "of_own_thread", "of_function"])
async def test_worker_calls_from_threads(way: str):
    """K06: of an endpoint, and of its own."""
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        workers = await procs.spawn("workers", Worker)
        verb = getattr(workers.slice(gpus=0), way)
        assert await verb.call_one(workers.slice(gpus=1)) == (3 if way == "of_function" else 2)


async def test_asyncio_actor_calls_from_its_executor():
    """K05, K06."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        workers, servers = await procs.spawn("workers", Worker), await procs.spawn("servers", Server)
        assert await servers.of_executor.call_one(workers) == 2


async def test_controller_calls_from_threads():
    """K06: Trio's, and others; errors and groups are those of the verb."""
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        workers = await procs.spawn("workers", Worker)
        for run in (trio.to_thread.run_sync, lambda work: trio.to_thread.run_sync(in_thread, work)):
            assert list((await run(lambda: workers.step.call.from_thread(1))).values()) == [2, 2]
            with pytest.raises(LookupError, match="no such step"):
                await run(workers.slice(gpus=0).fail.call_one.from_thread)


async def test_time_limit_of_a_thread_cancels_its_call():
    """K06: over there, too."""

    def work(seconds: float) -> None:
        with tb.move_on_after(seconds):
            worker.hang.call_one.from_thread()

    async with this_host().spawn_procs({"gpus": 1}) as procs:
        worker = await procs.spawn("worker", Worker)
        was_cancelled = False
        for seconds in (0.1, 1.0, HANG_SECONDS / 2):  # a busy machine may need more to begin
            await trio.to_thread.run_sync(in_thread, partial(work, seconds))
            if was_cancelled := await worker.was_cancelled.call_one():
                break
        assert was_cancelled


async def test_plain_endpoint_is_told_what_to_write():
    """K06."""
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        workers = await procs.spawn("workers", Worker)
        with pytest.raises(RuntimeError, match=r"mark the endpoint with thread=True"):
            await workers.slice(gpus=0).inline.call_one(workers.slice(gpus=1))


async def test_task_is_told_what_to_write():
    """K06: it would wait for itself."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        workers = await procs.spawn("workers", Worker)
        with pytest.raises(RuntimeError, match=r"await the handles of `trimesh`"):
            workers.step.call_one.from_thread(1)


async def test_thread_that_waits_does_not_hold_up_the_end():
    """K06, Z01: its call is cancelled with the process, which would be ended by force for want of grace otherwise."""
    async with this_host().spawn_procs({"gpus": 2}, grace=HANG_SECONDS) as procs:
        workers = await procs.spawn("workers", Worker)
        await workers.slice(gpus=0).hang_in_own_thread.call_one(workers.slice(gpus=1))


def test_thread_of_two_programs_in_one_process_is_told_what_to_write():
    """K06: nothing says which Trio run is meant."""
    opened, done = threading.Barrier(3), threading.Event()

    async def main() -> None:
        async with this_host().spawn_procs({"gpus": 1}) as procs:
            workers.append(await procs.spawn("workers", Worker))
            await trio.to_thread.run_sync(opened.wait)
            await trio.to_thread.run_sync(done.wait)

    workers: list[Any] = []
    threads = [threading.Thread(target=trio.run, args=(main,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    opened.wait()
    try:
        with pytest.raises(RuntimeError, match=r"none of the 2 runs.*trio\.to_thread\.run_sync"):
            workers[0].step.call_one.from_thread(1)
    finally:
        done.set()
        for thread in threads:
            thread.join()
