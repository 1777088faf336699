"""Pools whose processes grow and shrink (`procs=`)."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from tests.service.pool_workload import HEALED as HARDENED
from tests.service.pool_workload import REPLICAS, pool_workload
from tests.service.test_pool import HEALED, Generator, both, until

import trimesh
from trimesh import endpoint
from trimesh.service import Health, open_pool
from trimesh.testing import simulate


class Alone(Generator):
    """Has an endpoint of which one runs at a time."""

    @endpoint
    async def alone(self, seconds: float) -> int:
        await trio.sleep(seconds)
        return trimesh.current_rank()


@both
@simulate(seeds=10, per_host={"replica": 1, "gpus": 2}, **HEALED)
async def test_pool_grows_and_shrinks_with_its_processes(mesh):
    """Y1, P6: what runs on a replica that leaves runs to its end; sessions move on."""
    generators = await mesh.spawn("generators", Alone)
    async with open_pool(generators, along="replica", concurrency=1, procs=mesh) as pool:
        await pool.resize(3)
        async with pool.session("chat") as chat, trio.open_nursery() as nursery:
            found: list[int] = []

            async def ask() -> None:
                found.append((await pool.generate("x", 0.05))[1])

            for _ in range(9):
                nursery.start_soon(ask)
            await trio.sleep(0.01)
            assert [one.running for one in pool.statistics().replicas] == [1, 1, 1]
            await pool.resize(2)
            await chat.generate("x")
        assert set(found) == {0, 2, 4}
        assert pool.statistics().succeeded == 10
        assert pool.statistics().retried == 0
        assert len((await trimesh.current_view(mesh)).alive()) == 4
        await pool.resize(3)
        assert {(await pool.generate("x"))[1] for _ in range(6)} == {0, 2, 4}
        with pytest.raises(trimesh.ShapeError):
            await pool.resize(0)
        assert {(await pool.generate("x"))[1] for _ in range(6)} == {0, 2, 4}


@both
@simulate(seeds=10, per_host={"replica": 2}, **HEALED)
async def test_pool_follows_what_others_do_to_its_processes(mesh):
    """Y1, P6: requests that have begun raise, unless they may run twice; replicas that come get requests."""
    generators = await mesh.spawn("generators", Alone)
    health = Health(Alone.ping, every=1.0)
    async with open_pool(generators, along="replica", concurrency=1, procs=mesh, health=health) as pool:
        outcomes: list[Any] = []

        async def ask(name: str) -> None:
            try:
                outcomes.append(await pool.options(group=name)[getattr(Alone, name)]("x", 0.3))
            except trimesh.MembershipChanged as error:
                outcomes.append(error.maybe_executed)

        async with trio.open_nursery() as nursery:
            for name in ("generate", "again"):
                nursery.start_soon(ask, "generate")
                nursery.start_soon(ask, name)
                await trio.sleep(0.1)
                await mesh.resize(replica=1)
                await until(lambda: not pool.statistics().running)
                await mesh.resize(replica=2)
                await until(lambda: len(pool.statistics().replicas) == 2)
        assert True in outcomes
        assert len(outcomes) == 4
        await mesh.resize(replica=3)
        await until(lambda: len(pool.statistics().replicas) == 3)
        assert {(await pool.generate("x"))[1] for _ in range(6)} == {0, 1, 2}


@both
@simulate(seeds=10, per_host={"replica": 2}, **HEALED)
async def test_request_that_has_not_begun_goes_elsewhere_when_its_replica_leaves(mesh):
    """Y1, P6."""
    generators = await mesh.spawn("generators", Alone)
    async with open_pool(generators, along="replica", concurrency=2, procs=mesh) as pool:
        outcomes: list[Any] = []

        async def ask() -> None:
            try:
                outcomes.append(await pool.alone(0.3))
            except trimesh.MembershipChanged as error:
                outcomes.append(error.maybe_executed)

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(ask)
            await trio.sleep(0.1)
            await mesh.resize(replica=1)
        assert sorted(map(repr, outcomes)) == ["0", "0", "0", "True"]
        assert pool.statistics().retried == 1


@simulate(seeds=5, per_host={"replica": 1}, **HEALED)
async def test_replica_that_has_come_is_probed_as_the_first(mesh):
    """Y2, P6."""
    generators = await mesh.spawn("generators", Alone)
    health = Health(Alone.ping, every=1.0, tries=2)
    async with open_pool(generators, along="replica", procs=mesh, health=health) as pool:
        await pool.resize(2)
        now = await trimesh.current_view(generators)
        await now.slice(replica=1).load.call_one(-1)
        await trio.sleep(5)
        assert {(await pool.generate("x"))[1] for _ in range(4)} == {0}


@simulate(seeds=20, per_host={"gpus": REPLICAS}, supervision=HARDENED)
async def test_each_request_has_one_outcome_while_replicas_come_and_go(mesh, chaos):
    """Y1, Y2, Y3, Y4, Y5, P6: the workload of pools; its resizes end processes and start them."""
    await pool_workload(mesh, chaos, is_elastic=True)


@simulate(seeds=1, per_host={"replica": 2, "gpus": 2}, **HEALED)
async def test_pool_refuses_processes_that_it_cannot_follow(mesh):
    generators = await mesh.spawn("generators", Alone)
    for along, text in ((None, "needs along="), ("gpus", "first dimension")):
        with pytest.raises(ValueError, match=text):
            open_pool(generators, along=along, procs=mesh)
    with pytest.raises(TypeError, match="procs must be"):
        open_pool(generators, along="replica", procs=generators)
    async with open_pool(generators, along="replica") as pool:
        with pytest.raises(ValueError, match="procs="):
            await pool.resize(3)
