"""A broadcast, for whose result no caller waits, raises.

Words: ValueError: the learning rate must be positive
"""

import trio

from trimesh import Actor, endpoint, this_host


class Trainer(Actor):
    @endpoint
    async def set_rate(self, rate: float) -> None:
        if rate <= 0:
            raise ValueError("the learning rate must be positive")


async def main() -> None:
    async with this_host().spawn_procs({}) as procs:
        trainers = await procs.spawn("trainers", Trainer)
        await trainers.set_rate.broadcast(0.0)
        await trio.sleep_forever()


trio.run(main)
