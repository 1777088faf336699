"""A training script for torchrun, as people write them: data parallel by gloo, one line a step from rank 0.

It knows nothing of meshes: `torchrun --nproc-per-node 4 train_ddp.py` runs it, and so does ddp.py.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--fail-rank", type=int, default=-1)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    assert (rank, world) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(options.steps):
        inputs = torch.full((8, 4), float(rank + 1))
        loss = (model(inputs) - 1.0).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == options.fail_rank:
            raise ValueError(f"rank {rank} does not like step {step}")
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
