"""An actor that has memory for others, and one that reaches it."""

from __future__ import annotations

import trio
from tests.conformance.probe import Notes

import trimesh
from trimesh import Actor, ProcDied, RDMABuffer, endpoint, limits

SMALL = 1000
LARGE = 1 << 20
"""More than is moved at once, in simulation and over real processes."""


def pattern(size: int, salt: int = 0) -> bytes:
    """Return bytes in which every place differs from its neighbours."""
    period = bytes((7 * index + salt) % 251 for index in range(251))
    return (period * (size // 251 + 1))[:size]


async def read_until_dead(handle: RDMABuffer) -> ProcDied:
    """Read until the owner, which has been killed, is dead; return what was raised then."""
    found = bytearray(handle.nbytes)
    while True:
        try:
            await handle.read_into(found)
        except ProcDied as death:
            return death


class Vault(Actor):
    """Has memory, and knows what is in it."""

    def __init__(self, size: int = SMALL, salt: int = 0, *, allocated: bool = False) -> None:
        self.memory = trimesh.rdma.allocate(size) if allocated else memoryview(bytearray(size))
        self.memory[:] = pattern(size, salt)
        self.buffer = RDMABuffer(self.memory)

    @endpoint(concurrency=100)
    async def handle(self) -> RDMABuffer:
        return self.buffer

    @endpoint(concurrency=100)
    async def readonly(self) -> RDMABuffer:
        return self.buffer.readonly()

    @endpoint(concurrency=100)
    async def look(self, start: int, stop: int) -> bytes:
        return bytes(self.memory[start:stop])

    @endpoint(concurrency=100)
    async def put(self, start: int, data: bytes) -> None:
        self.memory[start : start + len(data)] = data

    @endpoint(concurrency=100)
    async def revoke(self, patience: float = limits.REVOKE_SECONDS) -> float:
        """Return how long it took, where transfers have so many seconds to end."""
        seconds, before = limits.REVOKE_SECONDS, trio.current_time()
        limits.REVOKE_SECONDS = patience  # type: ignore[misc]
        try:
            await self.buffer.aclose()
        finally:
            limits.REVOKE_SECONDS = seconds  # type: ignore[misc]
        return trio.current_time() - before

    @endpoint
    async def hold(self) -> None:
        await trio.sleep_forever()


class Reader(Actor):
    """Reaches the memory of others."""

    def __init__(self) -> None:
        self.notes = Notes()

    @endpoint(concurrency=100)
    async def wait(self, note: str) -> None:
        await self.notes.wait(note)

    @endpoint(concurrency=100)
    async def backend(self, buffer: RDMABuffer) -> str:
        return buffer.backend

    @endpoint(concurrency=100)
    async def read(self, buffer: RDMABuffer) -> bytes:
        found = bytearray(buffer.nbytes)
        await buffer.read_into(found)
        return bytes(found)

    @endpoint
    async def take(self, data: memoryview) -> tuple[bytes, bool]:
        """Return what has come, and whether it is read-only."""
        return bytes(data), data.readonly

    @endpoint(concurrency=100)
    async def write(self, buffer: RDMABuffer, data: bytes) -> None:
        await buffer.write_from(data)

    @endpoint(concurrency=100)
    async def read_for_ever(self, buffer: RDMABuffer) -> None:
        """Read, again and again; say so after the first time. The pause spares simulations whose transfers are fast."""
        found = bytearray(buffer.nbytes)
        while True:
            await buffer.read_into(found)
            self.notes.add("has read")
            await trio.sleep(2e-4)

    @endpoint(concurrency=100)
    async def read_once(self, buffer: RDMABuffer) -> None:
        """Say when it begins."""
        self.notes.add("begins")
        await buffer.read_into(bytearray(buffer.nbytes))

    @endpoint(concurrency=100)
    async def look_for_ever(self, buffer: RDMABuffer) -> None:
        """Keep the memory mapped until cancelled."""
        async with buffer.map() as view:
            self.notes.add(f"sees {view[0]}")
            await trio.sleep_forever()

    @endpoint(concurrency=100)
    async def count(self, buffer: RDMABuffer, times: int) -> list[int]:
        """Add one, that often; return what was there each time."""
        return [await buffer.fetch_add(1) for _ in range(times)]

    @endpoint(concurrency=100)
    async def count_by_swaps(self, buffer: RDMABuffer, times: int) -> int:
        """Add two, that often, by compare_and_swap; return how often it had to try again."""
        retries, known = 0, 0
        for _ in range(times):
            while (found := await buffer.compare_and_swap(known, known + 2)) != known:
                known = found
                retries += 1
            known += 2
        return retries
