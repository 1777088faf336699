"""An endpoint raises in a program of asyncio.

Words: ZeroDivisionError: division by zero
"""

import asyncio

from trimesh import Actor, endpoint
from trimesh.aio import spawn_procs


class Trainer(Actor):
    @endpoint
    async def step(self, batch: int) -> float:
        return 1 / batch


async def main() -> None:
    async with spawn_procs({"gpus": 2}) as procs:
        trainers = await procs.spawn("trainers", Trainer)
        await trainers.slice(gpus=1).step.call_one(0)


asyncio.run(main())
