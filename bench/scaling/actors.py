"""The actors of a cast: ranks that answer, and host leaders that pass a cast on and bring the answers together."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import trio

from bench.scaling.tree import Shape, shares
from trimesh import Actor, current_rank, endpoint, this_host

Cast = Callable[[Any], Any]
"""Sends a value to every rank; returns their answers."""


class Rank(Actor):
    """Answers."""

    @endpoint
    async def cast(self, value: Any) -> Any:
        return value

    @endpoint
    async def length(self, value: Any) -> int:
        return len(value)

    @endpoint
    async def cpu_seconds(self) -> float:
        return time.process_time()


class Leader(Actor):
    """Stands for one host and for those of the leaders below it, all of which it starts."""

    def __init__(self, parts: list[int], per_host: int, fan_out: int) -> None:
        self.shape = Shape(parts[current_rank()], per_host, fan_out)

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        shape = self.shape
        async with AsyncExitStack() as stack:
            procs = await stack.enter_async_context(this_host().spawn_procs({"ranks": shape.per_host}))
            self.ranks = await procs.spawn("ranks", Rank)
            self.leaders = await spawn_leaders(stack, shape.hosts - 1, shape)
            yield

    @endpoint
    async def cast(self, value: Any) -> list[Any]:
        """Return the answers of all below, those of leaders first."""
        own: list[Any] = []

        async def cast_to_ranks() -> None:
            own.extend((await self.ranks.cast.call(value)).values())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(cast_to_ranks)  # runs when this task waits: leaders have the longer way
            answers = await cast_to_leaders(self.leaders, value)
        return answers + own

    @endpoint
    async def cpu_seconds(self) -> list[float]:
        """Return what each process below and this one have computed so far, this one first."""
        found = [time.process_time()]
        if self.leaders is not None:
            for part in (await self.leaders.cpu_seconds.call()).values():
                found += part
        return found + list((await self.ranks.cpu_seconds.call()).values())


async def spawn_leaders(stack: AsyncExitStack, hosts: int, shape: Shape) -> Any:
    """Start the leaders of `hosts` hosts, and with them all that is below; None when there are no hosts."""
    parts = shares(hosts, shape.fan_out)
    if not parts:
        return None
    procs = await stack.enter_async_context(this_host().spawn_procs({"hosts": len(parts)}))
    return await procs.spawn("leaders", Leader, parts, shape.per_host, shape.fan_out)


async def cast_to_leaders(leaders: Any, value: Any) -> list[Any]:
    """Return the answers of all that is below some leaders."""
    if leaders is None:
        return []
    return [answer for part in (await leaders.cast.call(value)).values() for answer in part]


@asynccontextmanager
async def open_cast(shape: Shape) -> AsyncIterator[tuple[Any, Cast]]:
    """Start the processes of a shape; yield those that the caller calls, and the cast."""
    async with AsyncExitStack() as stack:
        if shape.fan_out:
            leaders = await spawn_leaders(stack, shape.hosts, shape)
            yield leaders, lambda value: cast_to_leaders(leaders, value)
            return
        procs = await stack.enter_async_context(this_host().spawn_procs({"ranks": shape.ranks}))
        ranks = await procs.spawn("ranks", Rank)

        async def cast(value: Any) -> list[Any]:
            return list((await ranks.cast.call(value)).values())

        yield ranks, cast
