"""The mesh of the workloads, for Monarch."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import monarch.actor
from monarch.actor import Actor, Channel, Port, endpoint, shutdown_context, this_host

from bench.meshes.asyncio_tasks import while_running

__all__ = ["Mesh", "open_host", "open_mesh", "run", "while_running"]


def run(function: Callable[..., Any], *arguments: Any) -> Any:
    monarch.actor.unhandled_fault_hook = lambda failure: None  # its default ends the program
    found = asyncio.run(function(*arguments))
    shutdown_context().get()
    return found


class Member(Actor):
    """Does what `Mesh` says, over there."""

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
            await asyncio.sleep(seconds)

    @endpoint
    async def count(self, port: Port[int], items: int) -> None:
        for item in range(items):
            port.send(item)

    @endpoint
    async def wait(self) -> None:
        await asyncio.Event().wait()


class Mesh:
    """See `bench.meshes.mesh.Mesh`."""

    def __init__(self, procs: Any, members: Any, pids: list[int]) -> None:
        self.pids = pids
        self._procs = procs
        self._all = members
        self._first = members.slice(gpus=0)

    def replica(self, index: int) -> Any:
        """Return one member by itself."""
        return self._all.slice(gpus=index)

    def one(self, value: Any) -> Awaitable[Any]:
        return self._first.echo.call_one(value)

    def all(self, value: Any) -> Awaitable[Any]:
        return self._all.echo.call(value)

    def size_one(self, value: Any) -> Awaitable[Any]:
        return self._first.length.call_one(value)

    def size_all(self, value: Any) -> Awaitable[Any]:
        return self._all.length.call(value)

    async def tasks(self, calls: int) -> None:
        await asyncio.gather(*(self._first.echo.call_one(call).as_asyncio() for call in range(calls)))

    batch = tasks

    async def offer(self, value: Any, seconds: float) -> None:
        self._first.take.broadcast(value, seconds)

    post = offer

    async def drain(self) -> None:
        await self._first.pid.call_one()

    async def wait(self) -> None:
        await self._first.wait.call_one().as_asyncio()

    async def neighbour(self) -> Callable[[Any], Awaitable[Any]]:
        neighbour = self._procs.slice(gpus=0).spawn("neighbour", Member)
        return neighbour.echo.call_one

    async def stream(self, items: int) -> None:
        """Its calls answer once a rank; many items come by a port."""
        port, receiver = Channel.open()
        self._first.count.broadcast(port, items)
        for _ in range(items):
            await receiver.recv()


@asynccontextmanager
async def open_host() -> AsyncIterator[None]:
    yield


@asynccontextmanager
async def open_mesh(ranks: int, host: None = None) -> AsyncIterator[Mesh]:
    del host
    procs = this_host().spawn_procs(per_host={"gpus": ranks})  # it looks for this name
    try:
        members = procs.spawn("members", Member)
        yield Mesh(procs, members, [pid for _, pid in (await members.pid.call()).items()])
    finally:
        await procs.stop()
