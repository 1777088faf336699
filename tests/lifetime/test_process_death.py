"""The death of any process of a family but the controller: what it takes with it, and what the block raises."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from tests.lifetime.processes import look, wait_ended
from tests.lifetime.program import Program
from tests.lifetime.tracing import held
from tests.patience import HANG_SECONDS

from trimesh import limits

pytestmark = pytest.mark.real


LATE_REPORTS = {"limits": {"EXIT_REPORT_SECONDS": HANG_SECONDS}}
"""For tests of what is said of a death: on a busy machine the spawner may say it later than a program waits for it."""


def leaves_of(program: Program) -> list[dict[str, Any]]:
    """Wait for the block's error and return its leaves; fail if any process outlives the block."""
    raised = program.event("raised")
    assert program.family() == {program.process}
    program.say("end")
    assert program.wait() == 0
    return [{**leaf, "at": raised["at"]} for leaf in raised["error"]["leaves"]]


ENDS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "SIGKILL": (["send_self", 9], {"signal": 9, "exit_code": None, "reason": "killed"}),
    "SIGTERM": (["send_self", 15], {"signal": 15, "exit_code": None, "reason": "killed"}),
    "an exit code": (["leave", 3], {"signal": None, "exit_code": 3, "reason": "exited"}),
    "exit code 0": (["leave", 0], {"signal": None, "exit_code": 0, "reason": "exited"}),
    "last words": (["leave", 1, "good\nbye\n"], {"exit_code": 1, "stderr_tail": "good\nbye\n"}),
}


@pytest.mark.daily
@pytest.mark.parametrize(("call", "expected"), ENDS.values(), ids=ENDS)
def test_process_death_is_diagnosed(call: list[Any], expected: dict[str, Any], tmp_path: Path) -> None:
    """Z10: code, signal, last words, coordinates and pid are in the leaf."""
    with Program(tmp_path, "hold", {"size": 1, "during": [call], **LATE_REPORTS}) as program:
        program.say("open")
        [leaf] = leaves_of(program)

    assert leaf["type"] == "ProcDied"
    assert leaf["point"] == {"n": 0}
    assert leaf["mesh"] == "procs"
    assert leaf["by"] is None
    assert {key: leaf[key] for key in expected} == expected


@pytest.mark.daily
def test_process_death_leaves_the_stack_of_a_crash(tmp_path: Path) -> None:
    """Z10: SIGSEGV in C code is explained by the Python stack in the last words."""
    with Program(tmp_path, "hold", {"size": 1, "during": [["crash"]], **LATE_REPORTS}) as program:
        program.say("open")
        [leaf] = leaves_of(program)

    assert leaf["signal"] == signal.SIGSEGV
    assert "in crash" in leaf["stderr_tail"]


def test_process_death_names_the_one_that_died(tmp_path: Path) -> None:
    """One of four is killed from outside: one leaf, its coordinates, its pid; siblings end without a word."""
    with Program(tmp_path, "hold", {"size": 4, "during": [["sleep"]]}) as program:
        program.say("open")
        pids = program.event("open")["pids"]
        program.events("running", 4)
        os.kill(pids[2], signal.SIGKILL)
        [leaf] = leaves_of(program)

    assert (leaf["type"], leaf["point"], leaf["pid"]) == ("ProcDied", {"n": 2}, pids[2])


@pytest.mark.parametrize("call", ["fork", "fork_session", "fork_pool"])
def test_process_death_takes_its_forks_with_it(call: str, tmp_path: Path) -> None:
    """Z04: children that the worker has forked, also in sessions of their own, also by multiprocessing."""
    with Program(tmp_path, "hold", {"size": 2, "before": [[call, 2]], "during": [["sleep"]]}) as program:
        program.say("open")
        forks = [look(pid) for pids in program.event("done")["values"] for pid in pids]
        assert len(forks) == 4
        assert all(fork is not None and fork.is_running for fork in forks)
        os.kill(program.event("open")["pids"][0], signal.SIGKILL)
        leaves_of(program)

    assert not any(fork is not None and fork.is_running for fork in forks)


