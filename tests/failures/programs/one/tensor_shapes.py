"""An operator on mesh tensors has operands that do not fit.

Words: mat1 and mat2 shapes cannot be multiplied
"""

import torch
import trio

from trimesh import this_host


async def main() -> None:
    async with this_host().spawn_procs({"gpus": 2}, preload=("torch",)) as procs:
        with procs.activate():
            hidden = torch.ones(4, 8)
            weights = torch.ones(4, 8)
            print(hidden @ weights)


trio.run(main)
