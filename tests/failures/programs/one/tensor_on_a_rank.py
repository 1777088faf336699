"""A function on the ranks raises; its result is fetched.

Words: ValueError: the batch is empty
"""

import torch
import trio

import trimesh
from trimesh import this_host


@trimesh.remote(propagate=lambda batch: torch.empty(()))
def loss(batch: torch.Tensor) -> torch.Tensor:
    raise ValueError("the batch is empty")


async def main() -> None:
    async with this_host().spawn_procs({"gpus": 2}, preload=("torch",)) as procs:
        with procs.activate():
            value = loss(torch.ones(4))
        print(await trimesh.fetch(value))


trio.run(main)
