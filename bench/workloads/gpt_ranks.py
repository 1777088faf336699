"""The actor that trains a GPT by plain torch on the ranks, each with its rows of the batch (SPMD)."""

from __future__ import annotations

import time

import torch
from torch.nn.parallel import DistributedDataParallel

from bench.workloads import gpt
from trimesh import Actor, current_rank, endpoint


class PlainRank(Actor):
    """One of several ranks with gradients in common."""

    @endpoint
    def begin(self, file: str, ranks: int) -> None:
        """Meet the others by a file that is not there yet."""
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{file}", rank=current_rank(), world_size=ranks
        )
        self.training = gpt.Training(DistributedDataParallel(gpt.made()))
        self.text, self.goal = (one.chunk(ranks)[current_rank()] for one in gpt.batch())

    @endpoint
    def run(self, steps: int) -> float:
        """Return the milliseconds of one of many steps."""
        start = time.perf_counter()
        for _ in range(steps):
            loss = self.training.step(self.text, self.goal)
        loss.item()
        return (time.perf_counter() - start) / steps * 1e3

    @endpoint
    def end(self) -> None:
        """Leave the others."""
        torch.distributed.destroy_process_group()
