"""Ends of processes and of blocks, where Trio is a guest: of a program's own, and of `trimesh.aio` (K04 with Z)."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.lifetime.program import Program

pytestmark = pytest.mark.real

PROGRAMS = Path(__file__).parent / "programs"

GRACE = 0.4


@pytest.fixture(params=["asyncio", "guest"])
def hold(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Start a program that holds a mesh open, in asyncio or in a Trio that is a guest, and wait until it is open."""

    def start(**plan: Any) -> Program:
        if request.param == "asyncio":
            return Program(tmp_path, "hold_in_asyncio", {"body": "leave", **plan}, programs=PROGRAMS)
        program = Program(tmp_path, "hold", {"runner": "guest", **plan})
        program.say("open")
        return program

    return start


def finish(program: Program) -> list[dict[str, Any]]:
    """Wait until the block has been left; fail if anything outlives it; return the leaves of what it has raised."""
    ended = program.event("raised", "left all")
    assert program.family() == {program.process}
    program.say("end")
    assert program.wait() == 0
    return ended["error"]["leaves"] if "error" in ended else []


def leave(program: Program) -> list[dict[str, Any]]:
    """Leave it once it is open."""
    program.event("open")
    program.say("leave")
    program.event("leaving")
    return finish(program)


def test_clean_exit_is_silent(hold: Any) -> None:
    """Z01, Z11, Z12, K04: nothing runs on, nothing was printed, and `atexit` functions have run."""
    with hold(actor="Talking", during=[["at_exit"]]) as program:
        assert leave(program) == []
        assert len(program.said("down")) == len(program.said("atexit")) == 2
        assert (program.stdout, program.stderr) == ("", "")


def test_death_is_diagnosed(hold: Any) -> None:
    """Z10, K04: exit code, coordinates and last words are in the leaf."""
    with hold(size=1, during=[["leave", 3, "good\nbye\n"]], ask=False) as program:
        [leaf] = finish(program)

    assert (leaf["type"], leaf["point"], leaf["exit_code"]) == ("ProcDied", {"n": 0}, 3)
    assert leaf["stderr_tail"] == "good\nbye\n"


def test_death_of_the_spawner_ends_all_below(hold: Any) -> None:
    """Z05, K04."""
    with hold(during=[["sleep"]]) as program:
        program.event("open")
        workers = program.family() - {program.process, program.spawner}
        program.spawner.signal(signal.SIGKILL)
        leaves = finish(program)
        assert [process for process in workers if process.is_running] == []

    assert {(leaf["type"], leaf["point"]["n"]) for leaf in leaves} == {("ProcDied", 0), ("ProcDied", 1)}


def test_stopped_member_is_a_death(hold: Any) -> None:
    """Z06, K04: its lease expires although its socket is open."""
    with hold(during=[["sleep"]]) as program:
        pids = program.event("open")["pids"]
        os.kill(pids[1], signal.SIGSTOP)
        [leaf] = finish(program)

    assert (leaf["type"], leaf["reason"], leaf["point"]) == ("ProcDied", "stopped", {"n": 1})


def test_gil_held_in_c_does_not_hold_the_block(hold: Any) -> None:
    """Z07, Z13, K04: a death elsewhere fails the block; who hears nothing is ended when its grace is over."""
    with hold(during=[["hold_gil_at", 600, 0]], grace=GRACE) as program:
        holding = program.event("holding")["pid"]
        workers = program.family() - {program.process, program.spawner}
        [other] = [process for process in workers if process.pid != holding]
        other.signal(signal.SIGKILL)
        leaves = finish(program)

    assert [(leaf["point"]["n"], leaf["by"]) for leaf in leaves] == [(1, None), (0, "grace")]


def test_clean_up_gets_its_grace(hold: Any) -> None:
    """Z14, K04: shielded clean-up that fits ends by itself, and is no failure."""
    with hold(actor="Stubborn", arguments=[GRACE], grace=20.0) as program:
        assert leave(program) == []
        assert len(program.said("cleaned")) == 2


def test_clean_up_gets_no_more_than_its_grace(hold: Any) -> None:
    """Z13, K04: the group names who was ended for want of it."""
    with hold(actor="Stubborn", grace=GRACE) as program:
        leaves = leave(program)
        assert program.said("cleaned") == []

    assert sorted((leaf["point"]["n"], leaf["by"]) for leaf in leaves) == [(0, "grace"), (1, "grace")]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL], ids=lambda signum: signum.name)
def test_death_of_the_program_ends_all(signum: int, hold: Any) -> None:
    """Z03, Z04, K04."""
    with hold(during=[["sleep"]]) as program:
        program.event("open")
        program.events("running", 2)
        program.kill_and_check(signum)