@pytest.mark.parametrize("call", ["fork", "fork_session", "fork_pool"])
def test_process_death_takes_its_forks_with_it_at_once(call: str, tmp_path: Path) -> None:
    """Z04: they do not live on as long as the spawner that has adopted them."""
    plan = {"size": 2, "before": [[call, 2]], "during": [["sleep"]], "warm": True}
    with Program(tmp_path, "hold", plan) as program:
        program.say("open")
        forks = [found for pids in program.event("done")["values"] for pid in pids if (found := look(pid)) is not None]
        assert len(forks) == 4
        os.kill(program.event("open")["pids"][0], signal.SIGKILL)
        program.event("died")
        assert not wait_ended(forks, time.monotonic() + HANG_SECONDS)
        assert program.family() == {program.process, program.spawner}


@pytest.mark.daily
@pytest.mark.parametrize("call", [["sleep"], ["hold_gil", 600], ["fork_session", 2]], ids=lambda call: call[0])
def test_spawner_death_ends_all_below(call: list[Any], tmp_path: Path) -> None:
    """Z05: the block raises the deaths; workers and their forks are gone although their parent is."""
    with Program(tmp_path, "hold", {"size": 2, "during": [call, ["sleep"]]}) as program:
        program.say("open")
        program.event("open" if call[0] != "hold_gil" else "running")
        workers = program.family() - {program.process, program.spawner}
        assert len(workers) >= 2
        program.spawner.signal(signal.SIGKILL)
        assert not wait_ended(workers, time.monotonic() + HANG_SECONDS)
        leaves = leaves_of(program)

    assert {leaf["type"] for leaf in leaves} == {"ProcDied"}
    assert {leaf["point"]["n"] for leaf in leaves} == {0, 1}


@pytest.mark.parametrize("depth", [4, 3, 2, 1])
def test_nested_death_ends_what_is_below(depth: int, tmp_path: Path) -> None:
    """M7: four levels, SIGKILL at each: those below are gone at once, the error goes up through every block."""
    with Program(tmp_path, "hold", {"size": 1, "actor": "Nest", "during": [["nest", 3]]}) as program:
        program.say("open")
        levels = {said["depth"] + 1: look(said["pid"]) for said in program.events("level", 4)}
        below = [process for level, process in levels.items() if level < depth and process is not None]
        os.kill(levels[depth].pid, signal.SIGKILL)
        assert not wait_ended(below, time.monotonic() + HANG_SECONDS)
        leaves = leaves_of(program)

    assert [(leaf["type"], leaf["signal"]) for leaf in leaves] == [("ProcDied", signal.SIGKILL)]
    assert leaves[0]["pid"] == levels[depth].pid
    assert leaves[0]["mesh"] == ("procs" if depth == 4 else f"level{depth - 1}")


def test_nested_controller_death_ends_all(tmp_path: Path) -> None:
    """M7, Z04: four levels go with the controller as fast as one does."""
    with Program(tmp_path, "hold", {"size": 2, "actor": "Nest", "during": [["nest", 3]]}) as program:
        program.say("open")
        program.events("level", 8)

        program.kill_and_check()


def test_process_under_a_debugger_is_no_death(tmp_path: Path) -> None:
    """O5: it is waited for, however long the debugger holds it; `dump` tells of it."""
    plan = {"before": [["allow_tracer"]], "during": [["sleep"]], "body": "cancel"}
    with Program(tmp_path, "hold", plan) as program:
        program.say("open")
        pids = program.event("open")["pids"]
        family = program.family()
        with held(pids[1]):
            time.sleep(limits.LEASE_SECONDS + 2 * limits.BEAT_SECONDS)  # the time is what is tested
            assert program.family() == family
            program.say("dump")
            assert f"pid {pids[1]}: stopped by a debugger" in program.event("dumped")["text"]
        program.say("leave")
        assert program.event("left all", "raised")["event"] == "left all"


@pytest.mark.daily
def test_stopped_process_is_a_death(tmp_path: Path) -> None:
    """O5: a child that was stopped has lost its lease by and by; it is ended, not waited for."""
    with Program(tmp_path, "hold", {"size": 2, "during": [["sleep"]]}) as program:
        program.say("open")
        pids = program.event("open")["pids"]
        stopped_at = time.monotonic()
        os.kill(pids[1], signal.SIGSTOP)
        [leaf] = leaves_of(program)

    assert (leaf["type"], leaf["reason"], leaf["point"]) == ("ProcDied", "stopped", {"n": 1})
    assert leaf["at"] - stopped_at >= limits.LEASE_SECONDS / 2  # on a busy machine the last beat was late
