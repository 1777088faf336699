"""A suite to start from: tests of an actor of one's own, under faults. Run it with `pytest examples/test_my_actor.py`.

The actor is a cache in front of a slow store. It promises three things: it says whether its value is fresh; it answers
also when the store cannot be reached, after a second and the time in which its own cancelled read is given up; and it
asks the store once for many callers.
"""

from __future__ import annotations

from typing import Any

import pytest
import trio

import trimesh
from trimesh import Actor, endpoint
from trimesh.testing import simulate

# ---- the actors under test: they know nothing of tests ---------------------------------------------------------------


class Store(Actor):
    """Holds the one true value."""

    def __init__(self) -> None:
        self.value = 0
        self.reads = 0

    @endpoint
    async def write(self, value: int) -> None:
        """Set the value."""
        self.value = value

    @endpoint
    async def read(self) -> int:
        """Return the value, after a while."""
        self.reads += 1
        await trio.sleep(0.05)
        return self.value

    @endpoint
    async def count_reads(self) -> int:
        """Return how often the value was read."""
        return self.reads


class Cache(Actor):
    """Answers for the store."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.value: int | None = None
        self.looking: trio.Event | None = None

    @endpoint(concurrency=100)
    async def get(self) -> tuple[int | None, bool]:
        """Return the value, and whether it is fresh."""
        if self.looking is not None:  # it was asked for already: share the answer
            before = self.looking
            with trio.move_on_after(1.0):
                await before.wait()
                return self.value, True
            return self.value, False
        self.looking = trio.Event()
        try:
            with trio.move_on_after(0.9):
                self.value = await self.store.read.call_one()
                self.looking.set()
                return self.value, True
            return self.value, False
        finally:
            self.looking = None


# ---- the tests -------------------------------------------------------------------------------------------------------


async def spawn(mesh: Any) -> tuple[Any, Any]:
    """Put the store on the first process and the cache on the second."""
    store = await mesh.slice(gpus=0).spawn("store", Store)
    cache = await mesh.slice(gpus=1).spawn("cache", Cache, store)
    return store, cache


@pytest.mark.mesh_backend("sim", "proc")
@simulate(seeds=50)
async def test_cache_tells_what_was_written(mesh):
    """The same body runs over 50 simulated schedules, and once over real processes."""
    store, cache = await spawn(mesh)
    for value in range(5):
        await store.write.call_one(value)
        assert await cache.get.call_one() == (value, True)


@simulate(seeds=50)
async def test_many_callers_cause_one_read(mesh):
    store, cache = await spawn(mesh)
    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(cache.get.call_one)
    assert await store.count_reads.call_one() <= 2


@simulate(seeds=50)
async def test_cache_answers_in_time_while_the_store_is_cut_off(mesh, faults):
    """The two do not hear of each other; their owner still hears both."""
    store, cache = await spawn(mesh)
    await store.write.call_one(7)
    assert await cache.get.call_one() == (7, True)

    async with faults.partition({"gpus": 0}, {"gpus": 1}):
        await store.write.call_one(8)
        start = trio.current_time()
        assert await cache.get.call_one() == (7, False)
        assert trio.current_time() - start < 1 + trimesh.limits.CANCEL_ACK_SECONDS

    assert await cache.get.call_one() == (8, True)


@simulate(seeds=50)
async def test_error_of_the_store_reaches_the_caller(mesh, faults, fault_log):
    store, cache = await spawn(mesh)
    faults.at(store.read, nth=2).raises(OSError(5, "disk"))

    await cache.get.call_one()
    with pytest.raises(OSError, match="disk"):
        await cache.get.call_one()
    assert await cache.get.call_one() == (0, True)

    assert [fired.where for fired in fault_log] == ["store"]


@simulate(seeds=50, sometimes=("the cache was stale", "the cache was fresh"))
async def test_cache_recovers_from_whatever_the_links_do(mesh, chaos):
    _, cache = await spawn(mesh)
    async with chaos.safety(chaos.plan(delay=1, lag=1, every=(0.5, 3)), duration=60):
        for _ in range(20):
            _, fresh = await cache.get.call_one()
            chaos.sometimes("the cache was fresh", fresh)
            chaos.sometimes("the cache was stale", not fresh)
            await trio.sleep(1)
    async with chaos.liveness(within=10):
        fresh = False
        while not fresh:
            _, fresh = await cache.get.call_one()
