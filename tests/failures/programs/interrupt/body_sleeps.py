"""Ctrl-C while the body of a block sleeps.

Words: KeyboardInterrupt
"""

import trio

from trimesh import Actor, endpoint, this_host


class Trainer(Actor):
    @endpoint
    async def step(self) -> None:
        pass


async def main() -> None:
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        trainers = await procs.spawn("trainers", Trainer)
        await trainers.step.call()
        print("ready", flush=True)
        await trio.sleep_forever()


trio.run(main)
