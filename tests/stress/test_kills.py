"""Kill what can be killed, at seeded random moments, many times: nothing is left, nothing is silent, nothing hangs.

A few rounds are part of every run of the tests; a hundred of each run as `stress`.
"""

from __future__ import annotations

import itertools
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.lifetime.processes import Process, wait_ended
from tests.lifetime.program import Program
from tests.patience import HANG_SECONDS

PROGRAMS = Path(__file__).parent / "programs"

ROUNDS = [5, pytest.param(100, marks=[pytest.mark.stress, pytest.mark.timeout(1200)])]

pytestmark = pytest.mark.real


def rounds_of(seed: int, count: int) -> Iterator[tuple[int, random.Random]]:
    """Yield number and chance of each round; a failing round can be run alone by its seed."""
    for number in range(count):
        yield number, random.Random(f"{seed} {number}")


def wait_for_moment(program: Program, chance: random.Random) -> None:
    """Wait for a random phase of the program, then for a random while within it."""
    phase, seconds = chance.choice(
        [("ready", 0.05), ("begun", 0.4), ("warm", 0.1), ("open", 0.15), ("open", 0.02), ("left", 0.1)]
    )
    program.event(phase)
    time.sleep(chance.uniform(0, seconds))  # the moment is what is varied


def of_the_user(program: Program, process: Process) -> bool:
    """Tell whether a process was forked by the program itself: those are the user's to end."""
    return process.name == "foreign" and process.session == program.pid


PLANS: dict[str, dict[str, Any]] = {
    "plain": {"size": 3},
    "with forks of the program": {"own": 3},
    "with forks of workers": {"forks": 1},
    "nested": {"size": 1, "depth": 3},
}


@pytest.mark.parametrize("count", ROUNDS)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_controller_is_killed_at_random_moments(plan: dict[str, Any], count: int, tmp_path: Path) -> None:
    """Z04: nothing of ours is left, whenever it was."""
    for number, chance in rounds_of(1, count):
        with Program(tmp_path, "churn", {**plan, "seed": number}, programs=PROGRAMS) as program:
            wait_for_moment(program, chance)
            before = {process for process in program.family() if not of_the_user(program, process)}
            program.send(signal.SIGKILL)
            deadline = time.monotonic() + HANG_SECONDS
            left = wait_ended(before, deadline)
            while not left and (new := [one for one in program.family() if not of_the_user(program, one)]):
                left = wait_ended(new, deadline)
            left = [one for one in left if not of_the_user(program, one)]
            assert not left, f"round {number}: {', '.join(map(str, left))}; {program.account()}"


@pytest.mark.parametrize("count", ROUNDS)
def test_members_are_killed_during_random_verbs(count: int, tmp_path: Path) -> None:
    """Every call ends in exactly one outcome, and the block raises the one death with its coordinates."""
    with Program(tmp_path, "victims", {"seed": 1, "rounds": 2 * count}, programs=PROGRAMS) as program:
        found = program.events("round", 2 * count)
        assert program.wait() == 0
        assert program.stderr == ""

    for number, one in enumerate(found):
        assert (one["kinds"], one["points"], one["signals"]) == (["ProcDied"], [one["expected"]], [9]), (
            f"round {number}"
        )
        assert one["begun"] == one["ended"] == sum(one["outcomes"].values()), f"round {number}: {one['outcomes']}"
        assert set(one["outcomes"]) <= {"value", "cancelled", "died"}
        assert one["outcomes"]["died"] == 1


@pytest.mark.parametrize("count", ROUNDS)
def test_nested_processes_are_killed_at_random_moments(count: int, tmp_path: Path) -> None:
    """M7: any process of four levels, the spawner included; the block raises deaths, and nothing is left."""
    for number, chance in rounds_of(2, count):
        plan = {"size": 1, "actor": "Nest", "during": [["nest", 3]], "ask": False}
        with Program(tmp_path, "hold", plan) as program:
            program.say("open")
            program.event("started")
            for _ in range(chance.randrange(5)):
                program.event("level")
            victims = sorted(program.family() - {program.process}, key=lambda one: one.pid)
            victim = chance.choice(victims)
            victim.signal(signal.SIGKILL)
            raised = program.event("raised")
            assert program.family() == {program.process}, f"round {number}: {program.account()}"
            program.say("end")
            assert program.wait() == 0

        leaves = raised["error"]["leaves"]
        assert leaves, f"round {number}"
        # A process that was not set up yet has not been started.
        assert {leaf["type"] for leaf in leaves} <= {"ProcDied", "SpawnError"}, f"round {number}: {victim} {leaves}"


@pytest.mark.stress
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(5))
def test_program_is_interrupted_at_random_moments(seed: int, tmp_path: Path) -> None:
    """O6: a hundred Ctrl-C into a busy program are `KeyboardInterrupt` and nothing else."""
    with Program(tmp_path, "interrupted", {"seed": seed, "rounds": 100}) as program:
        said = program.event("counted", seconds=600)
        assert program.wait() == 0

    assert said["raised"] == {"KeyboardInterrupt": 100}


def test_rounds_differ_and_repeat() -> None:
    """The seeds do what they are for."""
    first = [chance.random() for _, chance in rounds_of(1, 10)]
    assert first == [chance.random() for _, chance in rounds_of(1, 10)]
    assert all(one != other for one, other in itertools.combinations(first, 2))
