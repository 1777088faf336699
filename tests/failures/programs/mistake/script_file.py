"""An actor class of a script uses a file of the script.

Words: move the definition into a module
"""

import trio

from trimesh import Actor, endpoint, this_host

log = open("log.txt", "w")


class Trainer(Actor):
    @endpoint
    async def step(self, batch: int) -> int:
        return log.write(f"{batch}\n")


async def main() -> None:
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        trainers = await procs.spawn("trainers", Trainer)
        await trainers.step.call(1)


trio.run(main)
