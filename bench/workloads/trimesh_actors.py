"""The actors of the workloads, for trimesh."""

from __future__ import annotations

import mmap
import os
import time
from typing import Any

import trio

import trimesh
from bench.scale import Scale, timed_calls
from bench.workloads.payload import payload
from trimesh import Actor, RDMABuffer, endpoint, rdma


class Sleeper(Actor):
    """Answers never."""

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def sleep(self) -> None:
        await trio.sleep_forever()


class Logging(Actor):
    """Logs twice a second."""

    @endpoint
    async def run(self) -> None:
        step = 0
        while True:
            trimesh.log({"loss": 0.25, "reward": 3, "rate": 0.001}, step=step)
            step += 1
            await trio.sleep(0.5)


class Hanger(Actor):
    """Serves many calls that never end, and others beside them."""

    @endpoint(group="pids")
    async def pid(self) -> int:
        return os.getpid()

    @endpoint(group="pids")
    async def generate(self, tokens: list[int]) -> list[int]:
        return tokens

    @endpoint(concurrency=64)
    async def sleep(self) -> None:
        await trio.sleep_forever()


class Holder(Actor):
    """Returns the value that it was made with."""

    def __init__(self, kind: str, nbytes: int) -> None:
        self.value = payload(kind, nbytes)

    @endpoint
    async def give(self) -> Any:
        return self.value


class Memory(Actor):
    """Has memory for others, and reads theirs."""

    def __init__(self) -> None:
        self.local = bytearray()
        self.begun = trio.Event()

    @endpoint
    async def make(self, nbytes: int, *, allocated: bool = False) -> RDMABuffer:
        memory = rdma.allocate(nbytes) if allocated else memoryview(bytearray(nbytes))
        memory[:] = b"\1" * nbytes
        return RDMABuffer(memory)

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def read(self, buffer: RDMABuffer, *, new: bool = False) -> float:
        """Return the seconds of one read."""
        self._make_room(buffer.nbytes)
        local = mmap.mmap(-1, buffer.nbytes, mmap.MAP_PRIVATE) if new else self.local
        local[-1:] = b"\0"
        start = time.perf_counter()
        await buffer.read_into(local)
        seconds = time.perf_counter() - start
        assert local[-1:] == b"\1"
        return seconds

    @endpoint
    async def read_often(self, buffer: RDMABuffer, scale: Scale) -> list[float]:
        """Return the microseconds of each of many reads."""
        self._make_room(buffer.nbytes)
        return await timed_calls(scale, lambda: buffer.read_into(self.local))

    @endpoint(group="beside", concurrency=2)
    async def read_for_ever(self, buffer: RDMABuffer) -> None:
        self._make_room(buffer.nbytes)
        self.begun.set()
        while True:
            await buffer.read_into(self.local)

    @endpoint(group="others", concurrency=2)
    async def has_begun(self) -> None:
        await self.begun.wait()

    @endpoint(group="others", concurrency=2)
    async def echo(self, data: bytes) -> bytes:
        return data

    def _make_room(self, nbytes: int) -> None:
        if len(self.local) != nbytes:
            self.local = bytearray(b"\1") * nbytes


class Model(Actor):
    """Has tensors of one model; publishes them, or takes what another publishes."""

    def __init__(self, tensors: int, mebibytes: int) -> None:
        nbytes = (mebibytes << 20) // tensors
        self.tensors = {f"layer.{index}": bytearray(b"\1") * nbytes for index in range(tensors)}
        self.published = rdma.Published()
        self.waiting = trio.Event()

    @endpoint
    async def publication(self) -> rdma.Published:
        return self.published

    @endpoint
    async def publish(self) -> int:
        return await self.published.publish(self.tensors)

    @endpoint(group="readers", concurrency=1)
    async def take(self, weights: rdma.Published, version: int) -> None:
        self.waiting.set()
        await weights.wait_newer(version - 1)
        async with weights.pin() as snapshot:
            await snapshot.read_into(self.tensors)
        self.waiting = trio.Event()

    @endpoint(group="others", concurrency=2)
    async def is_waiting(self) -> None:
        await self.waiting.wait()
