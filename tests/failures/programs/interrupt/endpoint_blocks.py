"""Ctrl-C beside a plain endpoint that sleeps.

Words: KeyboardInterrupt
"""

import time

import trio

from trimesh import Actor, endpoint, this_host


class Trainer(Actor):
    @endpoint
    def step(self) -> None:
        print("ready", flush=True)
        time.sleep(1)


async def main() -> None:
    async with this_host().spawn_procs({}, output="inherit") as procs:
        trainers = await procs.spawn("trainers", Trainer)
        await trainers.step.call()


trio.run(main)
