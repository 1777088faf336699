"""An actor class of a script uses a lock of the script.

Words: move the definition into a module
"""

import threading

import trio

from trimesh import Actor, endpoint, this_host

guard = threading.Lock()


class Trainer(Actor):
    @endpoint
    async def step(self, batch: int) -> int:
        with guard:
            return batch


async def main() -> None:
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        trainers = await procs.spawn("trainers", Trainer)
        await trainers.step.call(1)


trio.run(main)
