"""A call that was started raises where it is awaited.

Words: ZeroDivisionError: division by zero
"""

import trio
import trio.lowlevel

from trimesh import Actor, endpoint, this_host


class Trainer(Actor):
    @endpoint
    async def step(self, batch: int) -> float:
        return 1 / batch


async def main() -> None:
    async with this_host().spawn_procs({}) as procs:
        trainer = await procs.spawn("trainer", Trainer)
        call = trainer.step.call_one.start(0)
        await trio.lowlevel.checkpoint()
        print(await call)


trio.run(main)
