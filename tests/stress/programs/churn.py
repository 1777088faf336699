"""Open meshes, call, nest, leave, over and over, until somebody ends it."""

from __future__ import annotations

import random
from typing import Any

import actors
import trio
from stage import plan, say

from trimesh import Actor, endpoint, this_host

PLAN = plan(seed=0, size=2, forks=0, depth=0, own=0)


class Busy(Actor):
    """Answers, fails, is slow, forks, nests."""

    @endpoint(concurrency=8)
    async def work(self, number: int) -> int:
        """Take a moment."""
        await trio.sleep(random.random() * 0.002)
        return -number

    @endpoint
    async def fork(self) -> None:
        """Fork children that hold every descriptor; half of them lead sessions of their own."""
        actors.fork_many(PLAN.forks)
        actors.fork_many(PLAN.forks, is_leader=True)

    @endpoint
    async def nest(self, depth: int) -> None:
        """Churn below this process."""
        async with this_host().spawn_procs({"n": 1}, name=f"level{depth}") as procs:
            await churn(procs, depth)


async def churn(procs: Any, depth: int) -> None:
    """Use one mesh for a while."""
    busy = await procs.spawn("busy", Busy)
    if PLAN.forks:
        await busy.fork.call()
    async with trio.open_nursery() as nursery:
        for number in range(20):
            nursery.start_soon(busy.work.call, number)
            nursery.start_soon(busy.work.choose, number)
            await busy.work.broadcast(number)
        if depth > 0:
            nursery.start_soon(busy.nest.call, depth - 1)


async def main() -> None:
    """Open and leave meshes for ever."""
    actors.fork_many(PLAN.own)
    say("begun")
    async with this_host().warm() as host:
        say("warm")
        while True:
            async with host.spawn_procs({"n": PLAN.size}, grace=1.0, output="discard") as procs:
                say("open")
                with trio.move_on_after(random.random() * 0.1):
                    await churn(procs, PLAN.depth)
            say("left")


random.seed(PLAN.seed)
say("ready")
trio.run(main)
