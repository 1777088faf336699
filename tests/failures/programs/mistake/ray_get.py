"""`.get()` of a started call, as in Monarch and Ray.

Words: write `await`
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
        print(trainers.step.call.start(1).get())


trio.run(main)
