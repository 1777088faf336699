"""Placements in simulation: on simulated hosts, each with 16 CPUs and 8 GPUs, and in a simulated process."""

from __future__ import annotations

from typing import Any

import pytest
import trio

import trimesh
from trimesh import Actor, Backoff, HostLost, MeshErrorGroup, Need, ProcDied, Restart, SpawnError, endpoint, leaves
from trimesh.testing import simulate

HEALING = Restart("one_for_one", backoff=Backoff(0.001, cap=0.01), intensity=20)


class Worker(Actor):
    """Says what it has."""

    @endpoint
    async def gpus(self) -> list[str]:
        """Return the GPUs of its share."""
        share = trimesh.context().share
        return [] if share is None else list(share.gpus)


async def until(workers: Any) -> list[list[str]]:
    """Return the GPUs of all workers once all of them answer."""
    while True:
        try:
            return list(await workers.gpus.call())
        except MeshErrorGroup as group:
            if not {type(one) for one in leaves(group)} <= {HostLost, ProcDied}:
                raise
            await trio.sleep(0.01)


@pytest.mark.daily("sim")
@simulate(seeds=5, hosts=2)
async def test_simulated_hosts_have_gpus_to_place_on(host_mesh: Any, faults: Any) -> None:
    """H28, H29: all or nothing; a restarted process, and one on a replaced host, has the same share."""
    needs = {"a": Need(gpus=1, count=10, spread="hosts"), "b": Need(gpus=0.5, count=10, beside="a")}
    async with host_mesh.place(needs) as placement:
        async with (
            host_mesh.spawn_procs({"hosts": 2, "gpus": 5}, on=placement["a"], supervision=HEALING) as procs,
            procs.spawn("workers", Worker) as workers,
        ):
            before = list(await workers.gpus.call())
            assert [one for [one] in before] == [f"GPU-simulated/{host}-{gpu}" for host in "01" for gpu in range(5)]
            with pytest.raises(SpawnError, match=r"Free: 1 of 16 GPUs; taken by 'a' \(10 GPUs\), 'b' \(5 GPUs\)"):
                await host_mesh.place({"c": Need(gpus=1, count=2)})
            faults.kill(procs.slice(hosts=1, gpus=2))
            assert await until(workers) == before
            await host_mesh.replace({"hosts": 0})
            assert await until(workers) == before
        async with host_mesh.spawn_procs(on=placement["b"]) as procs, procs.spawn("workers", Worker) as workers:
            shared = [one for [one] in await workers.gpus.call()]
            assert sorted({one.split("-")[1] for one in shared[:5]}) == ["simulated/0"]
            assert set(shared).isdisjoint(one for [one] in before)
    assert [one.taken for one in await host_mesh.resources()] == [(), ()]


@pytest.mark.daily("sim")
@simulate(seeds=5)
async def test_simulated_process_places_on_its_host() -> None:
    """H28."""
    async with trimesh.this_host().place({"a": Need(gpus=3, cpus=4, count=2)}) as placement:
        shares = placement["a"].shares
        assert [share.cpus for share in shares] == [(0, 1, 2, 3), (8, 9, 10, 11)]  # each beside its GPUs
        assert [[int(gpu[-1]) for gpu in share.gpus] for share in shares] == [[0, 1, 2], [4, 5, 6]]
        async with (
            trimesh.this_host().spawn_procs(on=placement["a"]) as procs,
            procs.spawn("workers", Worker) as workers,
        ):
            assert [len(one) for one in await workers.gpus.call()] == [3, 3]


@pytest.mark.daily("sim")
@simulate(seeds=8, hosts=2)
async def test_placements_that_come_and_go_never_have_a_gpu_twice(host_mesh: Any) -> None:
    """H28: whatever the order of tasks, and while others inspect the hosts."""
    held = list[str]()

    async def place_often(count: int) -> None:
        for _ in range(3):
            try:
                async with host_mesh.place({"a": Need(gpus=count, count=2)}) as placement:
                    gpus = [gpu for share in placement["a"].shares for gpu in share.gpus]
                    assert set(gpus).isdisjoint(held)
                    held.extend(gpus)
                    await trio.sleep(0.01 * count)
                    for gpu in gpus:
                        held.remove(gpu)
            except SpawnError:
                await trio.sleep(0.01)

    async def inspect_often() -> None:
        for _ in range(3):
            for one in await host_mesh.resources():
                assert sum(taken.gpus for taken in one.taken) <= 8

    async with trio.open_nursery() as nursery:
        for count in (1, 2, 3, 4):
            nursery.start_soon(place_often, count)
        nursery.start_soon(inspect_often)
    assert [one.taken for one in await host_mesh.resources()] == [(), ()]
