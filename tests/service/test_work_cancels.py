"""Cancels of other processes at every step of what they ask of slots and replay buffers: nothing is left in doubt."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import trio
from tests.patience import HANG_SECONDS

from trimesh import Actor, endpoint
from trimesh.service import open_replay, open_slots
from trimesh.testing import simulate

both = pytest.mark.mesh_backend("sim", "proc")
STEPS_MAX = 2_000
"""More than anything here takes."""


class CutAfter(trio.abc.Instrument):
    """Cancels a scope after so many steps of any task of this Trio run: in a simulation, of all processes."""

    def __init__(self, steps: int, scope: trio.CancelScope) -> None:
        self.left = steps
        self.scope = scope

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.left -= 1
        if self.left == 0:
            self.scope.cancel(reason="a step of the test")


@contextmanager
def cut_after(steps: int) -> Generator[CutAfter, None, None]:
    with trio.CancelScope() as scope:
        cut = CutAfter(steps, scope)
        trio.lowlevel.add_instrument(cut)
        try:
            yield cut
        finally:
            trio.lowlevel.remove_instrument(cut)


class Caller(Actor):
    """Each endpoint returns what it has got, or None if it was cut, and whether it was over before the cut."""

    @endpoint
    async def take(self, buffer: Any, steps: int) -> tuple[Any, bool]:
        return await self._cut(lambda: buffer.take(1), steps)

    @endpoint
    async def add(self, buffer: Any, steps: int, seconds: float) -> tuple[Any, bool]:
        async def add() -> bool:
            await buffer.add(steps, version=0)
            return True

        return await self._cut(add, steps, seconds)

    @endpoint
    async def lease(self, slots: Any, steps: int) -> tuple[Any, bool]:
        async def lease() -> bool:
            async with slots.lease():
                pass
            return True

        return await self._cut(lease, steps)

    @endpoint
    async def release(self, slots: Any, steps: int) -> tuple[Any, bool]:
        async def release() -> bool:
            await slots.release(1)
            return True

        return await self._cut(release, steps)

    async def _cut(
        self, work: Callable[[], Awaitable[Any]], steps: int, seconds: float = HANG_SECONDS
    ) -> tuple[Any, bool]:
        found = None
        with trio.move_on_after(seconds), cut_after(steps) as cut:
            found = await work()
        return found, cut.left > 0


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what no event tells."""
    with trio.fail_after(HANG_SECONDS):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.01)


@both
@simulate(seeds=3, per_host={"gpus": 1})
async def test_take_that_is_cancelled_at_any_step_has_consumed_nothing(mesh):
    """Y8: items are consumed if `take` returns them, and only then."""
    caller = await mesh.spawn("caller", Caller)
    async with open_replay(capacity=10) as buffer:
        took = 0
        for steps in range(1, STEPS_MAX):
            if not buffer.statistics().stored:
                await buffer.add(steps, version=0)
            found, was_over = await caller.take.call_one(buffer, steps)
            took += found is not None
            await until(lambda: buffer.statistics().held == 0)
            assert buffer.statistics().taken == took
            if was_over:
                break
        assert took >= 1
        assert steps > 3


@both
@simulate(seeds=3, per_host={"gpus": 1})
@pytest.mark.parametrize("room", ["at once", "never", "later"])
async def test_add_that_is_cancelled_at_any_step_has_stored_nothing(mesh, room):
    """Y8: an item is stored if `add` returns, and only then, with a full buffer, too."""
    caller = await mesh.spawn("caller", Caller)
    async with open_replay(capacity=1 if room != "at once" else STEPS_MAX) as buffer, trio.open_nursery() as nursery:

        async def make_room() -> None:
            while True:
                await trio.sleep(0.001)
                await buffer.take(1)

        if room != "at once":
            await buffer.add(0, version=0)
        if room == "later":
            nursery.start_soon(make_room)
        added = buffer.statistics().added
        seconds = 1.0 if room == "never" else HANG_SECONDS  # what waits for ever makes no more steps
        for steps in range(1, STEPS_MAX):
            found, was_over = await caller.add.call_one(buffer, steps, seconds)
            added += found is not None
            assert buffer.statistics().added == added
            if was_over and (room != "never" or steps > 3):  # a busy machine may need a second for the first ones
                break
        assert steps > 3
        nursery.cancel_scope.cancel()


@both
@simulate(seeds=3, per_host={"gpus": 1})
async def test_lease_that_is_cancelled_at_any_step_is_handed_on_or_given_back(mesh):
    """Y7: handed on if its block ends, and only then; `release` frees its slots once, or not at all."""
    caller = await mesh.spawn("caller", Caller)
    async with open_slots(batch=STEPS_MAX, staleness=0) as slots:
        handed_on = 0
        for steps in range(1, STEPS_MAX):
            found, was_over = await caller.lease.call_one(slots, steps)
            handed_on += found is not None
            await until(lambda: slots.statistics().running == 0)
            places = slots.statistics()
            assert places.handed_on == places.in_use == handed_on
            if was_over:
                break
        left = handed_on
        for steps in range(1, STEPS_MAX):
            if not left:
                async with slots.lease():
                    left += 1
            found, was_over = await caller.release.call_one(slots, steps)
            left -= found is not None
            assert slots.statistics().in_use == left
            if was_over:
                break


@simulate(seeds=3)
async def test_evicting_buffer_evicts_nothing_in_vain():
    """Y8: where what is held leaves no room, `add` waits, and what is stored stays."""
    async with (
        open_replay(capacity=4, capacity_bytes=4_000, when_full="evict") as buffer,
        trio.open_nursery() as nursery,
    ):
        for _ in range(2):
            await buffer.add(bytes(1_000), version=0)
        async with buffer.taking(1):
            await buffer.add(bytes(1_500), version=0)  # beside 1,000 that are held and as many that are stored
            nursery.start_soon(lambda: buffer.add(bytes(3_500), version=0))
            await trio.sleep(1)
            assert buffer.statistics().evicted == {}
            assert buffer.statistics().stored == 2
        await until(lambda: buffer.statistics().added == 4)
        assert buffer.statistics().evicted == {"full": 2}
