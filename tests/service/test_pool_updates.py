"""Updates that follow the membership of a pool (`Pool.each`)."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from tests.service.test_pool import HEALED, both, until

import trimesh
from trimesh import Actor, Isolate, ProcDied, Restarted, endpoint
from trimesh.service import open_pool
from trimesh.testing import simulate


class Versioned(Actor):
    """Generates by the version that it has loaded."""

    def __init__(self) -> None:
        self.loads: list[int] = []
        self.running = 0

    @endpoint(concurrency=8, idempotent=True)
    async def generate(self, seconds: float = 0.0) -> tuple[int, int]:
        self.running += 1
        await trio.sleep(seconds)
        self.running -= 1
        return trimesh.current_rank(), self.loads[-1] if self.loads else 0

    @endpoint(group="loads")
    async def load(self, version: int, seconds: float = 0.0) -> None:
        if self.running:
            raise RuntimeError("requests run during the update")
        await trio.sleep(seconds)
        self.loads.append(version)

    @endpoint(group="loads")
    async def incarnation(self) -> int:
        return trimesh.context(self).incarnation

    @endpoint(group="loads")
    async def history(self) -> list[int]:
        return self.loads


def loader(version: int, seconds: float = 0.0) -> Any:
    async def load(replica: Any) -> None:
        await replica.load.call(version, seconds)

    return load


async def restart(mesh: Any, faults: Any, **point: int) -> None:
    """Kill a process, and return when it is there again."""
    async with mesh.events() as events:
        faults.kill(mesh.slice(**point))
        async for event in events:
            if isinstance(event, Restarted):
                return


class Elsewhere(Actor):
    @endpoint
    async def update(self, pool: Any) -> None:
        await pool.each(loader(1))


@pytest.mark.daily("proc")
@both
@simulate(seeds=10, per_host={"replica": 3}, **HEALED)
async def test_replica_that_is_restarted_has_the_latest_update_before_it_serves(mesh, faults):
    """Y17: once an incarnation, and no earlier one."""
    versioned = await mesh.spawn("versioned", Versioned)
    async with open_pool(versioned, along="replica", concurrency=2) as pool, trio.open_nursery() as nursery:
        await pool.each(loader(1))
        await pool.each(loader(2))
        found: list[tuple[int, int]] = []

        async def ask() -> None:
            while True:
                found.append(await pool.generate(0.01))

        for _ in range(6):
            nursery.start_soon(ask)
        await restart(mesh, faults, replica=1)
        seen = len(found)
        await until(lambda: 1 in {rank for rank, _ in found[seen:]})
        nursery.cancel_scope.cancel()
    assert {version for _, version in found} == {2}
    assert [*(await versioned.history.call()).values()] == [[1, 2], [2], [1, 2]]


@both
@simulate(seeds=10, per_host={"gpus": 1}, **HEALED)
async def test_requests_wait_for_the_update_of_the_only_replica(mesh, faults):
    """Y17: and for its restart."""
    versioned = await mesh.spawn("versioned", Versioned)
    async with open_pool(versioned) as pool:
        await pool.each(loader(1), at_most=5)
        faults.kill(mesh.slice(gpus=0))
        assert [await pool.generate() for _ in range(5)] == [(0, 1)] * 5
        assert await versioned.slice(gpus=0).history.call_one() == [1]


@both
@simulate(seeds=5, per_host={"replica": 1}, **HEALED)
async def test_new_replica_has_the_update_before_it_serves(mesh):
    """Y17, P6."""
    versioned = await mesh.spawn("versioned", Versioned)
    async with open_pool(versioned, along="replica", procs=mesh) as pool:
        await pool.each(loader(7))
        for size, ranks in ((3, {0, 1, 2}), (1, {0}), (2, {0, 1})):
            await pool.resize(size)
            found = set[tuple[int, int]]()
            while {rank for rank, _ in found} != ranks:  # a new one serves once it has the update
                found.add(await pool.generate())
            assert {version for _, version in found} == {7}
        now = await trimesh.current_view(versioned)
        assert [*(await now.history.call()).values()] == [[7], [7]]


@simulate(seeds=10, per_host={"gpus": 4})
async def test_update_takes_out_as_many_as_it_may_and_the_rest_serve(mesh):
    """Y17: and a resize meanwhile counts."""
    versioned = await mesh.spawn("versioned", Versioned)
    async with open_pool(versioned, concurrency=2) as pool, trio.open_nursery() as nursery:
        out: list[int] = []

        async def ask() -> None:
            while True:
                await pool.generate(0.3)
                out.append(sum(one.is_drained for one in pool.statistics().replicas))

        for _ in range(6):
            nursery.start_soon(ask)
        await trio.sleep(1)
        await pool.each(loader(1, 1.0), at_most=2)
        assert max(out) == 2
        nursery.start_soon(pool.each, loader(2, 1.0))
        await trio.sleep(0.1)
        await pool.resize(2)
        await pool.each(loader(3))
        assert [one.is_drained for one in pool.statistics().replicas] == [False, False, True, True]
        nursery.cancel_scope.cancel()
    histories = [*(await versioned.history.call()).values()]
    assert histories[:2] == [[1, 2, 3]] * 2
    assert all(history[-1] < 3 for history in histories[2:])


@simulate(seeds=10, per_host={"gpus": 2})
async def test_drained_replica_is_updated_when_it_serves_again(mesh):
    """Y17."""
    versioned = await mesh.spawn("versioned", Versioned)
    async with open_pool(versioned) as pool:
        await pool.resize(1)
        await pool.each(loader(1))
        await pool.each(loader(2))
        await pool.resize(2)
        assert {await pool.generate() for _ in range(8)} == {(0, 2), (1, 2)}
        assert [*(await versioned.history.call()).values()] == [[1, 2], [2]]


@simulate(seeds=10, per_host={"gpus": 3}, **HEALED)
async def test_update_that_fails_leaves_the_previous_one(mesh, faults):
    """Y17."""
    versioned = await mesh.spawn("versioned", Versioned)

    async def broken(replica: Any) -> None:
        if (await replica.generate.call_one())[0] == 1:
            raise LookupError("no such weights")
        await replica.load.call_one(9)

    async with open_pool(versioned) as pool:
        await pool.each(loader(1))
        with pytest.raises(LookupError, match="no such weights"):
            await pool.each(broken)
        with trio.move_on_after(1) as scope:
            await pool.each(loader(8, 100.0))
        assert scope.cancelled_caught
        assert {await pool.generate() for _ in range(9)} == {(0, 9), (1, 1), (2, 1)}
        await restart(mesh, faults, gpus=2)
        await until(lambda: not any(one.is_drained for one in pool.statistics().replicas))
        assert {await pool.generate() for _ in range(9)} == {(0, 9), (1, 1), (2, 1)}
        await pool.each(loader(2))
        assert {await pool.generate() for _ in range(9)} == {(0, 2), (1, 2), (2, 2)}


@simulate(seeds=5, per_host={"gpus": 2}, **HEALED)
async def test_later_update_that_fails_fails_the_block_of_the_pool(mesh, faults):
    """Y17: no caller waits for it."""
    versioned = await mesh.spawn("versioned", Versioned)

    async def once(replica: Any) -> None:
        if await replica.incarnation.call_one():
            raise LookupError("the weights are gone")

    with pytest.RaisesGroup(LookupError, flatten_subgroups=True) as caught:
        async with open_pool(versioned) as pool:
            await pool.each(once)
            faults.kill(mesh.slice(gpus=1))
            await trio.sleep_forever()
    [error] = trimesh.leaves(caught.value)
    assert "for replica 1, which has come back or is new" in error.__notes__[0]


@both
@simulate(seeds=5, per_host={"gpus": 2}, supervision=Isolate())
async def test_replica_that_is_lost_for_good_holds_no_update_up(mesh, faults):
    """Y17, Y2: a request finds its death; one that is replaced by hand has the update first."""
    versioned = await mesh.spawn("versioned", Versioned)
    async with open_pool(versioned) as pool:
        await pool.each(loader(1))
        faults.kill(mesh.slice(gpus=0))
        await until(lambda: len(versioned.alive()) == 1)
        await pool.each(loader(2))
        assert {await pool.generate() for _ in range(4)} == {(1, 2)}
        await mesh.replace([{"gpus": 0}])
        await until(lambda: all(one.is_up and not one.is_drained for one in pool.statistics().replicas))
        assert {await pool.generate() for _ in range(8)} == {(0, 2), (1, 2)}
        faults.kill(mesh)
        await until(lambda: not versioned.alive())
        with pytest.raises(ProcDied):
            await pool.generate()


@both
@simulate(seeds=1, per_host={"gpus": 1})
async def test_update_is_refused_with_the_reason(mesh):
    versioned = await mesh.spawn("versioned", Versioned)
    elsewhere = await mesh.spawn("elsewhere", Elsewhere)
    async with open_pool(versioned) as pool:
        with pytest.raises(ValueError, match="at_most must be"):
            await pool.each(loader(1), at_most=0)
        with pytest.raises(TypeError, match="async function of the mesh of a replica"):
            await pool.each("load")
        with pytest.raises(RuntimeError, match="each, cancel and statistics can only be called in the process"):
            await elsewhere.update.call_one(pool)
