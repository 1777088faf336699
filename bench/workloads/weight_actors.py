"""Trainers that publish rows of tensors, and generators that read columns of them."""

from __future__ import annotations

import ctypes
import time

import torch

import trimesh
from trimesh import Actor, endpoint
from trimesh.rdma import Published
from trimesh.service.weights import Publication, ShardOf, ShardPublisher


class WeightTrainer(Actor):
    """Has its rows of some square tensors."""

    def __init__(self, ranks: int, tensors: int, side: int) -> None:
        self.rows = side // ranks
        self.start = (trimesh.context().point["procs"] * self.rows, 0)
        self.size = (side, side)
        self.tensors = {f"layer.{index}": torch.ones(self.rows, side) for index in range(tensors)}
        self.shards = ShardPublisher()

    @endpoint
    async def publication(self) -> Published:
        return self.shards.handle

    @endpoint
    async def publish(self, version: int) -> float:
        """Publish them; return the seconds of processors that it took."""
        start = time.process_time()
        parts = {name: ShardOf(one, size=self.size, start=self.start) for name, one in self.tensors.items()}
        await self.shards.publish(parts, version=version)
        return time.process_time() - start


class WeightGenerator(Actor):
    """Has its columns of them."""

    def __init__(self, ranks: int, tensors: int, side: int) -> None:
        columns = side // ranks
        self.start = (0, trimesh.context().point["procs"] * columns)
        self.size = (side, side)
        names = [f"layer.{index}" for index in range(tensors)]
        self.tensors = {name: torch.zeros(side, columns) for name in names}
        self.narrow = {name: torch.zeros(side, columns, dtype=torch.bfloat16) for name in names}
        self.others = {name: torch.ones(side, columns) for name in names}

    @endpoint
    async def pull(self, weights: Publication) -> float:
        return await self._read(weights, self.tensors)

    @endpoint
    async def pull_cast(self, weights: Publication) -> float:
        return await self._read(weights, self.narrow)

    @endpoint
    async def copy(self) -> float:
        """Copy as many bytes as `pull` reads."""
        start = time.process_time()
        for name, one in self.tensors.items():
            ctypes.memmove(one.data_ptr(), self.others[name].data_ptr(), one.nbytes)  # torch would use all cores
        return time.process_time() - start

    async def _read(self, weights: Publication, tensors: dict[str, torch.Tensor]) -> float:
        start = time.process_time()
        parts = {name: ShardOf(one, size=self.size, start=self.start) for name, one in tensors.items()}
        async with weights.pin() as snapshot:
            await snapshot.read_into(parts)
        return time.process_time() - start
