"""The actors of the workloads, for Monarch."""

from __future__ import annotations

import asyncio
import os

from monarch.actor import Actor, endpoint


class Echo(Actor):
    """Answers at once."""

    @endpoint
    async def echo(self, value: int) -> int:
        return value


class Sleeper(Actor):
    """Answers never."""

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def sleep(self) -> None:
        await asyncio.Event().wait()
