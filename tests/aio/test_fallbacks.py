"""Releases of Trio and asyncio that lack a name which is not public, and loops of other kinds: all works (K04, K05)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.patience import HANG_SECONDS

from trimesh.aio import driver, slots

pytestmark = [pytest.mark.real, pytest.mark.slow]

PROGRAMS = Path(__file__).parent / "programs" / "fallbacks"
SOURCE = Path(driver.__file__).parents[2]
NOT_RENAMED = {"clock", "done_callback"}
"""Public, too: parameters of `trio.run` and of `start_guest_run`."""

THREADS = ("NoneType", False, "NoneType")
"""Trio is a guest with its thread, and the loop of actors is in a thread: the driver of the caller, whether the actors
are in the main thread, and their driver."""
CALLBACKS = ("CallbackDriver", True, "CallbackDriver")
SELECTORS = ("SelectorDriver", True, "SelectorDriver")
THREAD_OF_ACTORS = ("SelectorDriver", False, "NoneType")


def run_program(loop: str, renamed: tuple[str, str, str] | None = None) -> tuple[object, ...]:
    """Run the program, and check that nothing is left of it; return where its work was done."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    path = [str(SOURCE)]
    if renamed is not None:
        env["TRIMESH_TEST_RENAMED"] = json.dumps(renamed)
        path.append(str(PROGRAMS))
    env["PYTHONPATH"] = os.pathsep.join(path)
    command = [sys.executable, str(PROGRAMS / "bit_of_everything.py"), loop]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, env=env, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["left"] == []
    assert found["actors"][0] == found["actors"][1]
    return found["caller"], found["actors"][0]["main thread"], found["actors"][0]["driver"]


def rename(name: str) -> tuple[str, str, str]:
    """Return how Trio calls a name otherwise."""
    return ("trio", rf"\b(_?){name}\b", rf"\1{name}_elsewhere")  # attrs drops the `_` of a parameter


def names_of_trio() -> list[str]:
    tables = (driver.RUN, driver.TRAPS)
    classes = {holder for table in tables for holder in table} - {"Task", "TheIOManager"}
    fields = {name for table in tables for names in table.values() for name in names} - NOT_RENAMED
    others = {"GLOBAL_RUN_CONTEXT", "sniffio_library", "CancelShieldedCheckpoint", "unrolled_run"}
    return sorted(classes | fields | others)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if number % 13 == 0 else pytest.mark.stress)
        for number, name in enumerate(names_of_trio())
    ],
)
def test_name_that_trio_lacks(name: str) -> None:
    """K04, K05: the tasks of Trio do the work, and a thread has the loop of actors."""
    assert run_program("asyncio", rename(name)) == THREADS


@pytest.mark.parametrize(
    ("renamed", "where"),
    [
        pytest.param(("trio", r'(GLOBAL_RUN_CONTEXT(?:\.|, "))task\b', r"\1job"), THREADS, id="context.task"),
        pytest.param(
            ("trio", r'(GLOBAL_RUN_CONTEXT(?:\.|, "))runner\b', r"\1run"), THREAD_OF_ACTORS, id="context.runner"
        ),
        pytest.param(rename("gen"), THREAD_OF_ACTORS, id="gen"),
        pytest.param(
            (
                "trio._core._run",
                r"(next_send = )(runner\.io_manager\.get_events\(timeout\))(\n    finally)",
                r"\1(lambda: \2)()\3",
            ),
            THREAD_OF_ACTORS,
            id="events",
        ),
        pytest.param(rename("_registered"), SELECTORS, id="_registered"),
    ],
)
def test_part_that_trio_lacks(renamed: tuple[str, str, str], where: tuple[object, ...]) -> None:
    """K04, K05: what needs it is done otherwise, and nothing else."""
    assert run_program("asyncio", renamed) == where


@pytest.mark.parametrize("name", driver.LOOP)
def test_name_that_loops_of_asyncio_lack(name: str) -> None:
    """K04, K05: loops are told by callbacks."""
    assert run_program("asyncio", ("asyncio", rf"\b{name}\b", f"{name}_elsewhere")) == CALLBACKS


@pytest.mark.parametrize("name", ["_wait", *(slots.TASKS if sys.version_info < (3, 12) else ())])
def test_name_that_tasks_of_asyncio_lack(name: str) -> None:
    """K05: the first step of a call is made in its turn; watchers look at what is public."""
    end = f"\ndel {name}\n__all__ = tuple(one for one in __all__ if one != {name!r})\n"
    without = (r"\Z", end) if name in slots.TASKS else (rf"\b{name}\b", f"{name}_elsewhere")
    assert run_program("asyncio", ("asyncio.tasks", *without)) == SELECTORS


@pytest.mark.parametrize("loop", ["bare", "mute", "uvloop"])
def test_loop_whose_selector_cannot_be_asked(loop: str) -> None:
    """K04, K05: that of the program and, by `setup`, those of actors."""
    if loop == "uvloop" and importlib.util.find_spec("uvloop") is None:
        pytest.skip("uvloop is not installed")
    assert run_program(loop) == CALLBACKS


def test_loop_that_can_be_asked() -> None:
    """K04, K05: the program itself shows where its work is done."""
    assert run_program("asyncio") == SELECTORS
