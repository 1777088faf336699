"""A method that is no endpoint is called.

Words: @endpoint
"""

import trio

from trimesh import Actor, endpoint, this_host


class Trainer(Actor):
    @endpoint
    async def step(self, batch: int) -> int:
        return self.loss(batch)

    def loss(self, batch: int) -> int:
        return batch


async def main() -> None:
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        trainers = await procs.spawn("trainers", Trainer)
        trainers.loss(1)


trio.run(main)
