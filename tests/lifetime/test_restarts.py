"""A restart that is under way when the program ends leaves nothing behind (R06, Z01, Z02, Z04)."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from tests.lifetime.program import Program

pytestmark = pytest.mark.real

PHASES = {"resting": "restarting", "taking down": "lingering", "starting": "lingering"}


@pytest.mark.parametrize("phase", PHASES)
def test_interrupts_end_a_restart(phase: str, tmp_path: Path) -> None:
    """Z02, R06: once; twice where clean-up would take for ever."""
    with Program(tmp_path, "restarting", {"phase": phase}) as program:
        program.event(PHASES[phase])
        program.send(signal.SIGINT)
        if phase == "taking down":
            program.event("stopping")
            program.send(signal.SIGINT)
        ended = program.event("raised")
        assert program.family() == {program.process}
        program.say("end")
        assert program.wait() == 0

    assert [leaf["type"] for leaf in ended["error"]["leaves"]] == ["KeyboardInterrupt"]


@pytest.mark.parametrize("phase", PHASES)
def test_death_of_the_controller_ends_a_restart(phase: str, tmp_path: Path) -> None:
    """Z04: everything is gone."""
    with Program(tmp_path, "restarting", {"phase": phase}) as program:
        program.event(PHASES[phase])

        program.kill_and_check()
