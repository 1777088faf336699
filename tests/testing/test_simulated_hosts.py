"""Hosts of a simulated job: what meshes on them do while hosts are cut off, and when they are lost."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from trimesh import (
    Actor,
    HostLost,
    Isolate,
    MeshErrorGroup,
    Restart,
    ShapeError,
    current_rank,
    endpoint,
    leaves,
    limits,
    origin,
)
from trimesh.testing import simulate


class Counter(Actor):
    """Counts, so that what is lost or comes twice is seen."""

    def __init__(self) -> None:
        self.count = 0

    @endpoint
    async def add(self) -> int:
        self.count += 1
        return self.count

    @endpoint
    async def rank(self) -> int:
        return current_rank()

    @endpoint
    async def sleep(self) -> None:
        await trio.sleep_forever()

    @endpoint
    async def add_to(self, other: Counter, times: int) -> list[int]:
        """Call a member of another mesh so often."""
        return [await other.add.call_one() for _ in range(times)]


@simulate(seeds=10, hosts=3, per_host={"gpus": 2})
async def test_mesh_over_simulated_hosts_has_their_coordinates(mesh: Any, host_mesh: Any) -> None:
    """H1: the same mesh over hosts as a job gives."""
    assert dict(mesh.extent) == {"hosts": 3, "gpus": 2}
    async with mesh.spawn("counters", Counter) as counters:
        assert list(await counters.rank.call()) == list(range(6))
        assert list(await counters.slice(hosts=1).add.call()) == [1, 1]
    async with host_mesh.slice(hosts=2).spawn_procs({"cpus": 1}) as procs, procs.spawn("c", Counter) as others:
        assert dict(others.extent) == {"cpus": 1}


@simulate(seeds=15, hosts=2, per_host={"gpus": 2}, sometimes=("calls waited for the connection",))
async def test_short_cut_loses_and_doubles_nothing(mesh: Any, faults: Any, chaos: Any) -> None:
    """H3: a host that is cut off for less than the leases gets what was sent, once, in order, and no process ends."""
    async with mesh.spawn("counters", Counter) as counters:
        one, other = counters.slice(hosts=0, gpus=0), counters.slice(hosts=1, gpus=1)
        counts = list[int]()
        between = list[int]()

        async def call() -> None:
            for _ in range(20):
                counts.append(await other.add.call_one())
                await trio.sleep(0.1)

        async def call_between() -> None:
            between.extend(await other.add_to.call_one(one, 20))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
            nursery.start_soon(call_between)
            for direction in ("both", "a_to_b", "b_to_a"):
                before = len(counts)
                heal = faults.host(1).cut(direction)
                await trio.sleep(0.9 * limits.AGENT_LEASE_SECONDS)
                chaos.sometimes("calls waited for the connection", len(counts) <= before + 1)
                heal()
                await trio.sleep(0.5)
        assert counts == list(range(1, 21))
        assert between == list(range(1, 21))


@simulate(seeds=15, hosts=3)
async def test_long_cut_is_one_lost_host_and_nothing_runs_there(host_mesh: Any, faults: Any) -> None:
    """H2, H4: the host's side has ended before the program gives it up; one failure, with its place."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with host_mesh.spawn_procs({"gpus": 2}) as procs, procs.spawn("counters", Counter) as counters:
            began = trio.current_time()
            faults.host(1).cut()
            try:
                await counters.sleep.call()
            finally:
                assert trio.current_time() - began == pytest.approx(limits.HOST_LEASE_SECONDS, abs=0.5)
    (lost,) = leaves(caught.value)
    where = origin(lost)
    assert isinstance(lost, HostLost)
    assert (lost.reason, lost.host, dict(lost.point or {})) == ("lease", "simulated/1", {"hosts": 1})
    assert where is not None
    assert where.host == "simulated/1"


