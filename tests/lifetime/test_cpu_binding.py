"""Processes run on the CPUs that `bind=` gives them, from their first moment on (rule O8)."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable
from typing import Any

import pytest

from trimesh import Actor, MeshErrorGroup, Point, SpawnError, endpoint, leaves, this_host
from trimesh._runtime.system.cpu_binding import Cores

pytestmark = [pytest.mark.real]
CPUS = sorted(os.sched_getaffinity(0))
SEEN: dict[str, set[int]] = {}


def look() -> None:
    SEEN["setup"] = set(os.sched_getaffinity(0))


class Placed(Actor):
    """Says where it may run."""

    @endpoint
    def cpus(self) -> list[set[int]]:
        """Those of each thread, and what `setup` has seen."""
        threads = [os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")]
        found: list[set[int]] = []
        one = threading.Thread(target=lambda: found.append(set(os.sched_getaffinity(0))))
        one.start()
        one.join()
        return [*map(set, threads), *found, SEEN["setup"]]

    @endpoint
    async def of_a_child(self, **options: Any) -> list[set[int]]:
        async with this_host().spawn_procs({"n": 1}, setup=look, **options) as procs:
            inner = await procs.spawn("inner", Placed)
            return await inner.cpus.call_one()


@pytest.mark.parametrize("python", [None, sys.executable])
async def test_every_thread_of_a_process_is_bound(python: str | None) -> None:
    """O8: forked and executed, before `setup` and before any thread of ours; the program and others are not."""
    async with this_host().spawn_procs({"gpus": 2}, bind=alternate, setup=look, python=python) as procs:
        placed = await procs.spawn("placed", Placed)
        for rank, (_, seen) in enumerate((await placed.cpus.call()).items()):
            assert seen == [{CPUS[rank % len(CPUS)]}] * len(seen)
        async with this_host().spawn_procs({"gpus": 1}, setup=look) as free:
            unbound = await free.spawn("unbound", Placed)
            assert set(CPUS) == set().union(*await unbound.cpus.call_one())
    assert os.sched_getaffinity(0) == set(CPUS)


def alternate(point: Point, cores: Cores) -> Iterable[int]:
    """Give each process one CPU."""
    cpus = sorted(frozenset().union(*cores))
    return {cpus[point.rank % len(cpus)]}


async def test_processes_of_a_bound_process_stay_on_its_cpus() -> None:
    """O8: as children of the operating system do."""
    async with this_host().spawn_procs({"gpus": 1}, bind=alternate, setup=look) as procs:
        placed = await procs.spawn("placed", Placed)
        assert set().union(*await placed.of_a_child.call_one()) == {CPUS[0]}
        assert set().union(*await placed.of_a_child.call_one(bind="cores")) == {CPUS[0]}


@pytest.mark.daily
async def test_affinity_of_the_program_bounds_the_cores() -> None:
    """O8: "cores" is refused in words where there are fewer of them than processes; "numa" shares."""
    os.sched_setaffinity(0, {CPUS[0]})
    try:
        with pytest.raises(MeshErrorGroup) as caught:
            async with this_host().spawn_procs({"gpus": 2}, bind="cores"):
                pass
        [error] = leaves(caught.value)
        assert isinstance(error, SpawnError)
        assert "got 2 processes and 1 cores" in str(error)
        async with this_host().spawn_procs({"gpus": 2}, bind="numa", setup=look) as procs:
            placed = await procs.spawn("placed", Placed)
            for seen in (await placed.cpus.call()).values():
                assert set().union(*seen) == {CPUS[0]}
    finally:
        os.sched_setaffinity(0, CPUS)


async def test_function_that_gives_no_cpus_fails_the_start() -> None:
    """O8, E11: with the coordinates of the process."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with this_host().spawn_procs({"gpus": 1}, bind=lambda _, cores: {10**6}):
            pass
    [error] = leaves(caught.value)
    assert "must return some of the CPUs" in str(error)
