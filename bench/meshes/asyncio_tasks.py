"""What the meshes of libraries on asyncio share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


async def while_running(work: Callable[[], Awaitable[object]], look: Callable[[], Awaitable[object]]) -> None:
    async def run_work() -> None:
        await work()

    task = asyncio.create_task(run_work())
    while not task.done():
        await look()
    await task
