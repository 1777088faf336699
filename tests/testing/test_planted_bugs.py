"""Bugs planted in three systems that a user might test: chaos and the ready checks find all of them (S3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
from tests.testing.systems import job_queue, parameter_server, replicated_log

import trimesh
from trimesh.errors import leaves
from trimesh.testing import Inconsistent, NotLinearizable
from trimesh.testing.running import ItemRun, RunSettings, SeedPlan, Simulated, run_over_processes, run_simulated
from trimesh.testing.simulated.seeded_run import SeededOptions

SEEDS: Final = 100
SYSTEMS: Final = {"job_queue": job_queue, "parameter_server": parameter_server, "replicated_log": replicated_log}
PLANTED: Final = [(name, bug) for name, system in SYSTEMS.items() for bug in system.BUGS]
RESTARTS: Final = trimesh.Restart(intensity=1000, period=60, backoff=trimesh.Backoff(0.05, 0.2))


def item(system: str, bug: str, **plan: Any) -> ItemRun:
    async def body(mesh: Any, chaos: Any) -> None:
        await SYSTEMS[system].run(mesh, chaos, bug)

    options = SeededOptions({"gpus": 4}, {"supervision": RESTARTS})
    settings = RunSettings(seeds=SeedPlan(**plan))
    return ItemRun(
        f"test_{system}.py::test_{bug}", body, {"mesh": None, "chaos": None}, Simulated(SEEDS, (), options), settings
    )


def finds(runs: Callable[[ItemRun], None], planted: ItemRun) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - a group over real processes
        runs(planted)
    assert any(isinstance(leaf, (Inconsistent, NotLinearizable)) for leaf in leaves(caught.value))


@pytest.mark.parametrize(("system", "seed"), [("job_queue", 6), ("parameter_server", 3), ("replicated_log", 6)])
def test_simulation_finds_a_bug_that_the_right_system_does_not_have(system: str, seed: int):
    finds(run_simulated, item(system, SYSTEMS[system].BUGS[0], only=seed))
    run_simulated(item(system, "", only=seed))


@pytest.mark.stress
@pytest.mark.parametrize(("system", "bug"), PLANTED)
def test_simulation_finds_each_bug(system: str, bug: str):
    finds(run_simulated, item(system, bug))


@pytest.mark.real
@pytest.mark.stress
@pytest.mark.parametrize("system", SYSTEMS)
def test_real_processes_find_work_that_is_acknowledged_early(system: str):
    finds(run_over_processes, item(system, "early", count=20))


@pytest.mark.stress
@pytest.mark.parametrize("system", SYSTEMS)
def test_simulation_passes_the_right_system(system: str):
    run_simulated(item(system, ""))
