"""An endpoint that is called on one rank raises.

Words: ZeroDivisionError: division by zero
"""

import trio

from trimesh import Actor, current_rank, endpoint, this_host


class Trainer(Actor):
    @endpoint
    async def step(self, batch: int) -> float:
        return self.loss(batch)

    def loss(self, batch: int) -> float:
        return batch / current_rank()


async def main() -> None:
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        trainers = await procs.spawn("trainers", Trainer)
        await trainers.slice(gpus=0).step.call_one(1)


trio.run(main)
