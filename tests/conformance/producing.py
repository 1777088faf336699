"""An actor whose generator endpoints yield what a test asks for and write down how far they are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import trio
from tests.conformance.probe import Probe

import trimesh
from trimesh import endpoint


class Producer(Probe):
    """Generators in the actor's one slot and in many, and a group that looks at them from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.produced = 0

    # ---- from outside ----------------------------------------------------------------------------------------

    @endpoint(concurrency=100, group="watch")
    async def count_produced(self) -> int:
        return self.produced

    @endpoint(concurrency=100, group="watch")
    async def wait_produced(self, count: int) -> int:
        while self.produced < count:
            await self.notes.wait("produced", self.produced + 1)
        return self.produced

    # ---- generators ------------------------------------------------------------------------------------------

    @endpoint
    async def count(self, upto: int, ranks: Sequence[int] | None = None) -> AsyncIterator[int]:
        """Yield numbers, on some ranks."""
        if ranks is None or trimesh.current_rank() in ranks:
            for number in range(upto):
                yield number

    @endpoint(concurrency=100)
    async def endless(self, size: int = 0) -> AsyncIterator[Any]:
        """Yield numbers, or arrays of some bytes, until cancelled; write down how far it is and how it ended."""
        try:
            while True:
                self.produced += 1
                self.notes.add("produced")
                yield np.full(size, self.produced, np.uint8) if size else self.produced
        except BaseException as error:
            self.notes.add(("ended by", type(error).__name__, getattr(error, "reason", None)))
            raise
        finally:
            self.notes.add("unwound")

    @endpoint(concurrency=100)
    async def fail_after(
        self, count: int, error: BaseException, ranks: Sequence[int] | None = None
    ) -> AsyncIterator[int]:
        """Yield some numbers and raise; the other ranks go on until cancelled."""
        for number in range(count):
            yield number
        self.notes.add("failing")
        if ranks is None or trimesh.current_rank() in ranks:
            raise error
        try:
            await trio.sleep_forever()
        finally:
            self.notes.add("unwound")

    @endpoint(concurrency=100)
    async def fail_when_told(self, error: BaseException) -> AsyncIterator[int]:
        """Yield a number and raise when the gate of this rank opens."""
        yield 0
        self.notes.add("holding")
        try:
            await self.gate.wait()
        finally:
            self.notes.add("unwound")
        raise error

    @endpoint(concurrency=100)
    async def fail_or_finish(self, count: int, error: BaseException, ranks: Sequence[int]) -> AsyncIterator[int]:
        """Yield some numbers; some ranks raise then, the others yield as many again."""
        for number in range(count):
            yield number
        if trimesh.current_rank() in ranks:
            raise error
        for number in range(count, 2 * count):
            yield number

    @endpoint(concurrency=100)
    async def hold_after(self, count: int) -> AsyncIterator[int]:
        """Yield some numbers, then stay until cancelled."""
        for number in range(count):
            yield number
        self.notes.add("holding")
        try:
            await trio.sleep_forever()
        finally:
            self.notes.add("unwound")

    @endpoint(concurrency=100)
    async def fail_at_the_end(self, error: BaseException) -> AsyncIterator[int]:
        """Yield a number, stay until cancelled, and fail in clean-up."""
        yield 0
        self.notes.add("holding")
        try:
            await trio.sleep_forever()
        finally:
            raise error

    @endpoint(concurrency=100)
    async def within(self, seconds: float) -> AsyncIterator[int]:
        """Yield for some time, by a cancel scope around the yields."""
        with trio.move_on_after(seconds) as self.scope:
            while True:
                self.produced += 1
                self.notes.add("produced")
                yield self.produced
        yield -1

    @endpoint(concurrency=100, group="watch")
    async def expire(self) -> None:
        """Let the time of `within` be over."""
        self.scope.deadline = trio.current_time()

    @endpoint(concurrency=100)
    async def yield_these(self, items: Sequence[Any]) -> AsyncIterator[Any]:
        """Yield what was given; what cannot be sent is replaced by its error's name."""
        for item in items:
            try:
                yield item
            except TypeError as error:
                yield type(error).__name__

    @endpoint(concurrency=100)
    async def yield_lock(self) -> AsyncIterator[Any]:
        """Yield something that cannot be serialised."""
        yield 1
        yield trio.lowlevel.current_task()

    @endpoint(concurrency=100)
    async def refill(self, size: int, count: int) -> AsyncIterator[Any]:
        """Yield one array again and again, written anew each time."""
        array = np.zeros(size, np.uint8)
        for number in range(count):
            array[:] = number
            yield array

    @endpoint(concurrency=100)
    async def deadline(self) -> AsyncIterator[float]:
        """Yield the seconds that are left, then stay."""
        yield trio.current_effective_deadline() - trio.current_time()
        await trio.sleep_forever()

    @endpoint(concurrency=100)
    async def gather(self, producers: Any, upto: int) -> list[tuple[int, int]]:
        """Consume a stream of another mesh, by a reference."""
        async with producers.count.stream(upto) as results:
            return [(point.rank, number) async for point, number in results]

    @endpoint(concurrency=100)
    async def consume_forever(self, producers: Any) -> None:
        """Consume a stream of another mesh until cancelled, or until it fails."""
        async with producers.endless.stream() as results:
            async for _ in results:
                self.notes.add("consumed")
                await trio.sleep(0.001)  # virtual time stands still while somebody runs

    @endpoint
    async def consume_and_stay(self, producers: Any, count: int) -> None:
        """Consume some items of a stream of another mesh, then hold it until cancelled."""
        async with producers.endless.stream() as results:
            for _ in range(count):
                await anext(results)
                self.notes.add("consumed")
            await trio.sleep_forever()


class Unpicklable:
    """Cannot be rebuilt where it arrives."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _refuse, ()


def _refuse() -> None:
    raise RuntimeError("not here")


async def collect(results: Any) -> dict[int, list[Any]]:
    """Return what came, by rank."""
    found: dict[int, list[Any]] = defaultdict(list)
    async for point, value in results:
        found[point.rank].append(value)
    return found
