"""The pytest plugin as a user meets it: options, the line that replays a failure, fixtures, pytest-trio beside it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trimesh.testing import simulate

SUITE = """
import pytest, trio
from trimesh import Actor, endpoint
from trimesh.testing import simulate
import trimesh.testing

class Worker(Actor):
    @endpoint
    async def step(self, number: int) -> int:
        return number

seeds = []

@simulate(seeds=30)
async def test_passes(mesh, tmp_path):
    w = await mesh.spawn("w", Worker)
    assert list((await w.step.call(len(str(tmp_path)) * 0 + 3)).values()) == [3, 3]

@simulate(seeds=30)
async def test_race(mesh):
    w = await mesh.spawn("w", Worker)
    order = []
    async def one(number):
        await w.step.call(number)
        order.append(number)
    async with trio.open_nursery() as nursery:
        for number in range(3):
            nursery.start_soon(one, number)
    assert order[0] != 2, "the last one was the first"

@simulate(seeds=4)
async def test_by_chance(mesh, faults):
    w = await mesh.spawn("w", Worker)
    faults.link("controller", mesh).drop(1e-9)
    await w.step.call(1)

@simulate(seeds=3)
async def test_skips(mesh):
    pytest.skip("for a reason")

async def test_of_pytest_trio(autojump_clock):
    await trio.sleep(1000)
    assert trio.current_time() == 1000

@pytest.fixture
def of_the_user(mesh):
    return mesh.size()

@simulate(seeds=1)
async def test_asks_too_early(of_the_user):
    pass
"""


def run(folder: Path, *options: str, suite: str = SUITE) -> str:
    (folder / "test_suite.py").write_text(suite)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "trimesh.testing.plugin"]
    command += ["-c", "/dev/null", "-o", "trio_mode=true", "--rootdir", str(folder), str(folder), *options]
    environment = {**os.environ, "COLUMNS": "120"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False).stdout


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    return run(tmp_path_factory.mktemp("suite"))


@pytest.mark.slow
def test_suite_beside_pytest_trio(report: str):
    assert "2 passed, 1 skipped" in report.replace("3 failed, ", "").replace(", 1 error", ""), report


def test_failure_prints_the_line_that_replays_it(tmp_path: Path, report: str):
    line = re.search(r"replay: pytest '(test_suite\.py::test_race)' (--mesh-seed=0x[0-9a-f]+)", report)
    assert line is not None, report

    again = run(tmp_path, "-k", "test_race", line[2])

    assert "the last one was the first" in again
    assert f"mesh seed {line[2].partition('=')[2]}" in again


@pytest.mark.slow
def test_trace_of_a_failure_is_written_and_is_the_same_each_time(tmp_path: Path):
    traces = []
    for number in range(2):
        run(tmp_path, "-k", "test_race", "--mesh-trace", str(tmp_path / f"trace{number}"))
        traces.append((tmp_path / f"trace{number}").read_text())

    assert traces[0] == traces[1]
    assert "dispatch  w[gpus=0]  step for controller" in traces[0]


@pytest.mark.slow
def test_number_of_seeds_can_be_overridden(tmp_path: Path):
    """Under two seeds the race does not show; so many were run only."""
    assert "1 passed" in run(tmp_path, "-k", "test_passes", "--mesh-seeds", "2", "--mesh-first-seed", "0x10")


@pytest.mark.slow
def test_time_is_shared_by_the_tests_that_run_under_seeds(tmp_path: Path):
    report = run(
        tmp_path, "-k", "test_passes or test_race or of_pytest_trio", "--mesh-seconds", "1", "--mesh-first-seed", "7"
    )

    told = re.search(r"mesh: 2 tests under seeds, (\d+) runs: \d+ to \d+ seeds each, from 0x7 on", report)
    assert told is not None, report
    assert int(told[1]) >= 2


@pytest.mark.slow
def test_fresh_seeds_begin_elsewhere_each_time(tmp_path: Path):
    reports = [run(tmp_path, "-k", "test_passes", "--mesh-seeds", "2", "--mesh-first-seed", "fresh") for _ in range(2)]
    first = [re.findall(r"2 runs: 2 to 2 seeds each, from (0x[0-9a-f]+) on", report) for report in reports]

    assert first[0] != first[1]
    assert [len(found) for found in first] == [1, 1], reports


@pytest.mark.slow
def test_fresh_seeds_may_follow_those_of_a_test(tmp_path: Path):
    """Whoever of several workers runs it: they begin where the report says."""
    report = run(tmp_path, "-k", "test_passes", "--mesh-seeds", "2", "--mesh-fresh-seconds", "1e-9", "-n", "2")

    assert re.search(r"1 tests under seeds, 3 runs: 3 to 3 seeds each, from 0x0 on, then from 0x[0-9a-f]+ on", report)


def test_marker_chooses_what_runs_under_seeds(tmp_path: Path):
    assert "1 skipped, 5 deselected" in run(tmp_path, "-m", "mesh_seeded", "-k", "skips or of_pytest_trio or nothing")


def test_fault_by_chance_must_hit_under_some_seed(report: str):
    assert "not hit under any of 4 seeds: link controller - procs[2]: drop(1e-09)" in report


def test_fixture_that_asks_for_the_mesh_is_told_when_there_is_one(report: str):
    assert "exists only inside a test under @trimesh.testing.simulate" in report


FAILING = """
import trio
import trimesh
from trimesh.testing import simulate

