"""The mesh of the workloads, for Ray: asyncio actors without a share of the cores, called from asyncio."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import ray

from bench.meshes.asyncio_tasks import while_running
from bench.processes import wait_for_ends

__all__ = ["Mesh", "open_host", "open_mesh", "run", "while_running"]


def run(function: Callable[..., Any], *arguments: Any) -> Any:
    return asyncio.run(function(*arguments))


class Member:
    """Does what `Mesh` says, over there."""

    def __init__(self) -> None:
        self.waiting = asyncio.Event()

    async def pid(self) -> int:
        return os.getpid()

    async def echo(self, value: Any) -> Any:
        return value

    async def length(self, value: Any) -> int:
        return len(value)

    @ray.method(concurrency_group="one_at_a_time")
    async def take(self, value: Any, seconds: float) -> None:
        del value
        if seconds:
            await asyncio.sleep(seconds)

    @ray.method(concurrency_group="one_at_a_time")
    async def has_taken(self) -> None: ...

    async def count(self, items: int) -> AsyncIterator[int]:
        for item in range(items):
            yield item

    async def wait(self) -> None:
        self.waiting.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.waiting = asyncio.Event()

    async def is_waiting(self) -> None:
        await self.waiting.wait()


class Restartable:
    """Without groups of concurrency: which process answers is all that is asked."""

    async def pid(self) -> int:
        return os.getpid()


class Mesh:
    """See `bench.meshes.mesh.Mesh`."""

    def __init__(self, members: list[Any], pids: list[int]) -> None:
        self.pids = pids
        self._all = members
        self._first = members[0]

    def one(self, value: Any) -> Awaitable[Any]:
        return self._first.echo.remote(value)

    def all(self, value: Any) -> Awaitable[Any]:
        return asyncio.gather(*(member.echo.remote(value) for member in self._all))

    def size_one(self, value: Any) -> Awaitable[Any]:
        return self._first.length.remote(value)

    def size_all(self, value: Any) -> Awaitable[Any]:
        stored = ray.put(value)  # one copy, which all of them map
        return asyncio.gather(*(member.length.remote(stored) for member in self._all))

    async def tasks(self, calls: int) -> None:
        await asyncio.gather(*(self._first.echo.remote(call) for call in range(calls)))

    async def batch(self, calls: int) -> None:
        ray.get([self._first.echo.remote(call) for call in range(calls)])

    async def offer(self, value: Any, seconds: float) -> None:
        self._first.take.remote(value, seconds)

    post = offer

    async def drain(self) -> None:
        await self._first.has_taken.remote()

    async def wait(self) -> None:
        await self._first.wait.remote()

    async def cancel(self) -> float:
        call = self._first.wait.remote()
        await self._first.is_waiting.remote()
        start = time.perf_counter()
        ray.cancel(call)
        try:
            await call
        except ray.exceptions.TaskCancelledError:
            return time.perf_counter() - start
        raise RuntimeError("a cancelled call returned")

    async def neighbour(self) -> Callable[[Any], Awaitable[Any]]:
        return self.one  # an actor is a process

    async def stream(self, items: int) -> None:
        async for item in self._first.count.options(num_returns="streaming").remote(items):
            await item


@asynccontextmanager
async def open_host() -> AsyncIterator[str]:
    ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        yield "cluster"
    finally:
        ray.shutdown()


@asynccontextmanager
async def open_mesh(ranks: int, host: str | None = None) -> AsyncIterator[Mesh]:
    if host is None:
        async with open_host() as cluster, open_mesh(ranks, cluster) as mesh:
            yield mesh
        return
    actor = ray.remote(num_cpus=0, concurrency_groups={"one_at_a_time": 1})(Member)
    members = [actor.remote() for _ in range(ranks)]
    pids = await asyncio.gather(*(member.pid.remote() for member in members))
    try:
        yield Mesh(members, pids)
    finally:
        pidfds = {}
        for pid in pids:
            try:
                pidfds[pid] = os.pidfd_open(pid)
            except ProcessLookupError:  # a workload has killed it
                continue
        for member in members:
            ray.kill(member)
        wait_for_ends(pidfds)
        for pidfd in pidfds.values():
            os.close(pidfd)
