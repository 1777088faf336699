"""The mesh of the workloads, for trimesh; tasks and sockets of Trio programs, as `asyncio_tasks` has them."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import trio

from trimesh import Actor, HostMesh, ProcMesh, endpoint, this_host

run = trio.run
sleep = trio.sleep
in_thread = trio.to_thread.run_sync


class Member(Actor):
    """Does what `Mesh` says, over there."""

    def __init__(self) -> None:
        self.waiting = trio.Event()

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def echo(self, value: Any) -> Any:
        return value

    @endpoint
    async def length(self, value: Any) -> int:
        return len(value)

    @endpoint
    async def take(self, value: Any, seconds: float) -> None:
        del value
        if seconds:
            await trio.sleep(seconds)

    @endpoint
    async def count(self, items: int) -> AsyncGenerator[int, None]:
        for item in range(items):
            yield item

    @endpoint(group="waiting", concurrency=1)
    async def wait(self) -> None:
        self.waiting.set()
        try:
            await trio.sleep_forever()
        finally:
            self.waiting = trio.Event()

    @endpoint
    async def is_waiting(self) -> None:
        await self.waiting.wait()


class Mesh:
    """See `bench.meshes.mesh.Mesh`."""

    def __init__(self, procs: ProcMesh, members: Any, pids: list[int]) -> None:
        self.pids = pids
        self._procs = procs
        self._all = members
        self._first = members.slice(procs=0)

    def one(self, value: Any) -> Awaitable[Any]:
        return self._first.echo.call_one(value)

    def all(self, value: Any) -> Awaitable[Any]:
        return self._all.echo.call(value)

    def size_one(self, value: Any) -> Awaitable[Any]:
        return self._first.length.call_one(value)

    def size_all(self, value: Any) -> Awaitable[Any]:
        return self._all.length.call(value)

    async def tasks(self, calls: int) -> None:
        async with trio.open_nursery() as nursery:
            for call in range(calls):
                nursery.start_soon(self._first.echo.call_one, call)

    async def batch(self, calls: int) -> None:
        async with self._first.echo.map(range(calls), window=128) as results:
            async for _ in results:
                pass

    async def offer(self, value: Any, seconds: float) -> None:
        try:
            self._first.take.broadcast_nowait(value, seconds)
        except trio.WouldBlock:
            await self._first.take.broadcast(value, seconds)

    async def post(self, value: Any, seconds: float) -> None:
        await self._first.take.broadcast(value, seconds)

    async def drain(self) -> None:
        await self._first.pid.call_one()

    async def wait(self) -> None:
        await self._first.wait.call_one()

    async def cancel(self) -> float:
        ended = 0.0

        async def wait(scope: trio.CancelScope) -> None:
            nonlocal ended
            with scope:
                await self.wait()
            ended = time.perf_counter()

        async with trio.open_nursery() as nursery:
            scope = trio.CancelScope()
            nursery.start_soon(wait, scope)
            await self._first.is_waiting.call_one()
            start = time.perf_counter()
            scope.cancel()
        return ended - start

    async def neighbour(self) -> Callable[[Any], Awaitable[Any]]:
        neighbour = await self._procs.slice(procs=0).spawn("neighbour", Member)
        return neighbour.echo.call_one

    async def stream(self, items: int) -> None:
        async with self._first.count.stream(items) as results:
            async for _ in results:
                pass


@asynccontextmanager
async def open_host() -> AsyncIterator[HostMesh]:
    async with this_host().warm() as host:
        yield host


@asynccontextmanager
async def open_mesh(
    ranks: int, host: HostMesh | None = None, preload: tuple[str, ...] = (), member: type = Member
) -> AsyncIterator[Mesh]:
    async with (host or this_host()).spawn_procs({"procs": ranks}, preload=preload) as procs:
        members = await procs.spawn("members", member)
        yield Mesh(procs, members, list((await members.pid.call()).values()))


async def while_running(work: Callable[[], Awaitable[object]], look: Callable[[], Awaitable[object]]) -> None:
    is_over = False

    async def run_work() -> None:
        nonlocal is_over
        await work()
        is_over = True

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_work)
        while not is_over:
            await look()


async def at_once(call: Callable[[], Awaitable[object]], count: int) -> None:
    """Make `count` calls, each in a task of its own."""
    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(call)


@asynccontextmanager
async def working(work: Callable[[], Awaitable[None]], count: int) -> AsyncIterator[None]:
    """Run `work` in `count` tasks, and cancel them at the end of the block."""
    async with trio.open_nursery() as nursery:
        for _ in range(count):
            nursery.start_soon(work)
        yield
        nursery.cancel_scope.cancel()


async def receive(connection: socket.socket) -> bytes:
    """Receive at most one byte."""
    await trio.lowlevel.wait_readable(connection)
    return connection.recv(1)
