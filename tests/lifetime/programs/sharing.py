"""Open and leave blocks in turn, and let the test count spawners after each step."""

from __future__ import annotations

from contextlib import AsyncExitStack

import actors
import trio
from stage import hear, say

from trimesh import this_host


async def step(name: str) -> None:
    """Tell of a step; wait until the test has looked."""
    say("step", name=name)
    await hear("next")


async def main() -> None:
    """Nested blocks, sibling tasks, another preload, a warm host."""
    await step("before")
    async with this_host().spawn_procs({"n": 1}):
        await step("outer")
        async with this_host().spawn_procs({"n": 1}):
            await step("inner")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(open_another)
        async with this_host().spawn_procs({"n": 1}, preload=("wave",)):
            await step("another preload")
        await step("inner ones left")
    await step("left")
    async with this_host().warm(preload=("wave",)) as host:
        await step("warm")
        procs = await host.spawn_procs({"n": 2})
        held = await procs.spawn("held", actors.Quiet)
        async with host.spawn_procs({"n": 1}) as others:
            assert (await held.add.call(1, 2)).values() == (3, 3)
            assert await (await others.spawn("other", actors.Quiet)).add.call_one(1, 2) == 3
            await step("two meshes")
        await step("one mesh")
    await step("cold")
    async with AsyncExitStack() as stack:
        for _ in range(3):
            await stack.enter_async_context(this_host().spawn_procs({"n": 1}))
        await step("three")
    await step("over")


async def open_another() -> None:
    """Open a block in another task."""
    async with this_host().spawn_procs({"n": 1}):
        await step("sibling")


trio.run(main)
