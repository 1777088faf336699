"""The mesh of the workloads, for xoscar."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal

import xoscar
from xoscar.backends.allocate_strategy import ProcessIndex

from bench.meshes.asyncio_tasks import while_running

__all__ = ["Mesh", "open_host", "open_mesh", "run", "while_running"]


def run(function: Callable[..., Any], *arguments: Any) -> Any:
    return asyncio.run(function(*arguments))


class Member(xoscar.Actor):
    """Does what `Mesh` says, over there."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = asyncio.Event()

    async def pid(self) -> int:
        return os.getpid()

    async def echo(self, value: Any) -> Any:
        return value

    @xoscar.extensible
    async def echo_many(self, value: Any) -> Any:
        return value

    async def length(self, value: Any) -> int:
        return len(value)

    async def take(self, value: Any, seconds: float) -> None:
        del value
        if seconds:
            await asyncio.sleep(seconds)

    @xoscar.generator
    async def count(self, items: int) -> AsyncIterator[int]:
        for item in range(items):
            yield item

    @xoscar.no_lock
    async def wait(self) -> None:
        self.waiting.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.waiting = asyncio.Event()

    @xoscar.no_lock
    async def is_waiting(self) -> None:
        await self.waiting.wait()


class Mesh:
    """See `bench.meshes.mesh.Mesh`."""

    def __init__(self, address: str, members: list[Any], pids: list[int]) -> None:
        self.pids = pids
        self._address = address
        self.members = members
        self._first = members[0]

    def one(self, value: Any) -> Awaitable[Any]:
        return self._first.echo(value)

    def all(self, value: Any) -> Awaitable[Any]:
        return asyncio.gather(*(member.echo(value) for member in self.members))

    def size_one(self, value: Any) -> Awaitable[Any]:
        return self._first.length(value)

    def size_all(self, value: Any) -> Awaitable[Any]:
        return asyncio.gather(*(member.length(value) for member in self.members))

    async def tasks(self, calls: int) -> None:
        await asyncio.gather(*(self._first.echo(call) for call in range(calls)))

    async def batch(self, calls: int) -> None:
        method = self._first.echo_many
        await method.batch(*(method.delay(call) for call in range(calls)))

    async def offer(self, value: Any, seconds: float) -> None:
        await self._first.take.tell(value, seconds)

    post = offer

    async def drain(self) -> None:
        await self._first.pid()

    async def wait(self) -> None:
        await self._first.wait()

    async def cancel(self) -> float:
        call = asyncio.ensure_future(self._first.wait())
        await self._first.is_waiting()
        start = time.perf_counter()
        call.cancel()
        await asyncio.wait([call])
        return time.perf_counter() - start

    async def neighbour(self) -> Callable[[Any], Awaitable[Any]]:
        neighbour = await xoscar.create_actor(
            Member, address=self._address, uid="neighbour", allocate_strategy=ProcessIndex(1)
        )
        return neighbour.echo

    async def stream(self, items: int) -> None:
        async for _ in await self._first.count(items):
            pass


@asynccontextmanager
async def open_host() -> AsyncIterator[None]:
    yield


@asynccontextmanager
async def open_mesh(
    ranks: int, host: None = None, *, auto_recover: Literal["actor", False] = False
) -> AsyncIterator[Mesh]:
    del host
    pool = await xoscar.create_actor_pool("127.0.0.1", n_process=ranks, auto_recover=auto_recover)
    address = pool.external_address
    try:
        members = [
            await xoscar.create_actor(
                Member, address=address, uid=f"member-{rank}", allocate_strategy=ProcessIndex(rank + 1)
            )
            for rank in range(ranks)
        ]
        yield Mesh(address, members, await asyncio.gather(*(member.pid() for member in members)))
    finally:
        await pool.stop()
