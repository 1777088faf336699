"""A queue of asyncio in an actor of Trio.

Words: trimesh.aio.Actor
"""

import asyncio

import trio

from trimesh import Actor, endpoint, this_host


class Trainer(Actor):
    @endpoint
    async def step(self, batch: int) -> int:
        await asyncio.Queue().get()
        return batch


async def main() -> None:
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        trainers = await procs.spawn("trainers", Trainer)
        await trainers.step.call(1)


trio.run(main)
