"""A class that is no actor is spawned.

Words: class Trainer(trimesh.Actor)
"""

import trio

from trimesh import endpoint, this_host


class Trainer:
    @endpoint
    async def step(self, batch: int) -> int:
        return batch


async def main() -> None:
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        trainers = await procs.spawn("trainers", Trainer)
        await trainers.step.call(1)


trio.run(main)
