"""The constructor of the one rank raises.

Words: FileNotFoundError: [Errno 2] No such file or directory: 'weights.bin'
"""

from pathlib import Path

import trio

from trimesh import Actor, endpoint, this_host


class Trainer(Actor):
    def __init__(self, path: str) -> None:
        self.weights = Path(path).read_bytes()

    @endpoint
    async def step(self) -> int:
        return len(self.weights)


async def main() -> None:
    async with this_host().spawn_procs({}) as procs:
        trainers = await procs.spawn("trainers", Trainer, "weights.bin")
        await trainers.step.call()


trio.run(main)
