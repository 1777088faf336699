"""The actor of the workloads about memory, for Monarch."""

from __future__ import annotations

import os
import time

import torch
from monarch.actor import Actor, endpoint
from monarch.rdma import RDMABuffer

from bench.scale import Scale


class Memory(Actor):
    """Has memory for others, and reads theirs."""

    def __init__(self) -> None:
        self.kept: list[object] = []
        self.local = torch.zeros(1, dtype=torch.uint8)

    @endpoint
    async def make(self, nbytes: int) -> RDMABuffer:
        memory = torch.ones(nbytes, dtype=torch.uint8)
        buffer = RDMABuffer(memory)
        self.kept += [memory, buffer]
        return buffer

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def read(self, buffer: RDMABuffer, nbytes: int, *, new: bool = False) -> float:
        """Return the seconds of one read."""
        self._make_room(nbytes)
        local = torch.empty(nbytes, dtype=torch.uint8) if new else self.local
        local[-1] = 0
        start = time.perf_counter()
        await buffer.read_into(local)
        seconds = time.perf_counter() - start
        assert local[-1] == 1
        return seconds

    @endpoint
    async def read_often(self, buffer: RDMABuffer, nbytes: int, scale: Scale) -> list[float]:
        """Return the microseconds of each of many reads."""
        self._make_room(nbytes)
        found = []
        for _ in range(scale.calls // 10 + 1):
            start = time.perf_counter_ns()
            await buffer.read_into(self.local)
            found.append((time.perf_counter_ns() - start) / 1e3)
        return found[1:]

    def _make_room(self, nbytes: int) -> None:
        if self.local.numel() != nbytes:
            self.local = torch.zeros(nbytes, dtype=torch.uint8)
