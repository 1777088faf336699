"""An argument holds a lock.

Words: config['lock']
"""

import threading

import trio

from trimesh import Actor, endpoint, this_host


class Trainer(Actor):
    @endpoint
    async def step(self, batch: int, config: dict) -> int:
        return batch


async def main() -> None:
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        trainers = await procs.spawn("trainers", Trainer)
        config = {"rate": 0.1, "lock": threading.Lock()}
        await trainers.step.call(1, config)


trio.run(main)
