"""Ctrl-C, SIGTERM and `cancel_on`: what they end, how fast, and what is left (Z02, Z03, Z09, O6)."""

from __future__ import annotations

import os
import pty
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.lifetime.program import Program

pytestmark = pytest.mark.real


def finish(program: Program) -> dict[str, Any]:
    """Wait until the controller has left its block; fail if anything outlives that. Returns its last word."""
    ended = program.event("raised", "left all")
    assert program.family() == {program.process}
    program.say("end")
    assert program.wait() == 0
    return ended


def types(ended: dict[str, Any]) -> list[str]:
    """Return the types of the leaves of what was raised."""
    return [leaf["type"] for leaf in ended["error"]["leaves"]]


MOMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "while the spawner starts": ({}, "opening"),
    "while processes start": ({"actor": "SlowToSettle"}, "constructing"),
    "while idle": ({}, "open"),
    "in calls": ({"during": [["sleep"]]}, "running"),
}


@pytest.mark.daily
@pytest.mark.parametrize(("plan", "moment"), MOMENTS.values(), ids=MOMENTS)
def test_interrupt_ends_the_block(plan: dict[str, Any], moment: str, tmp_path: Path) -> None:
    """Z02, once: nothing is left when the block has been left, which raises `KeyboardInterrupt` and nothing else."""
    with Program(tmp_path, "hold", plan) as program:
        program.say("open")
        program.event(moment)
        program.send(signal.SIGINT)
        ended = finish(program)

    assert types(ended) == ["KeyboardInterrupt"]


def test_interrupt_lets_clean_up_run(tmp_path: Path) -> None:
    """O6: the first Ctrl-C cancels; actors unwind and clean up."""
    with Program(tmp_path, "hold", {"actor": "Talking", "before": [["at_exit"]], "during": [["sleep"]]}) as program:
        program.say("open")
        program.event("open")
        program.events("running", 2)
        program.send(signal.SIGINT)
        finish(program)

        assert [len(program.said(name)) for name in ("unwound", "down", "atexit")] == [2, 2, 2]


BLOCKS: dict[str, dict[str, Any]] = {
    "one block": {},
    "blocks inside each other": {"outer": 2},  # outer ones, which are left next, do not begin to clean up, either
    "in a child task": {"in_child": True},  # Trio raises the first in the main task, which merely cancels this block
}


@pytest.mark.daily
@pytest.mark.parametrize("plan", BLOCKS.values(), ids=BLOCKS)
def test_second_interrupt_kills(plan: dict[str, Any], tmp_path: Path) -> None:
    """Z02, twice, O6: clean-up that would take for ever is cut short at once."""
    with Program(tmp_path, "hold", {"actor": "Stubborn", "grace": 600.0, **plan}) as program:
        program.say("open")
        program.event("open")
        program.send(signal.SIGINT)
        program.events("cleaning", 2)
        program.send(signal.SIGINT)
        ended = finish(program)

    assert types(ended) == ["KeyboardInterrupt"]


def test_first_interrupt_while_leaving_lets_clean_up_run(tmp_path: Path) -> None:
    """O6: a block that is being left in peace takes the first Ctrl-C as the first; it is raised at its end."""
    enough = tmp_path / "enough"
    with Program(tmp_path, "hold", {"actor": "Stubborn", "arguments": [None, str(enough)], "grace": 600.0}) as program:
        program.say("open")
        program.event("open")
        program.say("leave")
        program.events("cleaning", 2)
        program.send(signal.SIGINT)
        enough.touch()
        ended = finish(program)
        assert len(program.said("cleaned")) == 2

    assert types(ended) == ["KeyboardInterrupt"]


def test_interrupt_cuts_accepted_messages_short(tmp_path: Path) -> None:
    """M3: a healthy end waits for what was broadcast; Ctrl-C ends that wait."""
    with Program(tmp_path, "hold", {"casts": [["sleep"]]}) as program:
        program.say("open")
        program.event("open")
        program.events("running", 2)
        program.say("leave")
        program.event("leaving")
        program.send(signal.SIGINT)
        ended = finish(program)
        assert len(program.said("unwound")) == 2

    assert types(ended) == ["KeyboardInterrupt"]


def test_interrupt_handler_is_taken_off_after(tmp_path: Path) -> None:
    """O6: after the last block Trio's own handler is back; after the run Python's."""
    with Program(tmp_path, "handlers") as program:
        said = program.event("handlers")
        assert program.wait() == 0

    assert said["before"] == said["after"]
    assert said["inside"] != said["before"]
    assert said["own inside"] == said["own"]


@pytest.mark.daily
def test_terminal_interrupt_reaches_the_controller_alone(tmp_path: Path) -> None:
    """Z09: workers have sessions of their own, so the terminal signals none of them, and clean-up can run."""
    master, slave = pty.openpty()
    try:
        with Program(
            tmp_path, "hold", {"actor": "Talking", "during": [["sleep"]], "terminal": os.ttyname(slave)}
        ) as program:
            program.say("open")
            opened = program.event("open")
            program.events("running", 2)
            sessions = {process.session for process in program.family()}
            assert len(sessions) == 4  # controller, spawner, two workers
            os.write(master, b"\x03")
            ended = finish(program)
            assert sorted(said["pid"] for said in program.said("down")) == sorted(opened["pids"])
    finally:
        os.close(master)
        os.close(slave)

    assert types(ended) == ["KeyboardInterrupt"]


def test_cancel_on_lets_clean_up_run(tmp_path: Path) -> None:
    """O6: SIGTERM for pre-emption cancels the body inside `cancel_on`; the program goes on after it."""
    plan = {"actor": "Talking", "during": [["sleep"]], "cancel_on": "SIGTERM"}
    with Program(tmp_path, "hold", plan) as program:
        program.say("open")
        program.event("open")
        program.events("running", 2)
        program.send(signal.SIGTERM)
        assert program.event("cancelled")["caught"]
        ended = finish(program)
        assert [len(program.said(name)) for name in ("unwound", "down")] == [2, 2]

    assert ended["event"] == "left all"


@pytest.mark.daily
def test_cancel_on_is_over_with_its_body(tmp_path: Path) -> None:
    """O6: after it SIGTERM is the user's again, whose default ends the program."""
    with Program(tmp_path, "hold", {"cancel_on": "SIGTERM"}) as program:
        program.say("open")
        program.event("open")
        program.say("leave")
        assert not program.event("cancelled")["caught"]
        program.event("left all")

        program.kill_and_check(signal.SIGTERM)

        assert program.wait() == -signal.SIGTERM


def test_interrupt_of_a_busy_program_is_nothing_else(tmp_path: Path) -> None:
    """O6: it never comes in the middle of a message: no link breaks, nothing hangs, `KeyboardInterrupt` is all."""
    with Program(tmp_path, "interrupted", {"seed": 1, "rounds": 8}) as program:
        said = program.event("counted")
        assert program.wait() == 0

    assert said["raised"] == {"KeyboardInterrupt": 8}
