"""How a block ends what does not end by itself: ask, grace, SIGTERM, SIGKILL, give up (Z06-Z08, Z13, Z14)."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.lifetime.program import Program
from tests.lifetime.tracing import undying
from tests.patience import HANG_SECONDS

from trimesh import limits

pytestmark = pytest.mark.real

GRACE = 0.4

GRACES = (GRACE, 10 * GRACE, 50 * GRACE)
"""Where a member ends in peace beside one that does not: on a busy machine it may need more than the first, too."""


def leave(program: Program) -> dict[str, Any]:
    """Let the program leave its block; return what came of it, with `took`: the seconds since.

    That nothing is added to a bound is shown in simulation, where time is exact; here it has to pass, no more.
    """
    program.say("leave")
    began = program.event("leaving")["at"]
    ended = program.event("left all", "raised")
    assert program.family() == {program.process}
    return {**ended, "took": ended["at"] - began}


def deaths(ended: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return rank, `by` and signal of the leaves of an error."""
    leaves = ended["error"]["leaves"]
    assert {leaf["type"] for leaf in leaves} == {"ProcDied"}
    return sorted((leaf["point"]["n"], leaf["by"], leaf["signal"]) for leaf in leaves)


@pytest.mark.daily
def test_grace_is_given_to_shielded_clean_up(tmp_path: Path) -> None:
    """Z14: shielded clean-up that fits in the grace ends by itself, and is no failure."""
    plan = {"actor": "Stubborn", "arguments": [GRACE], "grace": 20.0}
    with Program(tmp_path, "hold", plan) as program:
        program.say("open")
        program.event("open")
        ended = leave(program)
        assert len(program.said("cleaned")) == 2

    assert ended["event"] == "left all"
    assert ended["took"] >= GRACE


def test_grace_may_be_infinite(tmp_path: Path) -> None:
    """M3: `math.inf` waits."""
    with Program(tmp_path, "hold", {"actor": "Stubborn", "arguments": [GRACE], "grace": float("inf")}) as program:
        program.say("open")
        program.event("open")
        ended = leave(program)

    assert ended["event"] == "left all"


@pytest.mark.daily
def test_grace_is_all_that_clean_up_gets(tmp_path: Path) -> None:
    """Z13, Z14: then the process is ended, and the group says so, once for each member."""
    with Program(tmp_path, "hold", {"actor": "Stubborn", "grace": GRACE}) as program:
        program.say("open")
        program.event("open")
        ended = leave(program)
        assert program.said("cleaned") == []

    assert [(rank, by) for rank, by, _ in deaths(ended)] == [(0, "grace"), (1, "grace")]
    assert ended["took"] >= GRACE


def test_grace_is_shared_by_all_depths(tmp_path: Path) -> None:
    """BL-3: actor meshes on the same processes, each too slow, get one grace, not one each."""
    grace, count = 2.0, 15
    with Program(tmp_path, "hold", {"actor": "Stubborn", "meshes": count, "grace": grace}) as program:
        program.say("open")
        program.event("open")
        ended = leave(program)

    assert ended["took"] < count * grace


STUCK = {
    # what the members do, and the signal that ends them
    "by SIGTERM": ([["hold_gil", 600]], [], signal.SIGTERM),
    "by SIGKILL": ([["hold_gil", 600]], [["ignore", signal.SIGTERM]], signal.SIGKILL),
}


@pytest.mark.daily
@pytest.mark.parametrize(("during", "before", "signum"), STUCK.values(), ids=STUCK)
def test_gil_held_in_c_does_not_hold_the_block(during: Any, before: Any, signum: int, tmp_path: Path) -> None:
    """Z07, Z13: SIGTERM after the grace, SIGKILL `TERM_SECONDS` later."""
    plan = {"during": during, "before": before, "grace": GRACE, "body": "cancel", "ask": False}
    bounds = {"CANCEL_ACK_SECONDS": 0.1, "EXIT_REPORT_SECONDS": HANG_SECONDS}
    if signum == signal.SIGTERM:  # which a busy machine may deliver late, as it may the report of it
        bounds["TERM_SECONDS"] = HANG_SECONDS
    with Program(tmp_path, "hold", {**plan, "limits": bounds}) as program:
        program.say("open")
        program.events("running", 2)
        ended = leave(program)

    assert deaths(ended) == [(0, "grace", signum), (1, "grace", signum)]
    assert ended["took"] >= GRACE + (limits.TERM_SECONDS if signum == signal.SIGKILL else 0)


