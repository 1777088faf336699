"""An actor's process dies more often than its policy allows.

Words: SIGKILL
"""

import os
import signal

import trio

import trimesh
from trimesh import Actor, endpoint, this_host


class Trainer(Actor):
    @endpoint
    async def step(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


async def main() -> None:
    policy = trimesh.Restart("one_for_one", intensity=1)
    async with this_host().spawn_procs({"gpus": 2}, supervision=policy) as procs:
        trainers = await procs.spawn("trainers", Trainer)
        for _ in range(10):
            try:
                await trainers.slice(gpus=0).step.call_one()
            except trimesh.ProcDied:
                await trio.sleep(0.1)


trio.run(main)
