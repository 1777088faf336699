"""Actors and a runner that the tests of the test kit share."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import trio
import trio.testing

from trimesh import Actor, endpoint
from trimesh.testing.simulated.seeded_run import SeededOptions, SeededOutcome, run_once


class Worker(Actor):
    """Does little, and counts it."""

    def __init__(self) -> None:
        self.steps = 0

    @endpoint
    async def step(self, number: int = 0) -> int:
        self.steps += 1
        return number

    @endpoint
    async def count(self) -> int:
        return self.steps

    @endpoint
    async def slow(self, seconds: float = 1.0) -> float:
        await trio.sleep(seconds)
        self.steps += 1
        return seconds

    @endpoint
    async def items(self, count: int) -> AsyncGenerator[int, None]:
        for number in range(count):
            await trio.sleep(0.01)
            yield number

    @endpoint
    async def tell(self, port: Any, number: int) -> None:
        await port.send(number)

    @endpoint(thread=True)
    def in_thread(self) -> int:
        return 7

    @endpoint
    def inline(self) -> int:
        return 8

    @endpoint
    async def wall_clock(self) -> float:
        return time.time()

    @endpoint
    async def call_os(self, name: str) -> Any:
        return getattr(os, name)(*([0, 0] if name == "kill" else [0] if name == "_exit" else []))


class Relay(Actor):
    """Calls other actors."""

    @endpoint
    async def pass_on(self, workers: Any, number: int) -> int:
        return sum((await workers.step.call(number)).values())


def is_exact() -> bool:
    """Tell whether time is virtual, so that nothing is late; real processes are as late as the machine is busy."""
    return isinstance(trio.lowlevel.current_clock(), trio.testing.MockClock)


def run_body(
    body: Callable[..., Awaitable[None]], seed: int = 0, *, per_host: dict[str, int] | None = None, **given: Any
) -> SeededOutcome:
    """Run a body under one seed, as `simulate` does, and return what it came to."""
    names = body.__code__.co_varnames[: body.__code__.co_argcount]
    wanted = {name: given.get(name) for name in names}
    return run_once(body, wanted, SeededOptions(per_host or {"gpus": 2}), seed)