@pytest.mark.daily
def test_stopped_member_does_not_hold_the_block(tmp_path: Path) -> None:
    """Z06: clean-up is asked of a process that cannot run; SIGTERM does not reach it, SIGKILL does."""
    for grace in GRACES:
        with Program(tmp_path, "hold", {"grace": grace, "body": "cancel"}) as program:
            program.say("open")
            os.kill(program.event("open")["pids"][0], signal.SIGSTOP)
            ended = leave(program)
        if len(deaths(ended)) == 1:
            break

    assert deaths(ended) == [(0, "grace", signal.SIGKILL)]
    assert ended["took"] >= grace + limits.TERM_SECONDS


def test_stopped_member_does_not_hold_accepted_messages(tmp_path: Path) -> None:
    """Z06, M3: a healthy end waits for accepted messages; a stopped member has lost its lease before it answers."""
    with Program(tmp_path, "hold", {"grace": GRACE}) as program:
        program.say("open")
        os.kill(program.event("open")["pids"][0], signal.SIGSTOP)
        ended = leave(program)

    [leaf] = ended["error"]["leaves"]
    assert (leaf["type"], leaf["point"], leaf["reason"]) == ("ProcDied", {"n": 0}, "stopped")


@pytest.mark.parametrize("whom", ["worker", "spawner", "both"])
def test_stopped_process_does_not_outlive_the_controller(whom: str, tmp_path: Path) -> None:
    """Z06, Z04: a stopped process watches no lifeline, so others must end it."""
    with Program(tmp_path, "hold", {"during": [["sleep"]]}) as program:
        program.say("open")
        worker = program.event("open")["pids"][0]
        if whom in ("spawner", "both"):
            program.spawner.signal(signal.SIGSTOP)
        if whom in ("worker", "both"):
            os.kill(worker, signal.SIGSTOP)

        program.kill_and_check()


@pytest.mark.parametrize("whom", ["worker", "spawner"])
def test_death_in_clean_up_is_a_death(whom: str, tmp_path: Path) -> None:
    """Z13: who dies by itself while its block waits for it has not run out of grace."""
    with Program(tmp_path, "hold", {"actor": "Stubborn", "grace": 600.0, "size": 1}) as program:
        program.say("open")
        worker = program.event("open")["pids"][0]
        program.say("leave")
        program.event("cleaning")
        os.kill(worker if whom == "worker" else program.spawner.pid, signal.SIGKILL)
        ended = program.event("raised")
        assert program.family() == {program.process}

    [leaf] = ended["error"]["leaves"]
    assert (leaf["type"], leaf["point"], leaf["by"]) == ("ProcDied", {"n": 0}, None)


def test_crash_after_clean_up_is_a_death(tmp_path: Path) -> None:
    """M3: a process that was asked to exit and ends badly is not taken for one that has ended."""
    plan = {"size": 2, "before": [["crash_at_exit", 1]], "limits": {"EXIT_REPORT_SECONDS": HANG_SECONDS}}
    with Program(tmp_path, "hold", plan) as program:
        program.say("open")
        program.event("open")
        ended = leave(program)

    assert deaths(ended) == [(1, None, signal.SIGSEGV)]


def test_gil_held_for_longer_than_a_lease_is_no_death(tmp_path: Path) -> None:
    """C13: the process beats on; the caller leaves after its bound, later calls queue, and the block goes on."""
    seconds = limits.LEASE_SECONDS + 2 * limits.BEAT_SECONDS
    with Program(tmp_path, "hold", {"size": 1, "before": [["hold_gil", seconds], ["add", 1, 2]]}) as program:
        program.say("open")
        program.event("running")
        program.event("open")
        assert program.said("done")[1]["values"] == [3]
        assert leave(program)["event"] == "left all"


def test_stopped_spawner_does_not_hold_the_block(tmp_path: Path) -> None:
    """Z06: it is continued when the block is left."""
    with Program(tmp_path, "hold", {"during": [["sleep"]], "body": "cancel"}) as program:
        program.say("open")
        program.event("open")
        program.spawner.signal(signal.SIGSTOP)
        ended = leave(program)

    assert ended["event"] == "left all"


@pytest.mark.daily
def test_process_that_does_not_die_is_given_up(tmp_path: Path) -> None:
    """Z08: it is in the group, with its state, and is not waited for any longer."""
    for grace in GRACES:
        with Program(tmp_path, "hold", {"before": [["allow_tracer"]], "grace": grace}) as program:
            program.say("open")
            pids = program.event("open")["pids"]
            with undying(pids[0]):
                program.say("leave")
                ended = program.event("raised")
                survivors = program.family() - {program.process}
                assert [process.pid for process in survivors] == [pids[0]]
            program.say("end")
            assert program.wait() == 0
            program.check_gone()
        if len(deaths(ended)) == 1:
            break

    assert [(rank, by) for rank, by, _ in deaths(ended)] == [(0, "grace")]
    [leaf] = ended["error"]["leaves"]
    assert f"pid {pids[0]} does not end even by SIGKILL (state t) and is left behind" in leaf["text"]
