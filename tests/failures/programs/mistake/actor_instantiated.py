"""An actor class is instantiated here, and its endpoint called by a verb.

Words: spawn
"""

import trio

from trimesh import Actor, endpoint


class Trainer(Actor):
    @endpoint
    async def step(self, batch: int) -> int:
        return batch


async def main() -> None:
    trainer = Trainer()
    print(await trainer.step.call(1))


trio.run(main)
