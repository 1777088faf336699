"""Ctrl-C in a script, while a call waits.

Words: KeyboardInterrupt
"""

import trio

from trimesh import Actor, endpoint
from trimesh.blocking import this_host


class Trainer(Actor):
    @endpoint
    async def step(self) -> None:
        print("ready", flush=True)
        await trio.sleep_forever()


with this_host().spawn_procs({}, output="inherit") as procs:
    trainers = procs.spawn("trainers", Trainer)
    trainers.step.call()
