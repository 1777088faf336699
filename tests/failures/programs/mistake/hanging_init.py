"""A constructor blocks for long: the log says where.

Words: hanging_init.py
"""

import time

import trio

from trimesh import Actor, current_rank, endpoint, this_host


class Trainer(Actor):
    def __init__(self) -> None:
        if current_rank() == 1:
            time.sleep(12)

    @endpoint
    async def step(self) -> int:
        return 1


async def main() -> None:
    async with this_host().spawn_procs({"gpus": 4}) as procs:
        await procs.spawn("trainers", Trainer)


trio.run(main)
