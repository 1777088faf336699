"""The set-up of one actor waits for ever: the log says where, until the program gives up.

Words: hanging_lifespan.py
"""

from contextlib import asynccontextmanager

import trio

from trimesh import Actor, current_rank, endpoint, this_host


class Trainer(Actor):
    @asynccontextmanager
    async def lifespan(self):
        if current_rank() == 1:
            await trio.sleep_forever()
        yield

    @endpoint
    async def step(self) -> int:
        return 1


async def main() -> None:
    async with this_host().spawn_procs({"gpus": 4}) as procs:
        with trio.move_on_after(11):
            await procs.spawn("trainers", Trainer)


trio.run(main)
