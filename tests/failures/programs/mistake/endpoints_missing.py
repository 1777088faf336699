"""A method of an actor that is no endpoint is called.

Words: @endpoint
"""

import trio

from trimesh import Actor, this_host


class Trainer(Actor):
    async def step(self, batch: int) -> int:
        return batch


async def main() -> None:
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        trainers = await procs.spawn("trainers", Trainer)
        await trainers.step.call(1)


trio.run(main)
