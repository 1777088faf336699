"""An actor that does with an item of a map what the item says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import trio
from tests.conformance.probe import Notes

import trimesh
from trimesh import Actor, endpoint


class Worker(Actor):
    """Does with an item what the item says."""

    def __init__(self) -> None:
        self.notes = Notes()
        self.gate = trio.Event()
        self.running = 0
        self.most = 0

    @endpoint
    async def square(self, item: int) -> int:
        return item * item

    @endpoint
    async def time_left(self, _: int) -> float:
        return trio.current_effective_deadline() - trio.current_time()

    @endpoint
    async def touch(self, path: str) -> None:
        await trio.Path(path).touch()

    @endpoint
    async def where(self, item: Any) -> tuple[int, Any]:
        return trimesh.current_rank(), item

    @endpoint
    async def slow_on(self, item: Any) -> tuple[int, Any]:
        """Hold the first item of rank 0 until the gate opens."""
        if trimesh.current_rank() == 0 and not self.notes.log:
            self.notes.add("held")
            await self.gate.wait()
        return trimesh.current_rank(), item

    @endpoint(concurrency=100)
    async def hold(self, item: Any) -> Any:
        self.running += 1
        self.most = max(self.most, self.running)
        self.notes.add("holding")
        try:
            await self.gate.wait()
            return item
        finally:
            self.running -= 1

    @endpoint(concurrency=100)
    async def fail_on(self, item: int, bad: Sequence[int] = (3, 4)) -> int:
        """Raise for some items; hold those after them."""
        if item in bad:
            raise ValueError(item)
        if item > max(bad):
            self.notes.add("holding")
            await self.gate.wait()
        return item

    @endpoint(concurrency=100, idempotent=True)
    async def flaky(self, item: int) -> tuple[int, int]:
        """Fail at the first attempt on each rank but the last."""
        self.notes.add(item)
        if trimesh.current_rank() < trimesh.current_size() - 1:
            raise ConnectionError(item)
        return trimesh.current_rank(), item

    @endpoint(concurrency=100, idempotent=True)
    async def fail_late(self, error: Exception) -> None:
        """Raise an error at once, except for a `ConnectionError`: that when cancelled."""
        self.notes.add(type(error).__name__)
        if isinstance(error, ConnectionError):
            try:
                await trio.sleep_forever()
            except trio.Cancelled:
                raise error from None
        await self.notes.wait("ConnectionError")
        raise error

    @endpoint(concurrency=100, idempotent=True)
    async def long(self, seconds: float) -> tuple[int, float]:
        """Take some seconds; fail at the attempt to take ten on rank 0."""
        if seconds == 10 and trimesh.current_rank() == 0:
            raise ConnectionError
        await trio.sleep(seconds)
        return trimesh.current_rank(), seconds

    @endpoint
    async def fail_at_the_end(self, item: int) -> None:
        self.notes.add("holding")
        try:
            await trio.sleep_forever()
        finally:
            raise ValueError(item)

    @endpoint
    async def pair(self, one: int, two: int) -> None: ...

    @endpoint(concurrency=100, group="watch")
    async def open(self) -> None:
        self.gate.set()

    @endpoint(concurrency=100, group="watch")
    async def wait(self, note: Any, count: int = 1) -> None:
        await self.notes.wait(note, count)

    @endpoint(concurrency=100, group="watch")
    async def report(self) -> tuple[int, int, list[Any]]:
        return self.running, self.most, self.notes.log
