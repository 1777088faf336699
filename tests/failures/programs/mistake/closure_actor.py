"""An actor class of a function uses a lock of that function.

Words: guard
"""

import threading

import trio

from trimesh import Actor, endpoint, this_host


async def main() -> None:
    guard = threading.Lock()

    class Trainer(Actor):
        @endpoint
        async def step(self, batch: int) -> int:
            with guard:
                return batch

    async with this_host().spawn_procs({"gpus": 2}) as procs:
        trainers = await procs.spawn("trainers", Trainer)
        await trainers.step.call(1)


trio.run(main)
