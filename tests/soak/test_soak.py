"""The mixed workload under some seeds (`make soak`: under ten thousand), and bugs that it must find."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from tests.soak.mutations import MUTATIONS, Finding, find
from tests.soak.run import replay, row, run_seeds
from tests.soak.workload import STATES, mixed_workload, run_schedule

from trimesh.testing import simulate

ROOT = Path(__file__).parents[2]

SCHEDULES = 15
"""All states are reached by the first ten."""

NEAR = 300
"""Seeds that are tried when the one of the table does not show a bug any more."""


@simulate(seeds=SCHEDULES, sometimes=STATES)
async def test_mixed_workload(faults, chaos):
    await mixed_workload(faults, chaos)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_bug_is_found(name: str):
    """Under the seed of the table; or under another, where the runtime has changed and the schedules with it."""
    mutation = MUTATIONS[name]

    found = find(mutation, itertools.chain([mutation.seed], range(NEAR)), mutation.rule)

    assert found is not None
    assert run_schedule(found.seed).error is None, "without the bug"


def test_table_of_planted_bugs_is_in_the_page():
    page = Path(__file__).with_name("README.md").read_text()

    for mutation in MUTATIONS.values():
        assert row(mutation, Finding(mutation.seed, mutation.rule), 0) in page


def soak(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.soak.run", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_soak_says_how_many_schedules_there_were():
    done = soak("--schedules", "4", "--processes", "2", "--first-seed", "0x100")

    assert done.returncode == 0, done
    assert "4 schedules in" in done.stdout
    assert "every rule held" in done.stdout


def test_soak_reports_a_breach_and_how_to_repeat_it():
    mutation = MUTATIONS["deadline-ignored"]
    with mutation.planted():
        *_, last = run_seeds(range(50))

    assert last.seed is not None
    assert last.breach.startswith("OracleError: OR-5")
    assert f"--mesh-seed={last.seed:#x}" in replay(last.seed)
