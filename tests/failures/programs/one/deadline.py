"""A call takes longer than its deadline.

Words: trio.TooSlowError
"""

import trio

from trimesh import Actor, endpoint, this_host


class Trainer(Actor):
    @endpoint
    async def step(self) -> None:
        await trio.sleep_forever()


async def main() -> None:
    async with this_host().spawn_procs({}) as procs:
        trainer = await procs.spawn("trainer", Trainer)
        with trio.fail_after(0.1):
            await trainer.step.call_one()


trio.run(main)
