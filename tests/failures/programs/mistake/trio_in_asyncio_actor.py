"""`trio.sleep` in an actor of asyncio.

Words: write asyncio.sleep
"""

import trio

from trimesh import aio, endpoint, this_host


class Trainer(aio.Actor):
    @endpoint
    async def step(self, batch: int) -> int:
        await trio.sleep(0.1)
        return batch


async def main() -> None:
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        trainers = await procs.spawn("trainers", Trainer)
        await trainers.step.call(1)


trio.run(main)