class Worker(trimesh.Actor):
    @trimesh.endpoint
    async def step(self):
        raise [ValueError("no room"), KeyError("x")][trimesh.current_rank()]

@simulate(seeds=1)
async def test_call(mesh):
    w = await mesh.spawn("w", Worker)
    await w.step.call()

@simulate(seeds=1)
async def test_tasks(mesh):
    w = await mesh.spawn("w", Worker)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(w.slice(gpus=0).step.call)
        nursery.start_soon(w.slice(gpus=0).step.call)

async def test_without_a_mesh():
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep, "soon")
        nursery.start_soon(trio.sleep, "soon")
"""


def test_short_summary_has_the_first_failure_of_a_group(tmp_path: Path):
    report = run(tmp_path, suite=FAILING)

    assert "::test_call - ValueError: no room (w[gpus=0] and 1 more)\n" in report
    assert "::test_tasks - ValueError: no room (w[gpus=0]" in report
    assert "::test_without_a_mesh - ExceptionGroup: Exceptions from Trio nursery" in report  # as without this plugin


DIFFERING = """
import pytest
from trimesh.testing import simulate

@pytest.mark.mesh_backend("sim", "proc")
@pytest.mark.parametrize("size", [1, 2])
@simulate(seeds=3, real_seeds=2)
async def test_by_back_end(mesh_backend_name, chaos, size):
    assert mesh_backend_name == "proc" or chaos.seed < size, "the seed is too large"

@pytest.mark.mesh_backend("sim", "proc")
@simulate(seeds=3)
async def test_that_fails_everywhere(mesh_backend_name):
    raise ValueError("it fails")
"""


@pytest.mark.real
def test_summary_compares_the_verdicts_of_the_back_ends(tmp_path: Path):
    """S4: a line for each test that fails on some of them only."""
    lines = [line for line in run(tmp_path, "-n", "0", suite=DIFFERING).splitlines() if line.startswith("mesh: test_")]

    assert lines == [
        "mesh: test_by_back_end[1]: sim fails (seed 0x1: the seed is too large), proc passes (2 seeds)",
        "mesh: test_by_back_end[2]: sim fails (seed 0x2: the seed is too large), proc passes (2 seeds)",
    ]


def test_simulate_takes_async_tests_only():
    with pytest.raises(TypeError, match="async test"):
        simulate()(lambda: None)  # type: ignore[arg-type]


def test_simulate_needs_a_seed():
    with pytest.raises(ValueError, match="at least one seed"):
        simulate(seeds=0)
