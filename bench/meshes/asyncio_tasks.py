"""Tasks and sockets of asyncio programs; `bench.meshes.trimesh_mesh` has the same functions for Trio."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

sleep = asyncio.sleep
in_thread = asyncio.to_thread


async def while_running(work: Callable[[], Awaitable[object]], look: Callable[[], Awaitable[object]]) -> None:
    async def run_work() -> None:
        await work()

    task = asyncio.create_task(run_work())
    while not task.done():
        await look()
    await task


async def at_once(call: Callable[[], Awaitable[object]], count: int) -> None:
    """Make `count` calls, each in a task of its own."""

    async def run_call() -> None:
        await call()

    await asyncio.gather(*[run_call() for _ in range(count)])


@asynccontextmanager
async def working(work: Callable[[], Coroutine[Any, Any, None]], count: int) -> AsyncIterator[None]:
    """Run `work` in `count` tasks, and cancel them at the end of the block."""
    async with asyncio.TaskGroup() as group:
        workers = [group.create_task(work()) for _ in range(count)]
        yield
        for worker in workers:
            worker.cancel()


async def receive(connection: socket.socket) -> bytes:
    """Receive at most one byte."""
    return await asyncio.get_running_loop().sock_recv(connection, 1)
