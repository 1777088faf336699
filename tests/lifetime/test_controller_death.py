"""When the controller is lost, all that it has started is gone, and no clean-up runs (Z04, O4)."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from tests.lifetime.processes import look
from tests.lifetime.program import Program

pytestmark = pytest.mark.real

MOMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "before the first process": ({"size": 4}, "ready"),
    "at start-up": ({"size": 4}, "started"),
    "in a constructor": ({"actor": "SlowToStart"}, "constructing"),
    "in lifespan": ({"actor": "Talking"}, "up"),
    "while idle": ({}, "open"),
    "in calls": ({"during": [["sleep"]]}, "running"),
    "with the GIL held in C": ({"during": [["hold_gil", 600]]}, "running"),
    "in clean-up": ({"actor": "Stubborn"}, "cleaning"),
}


@pytest.mark.daily
@pytest.mark.parametrize(("plan", "moment"), MOMENTS.values(), ids=MOMENTS)
def test_controller_death_ends_all(plan: dict[str, Any], moment: str, tmp_path: Path) -> None:
    """Z04."""
    with Program(tmp_path, "hold", plan) as program:
        program.event("ready")
        program.say("open")
        if moment == "cleaning":
            program.event("open")
            program.say("leave")
        if moment != "ready":
            program.event(moment)

        program.kill_and_check()


@pytest.mark.daily
@pytest.mark.parametrize("moment", ["started", "running"])
def test_sigterm_of_the_controller_ends_all(moment: str, tmp_path: Path) -> None:
    """Z03: it cleans up, and dies by the signal (O6)."""
    with Program(tmp_path, "hold", {"during": [["sleep"]]}) as program:
        program.say("open")
        program.event(moment)

        program.kill_and_check(signal.SIGTERM)

        assert program.wait() == -signal.SIGTERM


@pytest.mark.daily
def test_controller_death_runs_no_clean_up(tmp_path: Path) -> None:
    """Z04: `lifespan` is not left, atexit functions do not run."""
    with Program(tmp_path, "hold", {"actor": "Talking", "before": [["at_exit"]], "during": [["sleep"]]}) as program:
        program.say("open")
        program.event("open")
        program.events("running", 2)

        program.kill_and_check()

        assert [program.said(name) for name in ("unwound", "down", "atexit")] == [[], [], []]


@pytest.mark.parametrize("plan", [{"forked": 3}, {"before": [["fork", 3]]}], ids=["controller", "workers"])
def test_controller_death_is_seen_past_forked_children(plan: dict[str, Any], tmp_path: Path) -> None:
    """O4: children that hold every descriptor, as DataLoader's do, delay nothing.

    Those of the controller itself are the user's to end; those of workers are gone with them.
    """
    with Program(tmp_path, "hold", plan) as program:
        program.say("open")
        opened = program.event("open")
        of_workers = [pid for done in program.said("done") for pids in done["values"] for pid in pids]
        workers = [look(pid) for pid in (*opened["pids"], *of_workers)]
        assert len(of_workers) == (6 if "before" in plan else 0)
        assert all(worker is not None and worker.is_running for worker in workers)
        kept = {found for pid in opened["forked"] if (found := look(pid)) is not None}
        assert len(kept) == plan.get("forked", 0)

        program.kill_and_check(kept=kept)

        assert program.family() == kept
