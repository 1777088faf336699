"""An actor that trains by plain torch on one of several ranks, each with its rows of the batch (SPMD)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trimesh import Actor, current_rank, endpoint


def step_milliseconds(step: Callable[..., Any], batch: Sequence[Any], steps: int) -> float:
    """Return the milliseconds of one of many steps, the loss of the last of which is waited for."""
    start = time.perf_counter()
    for _ in range(steps):
        loss = step(*batch)
    loss.item()
    return (time.perf_counter() - start) / steps * 1e3


class PlainRank(Actor):
    """One of several ranks with gradients in common; a subclass makes what it trains."""

    @endpoint
    def begin(self, file: str, ranks: int) -> None:
        """Meet the others by a file that is not there yet."""
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{file}", rank=current_rank(), world_size=ranks
        )

    def take(self, step: Callable[..., Any], batch: Sequence[torch.Tensor]) -> None:
        """Train by these steps from now on, on this rank's rows of the batch."""
        self._step = step
        self._batch = [one.chunk(torch.distributed.get_world_size())[current_rank()] for one in batch]

    @endpoint
    def run(self, steps: int) -> float:
        """Return the milliseconds of one of many steps."""
        return step_milliseconds(self._step, self._batch, steps)

    @endpoint
    def end(self) -> None:
        """Leave the others."""
        torch.distributed.destroy_process_group()
