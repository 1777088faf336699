"""The actor that runs a training step by plain torch, where the ranks of a mesh run theirs."""

from __future__ import annotations

import time

import torch

from bench.workloads.tensors import make_step
from trimesh import Actor, endpoint


class PlainTorch(Actor):
    """Trains a small transformer."""

    def __init__(self) -> None:
        _, self.step = make_step(torch)
        self.x, self.y = torch.rand(8, 32, 64), torch.rand(8, 32, 64)

    @endpoint
    def run(self, steps: int) -> float:
        """Return the milliseconds of one of many steps."""
        start = time.perf_counter()
        for _ in range(steps):
            loss = self.step(self.x, self.y)
        loss.item()
        return (time.perf_counter() - start) / steps * 1e3
