"""An actor class is instantiated here, and its endpoint called by a verb.

Words: spawn
"""

import trio

from trimesh import Actor, endpoint, this_host


class Trainer(Actor):
    @endpoint
    async def step(self, batch: int) -> int:
        return batch


async def main() -> None:
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        trainer = Trainer()
        print(procs, await trainer.step.call(1))


trio.run(main)
