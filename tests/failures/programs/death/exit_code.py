"""A rank ends its process.

Words: exit code 3
"""

import os

import trio

from trimesh import Actor, endpoint, this_host


class Trainer(Actor):
    @endpoint
    async def step(self) -> None:
        print("loading the shard", flush=True)
        os._exit(3)


async def main() -> None:
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        trainers = await procs.spawn("trainers", Trainer)
        await trainers.slice(gpus=1).step.call_one()


trio.run(main)
