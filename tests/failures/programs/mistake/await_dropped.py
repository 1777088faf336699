"""A call is neither awaited nor kept.

Words: write `await mesh.endpoint.call(...)`
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
        trainers.step.call(1)
        await trio.sleep(0.1)


trio.run(main)
