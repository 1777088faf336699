"""Leaving a block leaves nothing of it: no process, descriptor, thread, shared memory (Z01)."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from tests.lifetime.processes import Process
from tests.lifetime.program import Program

from trimesh.testing.zombie_guard import LINGER_SECONDS

pytestmark = pytest.mark.real


def belongings(process: Process) -> dict[str, Any]:
    """Everything that a block could leave behind in the controller; the zombie guard looks into /dev/shm."""
    return {
        "descriptors": process.descriptors(),
        "threads": process.threads(),
        "children": process.children(),
        "shared memory": process.shared_mappings(),
    }


def settled(process: Process, wanted: dict[str, Any]) -> dict[str, Any]:
    """Look until a thread that has been joined is gone from /proc, too: the kernel has to run it once more for that."""
    deadline = time.monotonic() + LINGER_SECONDS
    while (found := belongings(process)) != wanted and time.monotonic() < deadline:
        os.sched_yield()
    return found


ENDS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a healthy end": ({}, []),
    "calls that are cancelled": ({"during": [["sleep"]], "body": "cancel"}, []),
    "an error of the body": ({"during": [["sleep"]], "body": "raise"}, ["LookupError"]),
    "an error of an endpoint": ({"during": [["sleep"], ["fail_at", 1]]}, ["ValueError"]),
    "a death": ({"during": [["sleep"], ["send_self", 9]], "size": 1}, ["ProcDied"]),
    "a clean-up": ({"actor": "Talking"}, []),
    "a clean-up that is too long": ({"actor": "Stubborn", "grace": 0.2}, ["ProcDied", "ProcDied"]),
    "nested meshes": ({"actor": "Nest", "during": [["nest", 1]], "body": "cancel"}, []),
    "three blocks in a row": ({"rounds": 3}, []),
    "a warm host": ({"rounds": 3, "warm": True}, []),
}


@pytest.mark.parametrize(("plan", "failures"), ENDS.values(), ids=ENDS)
def test_block_leaves_nothing_after(plan: dict[str, Any], failures: list[str], tmp_path: Path) -> None:
    """Z01."""
    with Program(tmp_path, "hold", plan) as program:
        program.event("ready")
        before = belongings(program.process)
        program.say("open")
        while (ended := program.event("open", "raised", "left all"))["event"] == "open":
            program.say("leave")

        assert [leaf["type"] for leaf in ended.get("error", {"leaves": []})["leaves"]] == failures
        assert settled(program.process, before) == before
        assert program.family() == {program.process}

        program.say("end")
        assert program.wait() == 0
        program.check_gone()


def test_block_works_in_any_thread(tmp_path: Path) -> None:
    """Z01: the kernel ties a parent's death to the thread that forked; none of that harms threads that run Trio."""
    with Program(tmp_path, "threaded", {"threads": 2, "rounds": 2}) as program:
        assert program.event("over")["threads"] == 1
        assert program.wait() == 0
        program.check_gone()
        assert len(program.said("down")) == 2 * 2 * 2
        assert program.stderr == ""


def test_threaded_controller_death_ends_all(tmp_path: Path) -> None:
    """Z04: also where Trio does not run in the main thread."""
    with Program(tmp_path, "threaded", {"threads": 2, "rounds": 1000}) as program:
        program.events("up", 4)

        program.kill_and_check()
