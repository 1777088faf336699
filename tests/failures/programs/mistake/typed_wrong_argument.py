"""An argument of another type than declared, without pickle.

Words: batch
"""

import sys
from pathlib import Path

import trio

from trimesh import this_host

Path("workers.py").write_text(
    """
from trimesh import Actor, endpoint


class Trainer(Actor):
    @endpoint
    async def step(self, batch: int) -> int:
        return batch
"""
)
sys.path.insert(0, "")

from workers import Trainer


async def main() -> None:
    async with this_host().spawn_procs({"gpus": 2}, pickle="off") as procs:
        trainers = await procs.spawn("trainers", Trainer)
        await trainers.step.call("one")


trio.run(main)
