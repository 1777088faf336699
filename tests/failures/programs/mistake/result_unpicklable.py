"""An endpoint returns a generator expression.

Words: result of step()
"""

import trio

from trimesh import Actor, endpoint, this_host


class Trainer(Actor):
    @endpoint
    async def step(self):
        return {"losses": (rate / 2 for rate in (1, 2))}


async def main() -> None:
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        trainers = await procs.spawn("trainers", Trainer)
        await trainers.step.call()


trio.run(main)
