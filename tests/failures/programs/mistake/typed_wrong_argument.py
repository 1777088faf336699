"""An argument of another type than declared, without pickle.

Words: batch
"""

import trio

from trimesh import Actor, endpoint, this_host


class Trainer(Actor):
    @endpoint
    async def step(self, batch: int) -> int:
        return batch


async def main() -> None:
    async with this_host().spawn_procs({"gpus": 2}, pickle="off") as procs:
        trainers = await procs.spawn("trainers", Trainer)
        await trainers.step.call("one")


trio.run(main)
