"""The actor of the workloads about memory, for Monarch."""

from __future__ import annotations

import time

import torch
from monarch.actor import Actor, endpoint
from monarch.rdma import RDMABuffer


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
    async def read(self, buffer: RDMABuffer, nbytes: int) -> float:
        """Return the seconds of one read."""
        if self.local.numel() != nbytes:
            self.local = torch.zeros(nbytes, dtype=torch.uint8)
        start = time.perf_counter()
        await buffer.read_into(self.local)
        return time.perf_counter() - start