@simulate(seeds=15, hosts=2)
async def test_cut_between_the_leases_is_the_end_of_the_agent(host_mesh: Any, faults: Any) -> None:
    """H2: healed after the host's side has ended and before the program's has, it is known at once."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with host_mesh.spawn_procs({"gpus": 1}) as procs, procs.spawn("counters", Counter):
            heal = faults.host(0).cut()
            await trio.sleep((limits.AGENT_LEASE_SECONDS + limits.HOST_LEASE_SECONDS) / 2)
            healed = trio.current_time()
            heal()
            try:
                await trio.sleep_forever()
            finally:
                assert trio.current_time() - healed < 0.2
    (lost,) = leaves(caught.value)
    assert isinstance(lost, HostLost)
    assert lost.reason == "agent exit"


@simulate(seeds=15, hosts=3, per_host={"gpus": 2}, supervision=Isolate())
async def test_mesh_that_isolates_its_dead_goes_on_without_a_lost_host(mesh: Any, faults: Any) -> None:
    """H4: nothing stale is delivered when the cut is healed, and the others count on."""
    async with mesh.spawn("counters", Counter) as counters:
        rest = [counters.slice(hosts=host, gpus=gpu) for host in (0, 2) for gpu in (0, 1)]
        under_way = list[str]()

        async def add(number: int) -> None:
            try:
                await counters.slice(hosts=1, gpus=number % 2).add.call_one()
            except HostLost as lost:
                under_way.append(lost.reason or "")

        heal = faults.host(1).cut()
        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(add, number)
            await trio.sleep(limits.HOST_LEASE_SECONDS + 1)
            heal()
        assert under_way == ["lease"] * 6
        assert [await one.add.call_one() for one in rest] == [1] * 4
        with pytest.raises(HostLost):
            await counters.slice(hosts=1, gpus=0).add.call_one()


@simulate(seeds=15, hosts=2)
async def test_lost_agent_is_one_failure(host_mesh: Any, faults: Any) -> None:
    """H4: told when it happens; the other host takes further meshes until the block of the job is left."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with host_mesh.spawn_procs({"gpus": 2}) as procs, procs.spawn("counters", Counter) as counters:
            with trio.move_on_after(0.5):
                await counters.sleep.call()
            faults.host(1).lose()
            await counters.sleep.call()
    (lost,) = leaves(caught.value)
    assert isinstance(lost, HostLost)
    assert (lost.reason, dict(lost.point or {})) == ("agent exit", {"hosts": 1})
    async with host_mesh.slice(hosts=0).spawn_procs({"gpus": 2}) as procs, procs.spawn("c", Counter) as counters:
        assert list(await counters.add.call()) == [1, 1]


class Slow(Counter):
    """Takes a second to end."""

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        yield
        await trio.sleep(1)


@simulate(seeds=10, hosts=2, supervision=Isolate())
async def test_host_lost_while_actors_end_does_not_fail_an_isolated_mesh(mesh: Any, faults: Any) -> None:
    """P1: as little as the death of a process does."""
    async with trio.open_nursery() as nursery, mesh.spawn("slow", Slow) as slow:
        assert list(await slow.add.call()) == [1] * len(mesh)
        nursery.start_soon(_lose_later, faults)
    async with mesh.slice(hosts=0).spawn("c", Counter) as counters:
        assert list(await counters.add.call()) == [1] * len(counters)


async def _lose_later(faults: Any) -> None:
    await trio.sleep(5)
    faults.host(1).lose()


@simulate(seeds=10, hosts=2)
async def test_fault_of_a_host_that_is_not_there_is_refused(mesh: Any, faults: Any) -> None:
    with pytest.raises(ShapeError, match=r"below simulate\(hosts=2\)"):
        faults.host(2).cut()
    with pytest.raises(ValueError, match="a direction must be one of"):
        faults.host(0).cut("sideways")
    assert len(mesh) == 4


