"""`Actor.remote()`, as in Ray.

Words: spawn
"""

import trio

from trimesh import Actor, endpoint


class Trainer(Actor):
    @endpoint
    async def step(self, batch: int) -> int:
        return batch


async def main() -> None:
    trainer = Trainer.remote()
    print(await trainer.step.call(1))


trio.run(main)
