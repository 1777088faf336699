"""Which CPUs each rank gets on machines of several shapes; no process is started."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from trimesh import Extent, SpawnError
from trimesh._runtime.system.cpu_binding import CpuBinding, Machine, checked_bind, machine_here, simulated_machine


def machine(nodes: Sequence[str], siblings: Sequence[str], root: Path) -> Path:
    """Write what the kernel would say of a machine."""
    for number, cpus in enumerate(nodes):
        (root / f"node/node{number}").mkdir(parents=True)
        (root / f"node/node{number}/cpulist").write_text(cpus + "\n")
    for core in siblings:
        for cpu in core.split(","):
            (root / f"cpu/cpu{cpu}/topology").mkdir(parents=True)
            (root / f"cpu/cpu{cpu}/topology/thread_siblings_list").write_text(core + "\n")
    return root


def shares(bind: Any, count: int, here: Machine) -> list[tuple[int, ...]]:
    binding = CpuBinding(bind, count, here)
    return [binding.cpus_of(Extent(gpus=count).point(rank)) for rank in range(count)]


@pytest.fixture
def here(tmp_path: Path) -> Machine:
    """Two nodes of two cores of two threads."""
    root = machine(["0-1,4-5", "2-3,6-7"], ["0,4", "1,5", "2,6", "3,7"], tmp_path)
    return machine_here(range(8), root)


def test_cores_have_their_threads_and_lie_beside_those_of_their_node(here: Machine) -> None:
    assert here.cores == (frozenset({0, 4}), frozenset({1, 5}), frozenset({2, 6}), frozenset({3, 7}))
    assert here.nodes == (frozenset({0, 1, 4, 5}), frozenset({2, 3, 6, 7}))


def test_each_rank_gets_its_share_of_the_cores(here: Machine) -> None:
    assert shares("cores", 4, here) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert shares("cores", 2, here) == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert shares("cores", 3, here) == [(0, 4), (1, 5), (2, 3, 6, 7)]


def test_ranks_share_nodes_when_there_are_more_of_them(here: Machine) -> None:
    assert shares("numa", 2, here) == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert shares("numa", 1, here) == [tuple(range(8))]
    assert shares("numa", 4, here) == [(0, 1, 4, 5)] * 2 + [(2, 3, 6, 7)] * 2


def test_fewer_cores_than_processes_are_refused(here: Machine) -> None:
    with pytest.raises(SpawnError, match=r"got 5 processes and 4 cores .*CPUs 0, 1, 2, 3, 4, 5, 6, 7"):
        CpuBinding("cores", 5, here)


def test_only_cpus_that_may_be_used_count(tmp_path: Path) -> None:
    """The affinity of who asks, which its cgroup bounds."""
    root = machine(["0-1,4-5", "2-3,6-7"], ["0,4", "1,5", "2,6", "3,7"], tmp_path)
    narrow = machine_here({1, 2, 6}, root)
    assert narrow.cores == (frozenset({1}), frozenset({2, 6}))
    assert shares("numa", 2, narrow) == [(1,), (2, 6)]


def test_machine_that_says_nothing_has_a_core_for_each_cpu(tmp_path: Path) -> None:
    silent = machine_here({3, 5}, tmp_path)
    assert silent == Machine((frozenset({3}), frozenset({5})), (frozenset({3, 5}),), (-1,))


def test_this_machine_is_understood() -> None:
    assert machine_here().cpus == os.sched_getaffinity(0)
    assert frozenset().union(*machine_here().nodes) == os.sched_getaffinity(0)


def test_function_chooses_among_the_cpus(here: Machine) -> None:
    assert shares(lambda point, cores: cores[point["gpus"]] | cores[3], 2, here) == [(0, 3, 4, 7), (1, 3, 5, 7)]
    for wrong in ({8}, set(), None, {0.5}, "0"):
        with pytest.raises(SpawnError, match="must return some of the CPUs 0, 1"):
            shares(lambda *_, wrong=wrong: wrong, 1, here)


def test_simulated_machine_has_a_core_for_each_process() -> None:
    assert shares("cores", 3, simulated_machine(3)) == [(0,), (1,), (2,)]


@pytest.mark.parametrize("wrong", ["core", 4, {0}])
def test_what_is_no_binding_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match='"cores", "numa", or a function'):
        checked_bind(wrong)