@simulate(seeds=10, hosts=3, per_host={"gpus": 2}, supervision=Restart("one_for_one", along="hosts", intensity=9))
async def test_lost_agent_is_started_again_with_what_ran_there(mesh: Any, faults: Any) -> None:
    """H20: by any loss; calls that run there fail with it, those that come later wait; what ran elsewhere goes on."""
    async with mesh.spawn("counters", Counter) as counters:
        expected = [1] * 6
        assert list(await counters.add.call()) == expected
        for index, fault in enumerate(("lose", "cut", "lose")):
            rank = index % 2
            host, heals = faults.host(rank), list[Any]()
            under_way = list[Exception]()

            async def sleep(rank: int = rank, under_way: list[Exception] = under_way) -> None:
                try:
                    await counters.slice(hosts=rank).sleep.call()
                except MeshErrorGroup as group:
                    under_way.extend(leaves(group))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(sleep)
                await trio.sleep(0.5)
                if fault == "cut":
                    heals.append(host.cut())
                else:
                    host.lose()
            assert {type(one) for one in under_way} == {HostLost}
            for heal in heals:
                heal()
            expected = [1 if place // 2 == rank else count + 1 for place, count in enumerate(expected)]
            assert list(await counters.add.call()) == expected
            assert list(await counters.rank.call()) == list(range(6))


@simulate(seeds=10, hosts=2)
async def test_simulated_job_grows(mesh: Any, host_mesh: Any, faults: Any) -> None:
    """H27: a new host has processes of its own, and is lost as any; two growths are one after the other."""
    found = list[int]()

    async def grow(count: int) -> None:
        found.append(len(await host_mesh.grow(count)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(grow, 1)
        nursery.start_soon(grow, 2)
    assert found in ([3, 5], [4, 5])
    grown = await host_mesh.grow(1)
    assert dict(grown.extent) == {"hosts": 6}
    assert dict(host_mesh.extent) == {"hosts": 2}
    async with mesh.spawn("counters", Counter) as counters:
        with pytest.raises(MeshErrorGroup) as caught:
            async with (
                grown.slice(hosts=slice(-1, None)).spawn_procs({"gpus": 1}) as procs,
                procs.spawn("others", Counter) as others,
            ):
                assert sorted(last for *_, last in await counters.add_to.call(others, 1)) == [1, 2, 3, 4]
                faults.host(5).lose()
                await others.sleep.call()
        assert {dict(one.point or {})["hosts"] for one in leaves(caught.value) if isinstance(one, HostLost)} == {5}
        assert list(await counters.add.call()) == [1] * 4


class Provisioner(Counter):
    """Spawns on hosts of the program."""

    @endpoint
    async def count_there(self, hosts: Any, times: int) -> list[int]:
        async with hosts.spawn_procs({"cpus": 1}) as procs:
            counters = await procs.spawn("counters", Counter)
            return [number for _ in range(times) for number in (await counters.add.call()).values()]

    @endpoint
    async def sleep_there(self, hosts: Any, tell: Any) -> None:
        async with hosts.spawn_procs({"cpus": 1}) as procs, procs.spawn("counters", Counter) as counters:
            await tell.add.call_one()
            await counters.sleep.call()


@simulate(seeds=15, hosts=2, per_host={"gpus": 1}, supervision=Isolate())
async def test_actor_spawns_on_simulated_hosts_that_it_was_sent(mesh: Any, host_mesh: Any, faults: Any) -> None:
    """M11: nothing of a call that is cancelled stays; a lost host is its block's failure, and not the program's."""
    provisioner = await mesh.slice(hosts=0).spawn("provisioner", Provisioner)
    told = await mesh.slice(hosts=0).spawn("told", Counter)
    assert await provisioner.count_there.call_one(host_mesh, 2) == [1, 1, 2, 2]
    assert await provisioner.count_there.call_one(host_mesh.slice(hosts=1), 1) == [1]
    with trio.move_on_after(5):
        await provisioner.sleep_there.call_one(host_mesh, told)
    assert await told.add.call_one() == 2
    lost = list[BaseException]()

    async def sleep() -> None:
        with pytest.raises(MeshErrorGroup) as caught:
            await provisioner.sleep_there.call_one(host_mesh, told)
        lost.extend(leaves(caught.value))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(sleep)
        nursery.start_soon(_lose_later, faults)
    assert {type(leaf) for leaf in lost} == {HostLost}
    assert await told.add.call_one() == 4
