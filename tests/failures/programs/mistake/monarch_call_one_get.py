"""`.get()` of `call_one`, as in Monarch.

Words: write `await trainers.step.call
"""

import trio

from trimesh import Actor, endpoint, this_host


class Trainer(Actor):
    @endpoint
    async def step(self, batch: int) -> int:
        return batch + 1


async def main() -> None:
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        trainers = await procs.spawn("trainers", Trainer)
        print(trainers.slice(gpus=0).step.call_one(1).get())


trio.run(main)
