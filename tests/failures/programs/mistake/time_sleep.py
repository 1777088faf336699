"""`time.sleep` in an endpoint that is a coroutine.

Words: @endpoint(thread=True)
"""

import time

import trio

from trimesh import Actor, endpoint, this_host


class Trainer(Actor):
    @endpoint
    async def step(self, batch: int) -> int:
        time.sleep(6)
        return batch


async def main() -> None:
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        trainers = await procs.spawn("trainers", Trainer)
        await trainers.step.call(1)


trio.run(main)
