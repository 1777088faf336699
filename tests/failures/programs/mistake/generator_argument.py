"""An argument is a generator.

Words: batches
"""

import trio

from trimesh import Actor, endpoint, this_host


class Trainer(Actor):
    @endpoint
    async def train(self, batches) -> int:
        return sum(batches)


async def main() -> None:
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        trainers = await procs.spawn("trainers", Trainer)
        await trainers.train.call(batch * 2 for batch in range(10))


trio.run(main)
