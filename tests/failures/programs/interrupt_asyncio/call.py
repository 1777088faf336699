"""Ctrl-C in a program of asyncio, while a call waits.

Words: KeyboardInterrupt
"""

import asyncio

import trio

from trimesh import Actor, endpoint
from trimesh.aio import spawn_procs


class Trainer(Actor):
    @endpoint
    async def step(self) -> None:
        print("ready", flush=True)
        await trio.sleep_forever()


async def main() -> None:
    async with spawn_procs({}, output="inherit") as procs:
        trainers = await procs.spawn("trainers", Trainer)
        await trainers.step.call()


asyncio.run(main())
