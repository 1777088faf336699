"""`spawn` gets no argument for the constructor.

Words: path
"""

import trio

from trimesh import Actor, endpoint, this_host


class Trainer(Actor):
    def __init__(self, path: str) -> None:
        self.path = path

    @endpoint
    async def step(self) -> int:
        return 1


async def main() -> None:
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        await procs.spawn("trainers", Trainer)


trio.run(main)
