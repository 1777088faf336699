"""An attribute of a call's result is used without `await`.

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
        losses = trainers.step.call(1)
        print(losses.values())


trio.run(main)
