"""`spawn` is neither awaited nor kept.

Words: await
"""

import trio

from trimesh import Actor, endpoint, this_host


class Trainer(Actor):
    @endpoint
    async def step(self, batch: int) -> int:
        return batch


async def main() -> None:
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        procs.spawn("trainers", Trainer)
        await trio.sleep(0.1)


trio.run(main)
