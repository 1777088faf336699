"""An actor class of a script uses a contextvar of the script.

Words: move the definition into a module
"""

from contextvars import ContextVar

import trio

from trimesh import Actor, endpoint, this_host

rate: ContextVar[float] = ContextVar("rate", default=0.1)


class Trainer(Actor):
    @endpoint
    async def step(self, batch: int) -> int:
        return int(batch * rate.get())


async def main() -> None:
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        trainers = await procs.spawn("trainers", Trainer)
        await trainers.step.call(1)


trio.run(main)
