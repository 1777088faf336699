"""torch's own DataLoader with worker processes, inside ranks: it works, and leaves nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from trimesh import Actor, endpoint, this_host

torch = pytest.importorskip("torch", reason="torch is an extra")

pytestmark = [pytest.mark.torch, pytest.mark.real]


class Squares:
    """Numbers with their squares, and the process that has read them."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return torch.tensor([index, index * index]), os.getpid()


class Trainer(Actor):
    @endpoint(thread=True)
    def epoch(self) -> tuple[list[int], set[int]]:
        """Return what workers have read, and who they were."""
        loader = torch.utils.data.DataLoader(Squares(), batch_size=8, num_workers=2)
        seen: list[int] = []
        workers: set[int] = set()
        for rows, pids in loader:
            seen += rows[:, 0].tolist()
            workers |= set(pids.tolist())
        return seen, workers

    @endpoint(thread=True)
    def begin(self) -> list[int]:
        """Begin an epoch and stay in it; return who reads."""
        loader = torch.utils.data.DataLoader(Squares(), batch_size=8, num_workers=2, persistent_workers=True)
        self.under_way: Iterator[Any] = iter(loader)
        return [int(pids[0]) for _, pids in (next(self.under_way), next(self.under_way))]


async def test_workers_of_a_data_loader_read_and_end_with_their_rank():
    async with this_host().spawn_procs({"gpus": 2}, preload=("torch",)) as procs:
        trainers = await procs.spawn("trainers", Trainer)
        for seen, workers in (await trainers.epoch.call()).values():
            assert seen == list(range(32))
            assert len(workers) == 2
        begun = [f"/proc/{pid}" for pids in (await trainers.begin.call()).values() for pid in pids]
        assert all(map(os.path.exists, begun))

    assert not any(map(os.path.exists, begun))
