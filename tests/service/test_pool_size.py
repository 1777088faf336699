"""Pools whose processes grow and shrink (`procs=`)."""

from __future__ import annotations

from collections import defaultdict
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
    """Has endpoints that wait until those of their round are let go; of one, one runs at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = defaultdict[int, trio.Event](trio.Event)
        self.gates = defaultdict[int, trio.Event](trio.Event)

    async def _wait(self, round_: int) -> int:
        self.begun[round_].set()
        await self.gates[round_].wait()
        return trimesh.current_rank()

    @endpoint
    async def alone(self) -> int:
        return await self._wait(0)

    @endpoint(concurrency=8, group="many")
    async def hold(self, round_: int) -> int:
        return await self._wait(round_)

    @endpoint(concurrency=8, group="many", idempotent=True)
    async def hold_again(self, round_: int) -> int:
        return await self._wait(round_)

    @endpoint(group="gates", concurrency=8)
    async def wait_begun(self, round_: int) -> None:
        await self.begun[round_].wait()

    @endpoint(group="gates", concurrency=8)
    async def let_go(self, round_: int) -> None:
        self.gates[round_].set()


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
                found.append(await pool.hold(0))

            for _ in range(9):
                nursery.start_soon(ask)
            now = await trimesh.current_view(generators)
            await now.wait_begun.call(0)
            assert [one.running for one in pool.statistics().replicas] == [1, 1, 1]
            async with trio.open_nursery() as resizing:
                resizing.start_soon(pool.resize, 2)
                await until(lambda: pool.statistics().replicas[2].is_drained)
                await now.let_go.call(0)
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


@pytest.mark.daily("proc")
@both
@simulate(seeds=10, per_host={"replica": 2}, **HEALED)
async def test_pool_follows_what_others_do_to_its_processes(mesh):
    """Y1, P6: requests that have begun raise, unless they may run twice; replicas that come get requests."""
    generators = await mesh.spawn("generators", Alone)
    health = Health(Alone.ping, every=1.0)
    async with open_pool(generators, along="replica", concurrency=1, procs=mesh, health=health) as pool:
        outcomes: list[Any] = []

        async def ask(name: str, round_: int) -> None:
            try:
                outcomes.append(await pool.options(group=name)[getattr(Alone, name)](round_))
            except trimesh.MembershipChanged as error:
                outcomes.append(error.maybe_executed)

        async with trio.open_nursery() as nursery:
            for round_, name in enumerate(("hold", "hold_again")):
                nursery.start_soon(ask, "hold", round_)
                nursery.start_soon(ask, name, round_)
                await (await trimesh.current_view(generators)).wait_begun.call(round_)
                await mesh.resize(replica=1)
                await (await trimesh.current_view(generators)).let_go.call(round_)
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
                outcomes.append(await pool.alone())
            except trimesh.MembershipChanged as error:
                outcomes.append(error.maybe_executed)

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(ask)
            await generators.wait_begun.call(0)
            assert [one.running for one in pool.statistics().replicas] == [2, 2]
            await mesh.resize(replica=1)
            await (await trimesh.current_view(generators)).let_go.call(0)
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


@simulate(seeds=10, per_host={"gpus": REPLICAS}, supervision=HARDENED)
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
