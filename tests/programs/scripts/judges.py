"""The actors that one of two programs publishes."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

import trio
from stage import say

import trimesh
from trimesh import Actor, endpoint


class Judge(Actor):
    """What a client calls."""

    @endpoint
    async def score(self, number: int) -> int:
        return 2 * number

    @endpoint
    async def fail(self) -> None:
        raise LookupError("no such case")

    @endpoint(concurrency=10)
    async def hang(self) -> None:
        say("hanging")
        try:
            await trio.sleep_forever()
        finally:
            say("cancelled")

    @endpoint(concurrency=10)
    async def after(self, seconds: float) -> str:
        say("working")
        await trio.sleep(seconds)
        return "done"

    @endpoint
    async def budget(self) -> float:
        return trio.current_effective_deadline() - trio.current_time()

    @endpoint
    async def numbers(self, count: int) -> AsyncIterator[int]:
        for number in range(count):
            yield number

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def end(self) -> None:
        os._exit(3)

    @endpoint
    async def tell(self, port: trimesh.Port[int], count: int) -> None:
        for number in range(count):
            await port.send(number)
        await port.aclose()

    @endpoint
    async def use(self, other: Any) -> int:
        result: int = await other.score.call_one(1)
        return result
