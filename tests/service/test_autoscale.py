"""Pools that are resized by their load, in simulation and over real processes."""

from __future__ import annotations

import itertools
import logging
import math
from typing import Any

import pytest
import trio
from tests.service.test_pool import HEALED, both, until

import trimesh
from trimesh import Actor, FailFast, endpoint
from trimesh.service import LatencyTarget, Requests, open_pool
from trimesh.testing import simulate


class Worker(Actor):
    @endpoint(concurrency=4, idempotent=True)
    async def work(self, seconds: float) -> int:
        await trio.sleep(seconds)
        return trimesh.current_rank()


class BrokenLater(Worker):
    """Cannot be made at ranks above 0."""

    def __init__(self) -> None:
        if trimesh.current_rank():
            raise OSError("no more devices")


class Elsewhere(Actor):
    @endpoint
    async def scale(self, pool: Any) -> None:
        async with pool.autoscale(1, 2, by=Requests(1)):
            pass


def size(pool: Any) -> int:
    return len([one for one in pool.statistics().replicas if one.is_up and not one.is_drained])


class Load:
    """Makes requests at a rate that can be changed."""

    def __init__(self, pool: Any, nursery: trio.Nursery) -> None:
        self.pool, self.nursery = pool, nursery
        self.rate = 0.0
        self.done = 0
        self.sizes: list[int] = []

    async def run(self, seconds: float = 1.0) -> None:
        owed = 0.0
        while True:
            owed += self.rate * 0.25
            while owed >= 1:
                owed -= 1
                self.nursery.start_soon(self._ask, seconds)
            self._sample()
            await trio.sleep(0.25)

    async def _ask(self, seconds: float) -> None:
        await self.pool.work(seconds)
        self.done += 1

    def _sample(self) -> None:
        now = self.now()
        if not self.sizes or self.sizes[-1] != now:
            self.sizes.append(now)

    def now(self) -> int:
        return size(self.pool)


@pytest.mark.parametrize("by", [Requests(2), LatencyTarget(2.0), lambda found: (found.running + found.queued) / 2])
@simulate(seeds=2, per_host={"replica": 1}, **HEALED)
async def test_pool_follows_its_load_up_and_down(mesh, by):
    """Y18: without flapping, and every request has its answer."""
    workers = await mesh.spawn("workers", Worker)
    pools = open_pool(workers, along="replica", concurrency=2, procs=mesh)
    async with pools as pool, pool.autoscale(1, 6, by=by, shrink_after=20), trio.open_nursery() as nursery:
        load = Load(pool, nursery)
        nursery.start_soon(load.run)
        load.rate = 1.0
        await trio.sleep(20)
        assert load.now() in (1, 2)
        load.rate = 6.0
        await trio.sleep(60)
        assert 3 <= load.now() <= 6
        load.rate = 0.2
        await trio.sleep(250)
        assert load.now() == 1
        nursery.cancel_scope.cancel()
    turns = [later > earlier for earlier, later in itertools.pairwise(load.sizes)]
    assert sum(one != other for one, other in itertools.pairwise(turns)) <= 3
    assert max(load.sizes) <= 6
    assert load.done > 300


@pytest.mark.daily("proc")
@both
@simulate(seeds=3, per_host={"replica": 1}, **HEALED)
async def test_processes_start_and_end_with_the_load(mesh):
    """Y18."""
    workers = await mesh.spawn("workers", Worker)
    async with (
        open_pool(workers, along="replica", concurrency=1, procs=mesh) as pool,
        pool.autoscale(1, 3, by=Requests(1), every=0.05, grow_after=0.1, shrink_after=0.3),
        trio.open_nursery() as nursery,
    ):
        for _ in range(6):
            nursery.start_soon(pool.work, 2.0)
        await until(lambda: size(pool) == 3)
        await until(lambda: size(pool) == 1)
        assert pool.statistics().failed == 0
        await until(lambda: pool.statistics().running == 0)
    assert len((await trimesh.current_view(mesh)).alive()) == 1


@simulate(seeds=5, per_host={"replica": 3}, **HEALED)
async def test_load_that_returns_stops_a_shrinking_that_waits(mesh):
    """Y18: for a long request of a replica that was to leave."""
    workers = await mesh.spawn("workers", Worker)
    async with (
        open_pool(workers, along="replica", concurrency=4, procs=mesh) as pool,
        pool.autoscale(1, 3, by=Requests(2), shrink_after=10),
        trio.open_nursery() as nursery,
    ):
        for _ in range(3):
            nursery.start_soon(pool.work, 500.0)
        await trio.sleep(20)
        assert [one.is_drained for one in pool.statistics().replicas] == [False, False, True]
        for _ in range(3):
            nursery.start_soon(pool.work, 100.0)
        await trio.sleep(10)
        assert [one.is_drained for one in pool.statistics().replicas] == [False, False, False]
        nursery.cancel_scope.cancel()


@simulate(seeds=3, per_host={"replica": 1}, **HEALED)
async def test_growth_that_fails_is_logged_and_tried_later(mesh, caplog):
    """Y18: the pool serves on."""
    workers = await mesh.spawn("workers", BrokenLater)
    caplog.set_level(logging.WARNING, "trimesh")
    caplog.clear()
    async with (
        open_pool(workers, along="replica", concurrency=1, procs=mesh) as pool,
        pool.autoscale(1, 2, by=Requests(1)),
        trio.open_nursery() as nursery,
    ):
        for _ in range(100):
            nursery.start_soon(pool.work, 1.0)
        await trio.sleep(90)
        found = [one.message for one in caplog.records if "could not be resized to 2 replicas" in one.message]
        assert len(found) == 2
        assert size(pool) == 1
    assert pool.statistics().succeeded == 100


@both
@simulate(seeds=1, per_host={"replica": 2}, **HEALED)
async def test_autoscaling_is_refused_with_the_reason(mesh):
    workers = await mesh.spawn("workers", Worker)
    elsewhere = await mesh.spawn("elsewhere", Elsewhere)
    async with open_pool(workers, along="replica") as pool:
        with pytest.raises(ValueError, match="procs="):
            pool.autoscale(1, 2, by=Requests(1))
    async with open_pool(workers, along="replica", procs=mesh) as pool:
        with pytest.raises(TypeError, match="by=Requests"):
            pool.autoscale(1, 2, by=3)
        with pytest.raises(ValueError, match="1 <= least <= most"):
            pool.autoscale(0, 2, by=Requests(1))
        with pytest.raises(ValueError, match="every > 0"):
            pool.autoscale(1, 2, by=Requests(1), every=0)
        with pytest.raises(trimesh.ShapeError, match="LINKS_MAX"):
            async with pool.autoscale(1, 10**6, by=Requests(1)):
                pass
        with pytest.raises(RuntimeError, match="autoscale, rolling"):
            await elsewhere.slice(replica=0).scale.call_one(pool)
        with pytest.RaisesGroup(pytest.RaisesExc(TypeError, match="must return a number of replicas")):
            async with pool.autoscale(1, 2, by=lambda _: math.nan, every=0.01):
                await trio.sleep_forever()


@simulate(seeds=1, per_host={"replica": 2}, supervision=FailFast())
async def test_mesh_that_cannot_be_resized_cannot_be_autoscaled(mesh):
    workers = await mesh.spawn("workers", Worker)
    async with open_pool(workers, along="replica", procs=mesh) as pool:
        with pytest.raises(RuntimeError, match="its policy is FailFast"):
            async with pool.autoscale(1, 3, by=Requests(1)):
                pass
