"""An argument is an open file.

Words: log
"""

import trio

from trimesh import Actor, endpoint, this_host


class Trainer(Actor):
    @endpoint
    async def step(self, log) -> None:
        log.write("step\n")


async def main() -> None:
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        trainers = await procs.spawn("trainers", Trainer)
        with open("log.txt", "w") as log:
            await trainers.step.call(log)


trio.run(main)
