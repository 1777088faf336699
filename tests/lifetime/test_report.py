"""What a block that does not end says of itself: once in the log, and on demand (M4)."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
from tests.lifetime.processes import stop
from tests.lifetime.program import Program
from tests.patience import HANG_SECONDS

from trimesh import limits

pytestmark = pytest.mark.real


def paragraph(text: str, pid: int) -> str:
    """Return the lines of a report on one process: its own, and those that are indented below it."""
    found = re.search(rf"^( *)\S.* pid {pid}: .*(\n\1 +.*)*", text, re.MULTILINE)
    assert found is not None, text
    return found[0]


def test_stopping_is_logged_once(tmp_path: Path) -> None:
    """M4: after 2 s, at WARNING: members with pid, state, tasks, and what is left of the grace."""
    enough = tmp_path / "enough"
    plan = {"actor": "Stubborn", "arguments": [None, str(enough)], "grace": 600.0, "answer_seconds": HANG_SECONDS}
    with Program(tmp_path, "hold", plan) as program:
        program.say("open")
        pids = program.event("open")["pids"]
        program.say("leave")
        leaving = program.event("leaving")
        logged = program.event("logged")
        enough.touch()
        program.event("left all")
        assert program.said("logged") == [logged]

    assert logged["level"] == "WARNING"
    assert logged["at"] - leaving["at"] >= limits.STOPPING_LOG_SECONDS
    first = logged["text"].splitlines()[0]
    assert re.fullmatch(
        r"the block of procs has been stopping for \d+ s, 5\d\d\.\d s of grace left; it waits for:", first
    )
    told = [paragraph(logged["text"], pids[0])]
    alike = f"    and the same of 1 other process: procs[n=1] pid {pids[1]}"
    if alike not in told[0].splitlines():  # the clean-up of one has begun some tenths of a second after the other's
        told.append(paragraph(logged["text"], pids[1]))
    for rank, (pid, lines) in enumerate(zip(pids, told, strict=False)):
        assert lines.startswith(f"  procs[n={rank}] pid {pid}: running, in the clean-up of held for ")
        # The clean-up polls for a file: a process that is interrupted while it does shows the stack of its thread.
        assert f"held[n={rank}] in a task of its own, run:" in lines or "Stack (most recent call first):" in lines
        assert "in lifespan" in lines


def test_log_names_only_what_the_block_waits_for(tmp_path: Path) -> None:
    """M4: other blocks of the program, which are in use, are none of its business."""
    plan = {"actor": "Stubborn", "grace": 600.0, "outer": 1, "size": 1}
    with Program(tmp_path, "hold", plan) as program:
        program.say("open")
        program.event("open")
        program.say("leave")
        text = program.event("logged")["text"]

    assert "procs[n=0] pid" in text
    assert "outer" not in text


def test_quick_stopping_is_not_logged(tmp_path: Path) -> None:
    """M4: only a block that takes long says so."""
    plan = {"actor": "Stubborn", "arguments": [0.2], "grace": 600.0, "limits": {"STOPPING_LOG_SECONDS": 600.0}}
    with Program(tmp_path, "hold", plan) as program:
        program.say("open")
        program.event("open")
        program.say("leave")
        program.event("left all")

        assert program.said("logged") == []


def test_dump_shows_every_call_and_stack(tmp_path: Path) -> None:
    """M4: also of processes that hold the GIL in C, or are stopped, whose own interpreters cannot be asked."""
    plan: dict[str, Any] = {"size": 3, "ask": False, "during": [["sleep"], ["hold_gil_at", 600, 1]]}
    with Program(tmp_path, "hold", plan) as program:
        program.say("open")
        program.event("open")
        program.event("holding")
        while {said["rank"] for said in program.said("running")} != {0, 1, 2}:
            program.event("running")
        pids = [program.named(f"procs.{rank}")[0].pid for rank in range(3)]
        stop(pids[2])
        text, ends_at = "", time.monotonic() + HANG_SECONDS
        while not ("held[n=0].sleep runs" in text and "in hold_gil" in text) and time.monotonic() < ends_at:
            program.say("dump")  # again if the two that answer had no processor within `TASKS_SECONDS`
            text = program.event("dumped")["text"]

    assert text.startswith(f"trimesh: process {program.pid} on ")
    assert re.search(rf"procs\[n=0\] pid {pids[0]}: running, .*called held\.sleep for \d+\.\d s", text)
    told = paragraph(text, pids[0])
    assert re.search(r"held\[n=0\]\.sleep runs, \d+\.\d s old", told)
    assert re.search(r"in sleep$", told, re.MULTILINE)
    assert "in hold_gil" in paragraph(text, pids[1])
    assert f"procs[n=2] pid {pids[2]}: stopped" in text
    for rank in range(3):
        assert re.search(rf"call held\.sleep to procs\[n={rank}\]: sent, \d+\.\d s old", text)
    assert re.search(r"call held\.hold_gil_at to procs\[n=1\]: sent", text)
