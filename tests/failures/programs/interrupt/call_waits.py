"""Ctrl-C while a call waits for endpoints that sleep.

Words: KeyboardInterrupt
"""

import time

import trio

from trimesh import Actor, endpoint, this_host


class Trainer(Actor):
    @endpoint
    async def step(self) -> None:
        print("ready", flush=True)
        await trio.sleep_forever()

    @endpoint(thread=True)
    def block(self) -> None:
        time.sleep(1)


async def main() -> None:
    async with this_host().spawn_procs({}, output="inherit") as procs:
        trainers = await procs.spawn("trainers", Trainer)
        await trainers.step.call()


trio.run(main)
