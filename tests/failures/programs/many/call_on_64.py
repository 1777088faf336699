"""Every one of 64 ranks raises the same.

Words: ZeroDivisionError: division by zero
"""

import trio

from trimesh import Actor, endpoint, this_host


class Trainer(Actor):
    @endpoint
    async def step(self, batch: int) -> float:
        return self.loss(batch)

    def loss(self, batch: int) -> float:
        return batch / 0


async def main() -> None:
    async with this_host().spawn_procs({"gpus": 64}) as procs:
        trainers = await procs.spawn("trainers", Trainer)
        await trainers.step.call(1)


trio.run(main)
