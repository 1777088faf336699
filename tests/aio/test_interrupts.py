"""Ctrl-C and SIGTERM to asyncio programs (K04 with Z01, Z02, Z03, O6)."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.lifetime.program import Program
from tests.patience import HANG_SECONDS

import trimesh.aio

pytestmark = pytest.mark.real

PATIENCE_SECONDS = 5.0
"""Of a user who presses Ctrl-C again: one that comes while a slow machine still ends the program would end its end."""

PROGRAMS = Path(__file__).parent / "programs"


def hold(folder: Path, **plan: Any) -> Program:
    """Start a program that holds a mesh open."""
    return Program(folder, "hold_in_asyncio", plan, programs=PROGRAMS)


def finish(program: Program) -> dict[str, Any]:
    """Wait until the run has ended; fail if anything of the block outlives that. Returns its last word."""
    ended = program.event("raised", "left all")
    assert program.family() == {program.process}
    assert ended["is_default"], "a signal handler was left"
    assert ended["threads"] == ["MainThread"]
    assert ended["runs"] == 0
    program.say("end")
    assert program.wait() == 0
    return ended


def interrupt(program: Program) -> None:
    """Interrupt it until it ends by that: asyncio is not let in the middle of Trio, so it may take more than one."""
    for _ in range(10):
        program.send(signal.SIGINT)
        with contextlib.suppress(AssertionError):
            program.event("ending", seconds=PATIENCE_SECONDS)
            return
    raise AssertionError(f"it went on; {program.account()}")


def types(ended: dict[str, Any]) -> list[str]:
    """Return the types of the leaves of what was raised."""
    return [leaf["type"] for leaf in ended["error"]["leaves"]]


PLANS: dict[str, dict[str, Any]] = {
    "idle": {},
    "in calls": {"during": [["sleep"]]},
    "in a child task": {"block_in": "child"},
    "in a task of its own": {"block_in": "stray"},
    "in a loop without a handler": {"runner": "loop"},
}


@pytest.mark.daily
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_interrupt_cancels_the_main_task(plan: dict[str, Any], tmp_path: Path) -> None:
    """Z02, once, K04: actors clean up, all is gone, and what comes out of the run is `KeyboardInterrupt` alone."""
    with hold(tmp_path, actor="Talking", **plan) as program:
        program.event("open")
        program.events("running", 2 * len(plan.get("during", [])))
        program.send(signal.SIGINT)
        ended = finish(program)
        assert len(program.said("down")) == 2

    assert types(ended) == ["KeyboardInterrupt"]
    assert ended["error"]["type"] == "KeyboardInterrupt"


@pytest.mark.parametrize("plan", [{}, {"block_in": "child"}, {"runner": "loop"}], ids=str)
def test_second_interrupt_kills(plan: dict[str, Any], tmp_path: Path) -> None:
    """Z02, twice, O6, K04: clean-up that would take for ever is cut short at once."""
    with hold(tmp_path, actor="Stubborn", grace=600.0, **plan) as program:
        program.event("open")
        program.send(signal.SIGINT)
        program.events("cleaning", 2)
        program.send(signal.SIGINT)
        ended = finish(program)

    assert types(ended) == ["KeyboardInterrupt"]


def test_second_interrupt_ends_a_body_that_has_swallowed_the_first(tmp_path: Path) -> None:
    """O6, K04: asyncio raises `KeyboardInterrupt` then, wherever that breaks nothing, and the block is left."""
    with hold(tmp_path, body="swallow") as program:
        program.event("open")
        program.send(signal.SIGINT)
        program.event("swallowed")
        interrupt(program)
        ended = finish(program)

    assert types(ended) == ["KeyboardInterrupt"]


def test_second_interrupt_ends_a_body_that_computes(tmp_path: Path) -> None:
    """O6, K04: the first one waits for the task to look up, the second does not."""
    with hold(tmp_path, body="spin") as program:
        program.event("spinning")
        program.send(signal.SIGINT)
        interrupt(program)
        ended = finish(program)

    assert set(types(ended)) == {"KeyboardInterrupt"}


@pytest.mark.parametrize("runner", ["asyncio.run", "thread"])
def test_terminated_program_leaves_nothing(runner: str, tmp_path: Path) -> None:
    """Z03, K04: SIGTERM ends the program by default; its processes are gone."""
    with hold(tmp_path, runner=runner, during=[["sleep"]]) as program:
        program.event("open")
        program.events("running", 2)

        program.kill_and_check(signal.SIGTERM)

        assert program.wait() == -signal.SIGTERM


def test_killed_program_leaves_nothing(tmp_path: Path) -> None:
    """Z04, K04."""
    with hold(tmp_path) as program:
        program.event("open")

        program.kill_and_check(signal.SIGKILL)


@pytest.mark.parametrize("signals", [pytest.param(1, marks=pytest.mark.stress), 2])
def test_interrupt_of_a_busy_program_is_nothing_else(signals: int, tmp_path: Path) -> None:
    """O6, K04: it never comes in the middle of Trio: nothing breaks, nothing hangs, `KeyboardInterrupt` is all."""
    plan = {"seed": signals, "rounds": 8, "signals": signals}
    with Program(tmp_path, "interrupted_in_asyncio", plan, programs=PROGRAMS) as program:
        said = program.event("counted")
        assert program.wait() == 0

    assert said["raised"] == {"KeyboardInterrupt": 8}


@pytest.mark.parametrize(
    ("after", "lines"),
    [(None, range(1, 18_000)), ("_finished", range(1, 200))],
    ids=["of the way out", "after the end of Trio"],
)
def test_second_interrupt_breaks_nothing_before_any_line(after: str | None, lines: range, tmp_path: Path) -> None:
    """O6, K04: wherever it comes while the mesh is being left, nobody is left asleep and nothing else is raised."""
    chosen = sorted(random.Random(7).sample(lines, 8))
    plan = {"after": after, "lines": chosen}
    with Program(tmp_path, "swept_in_asyncio", plan, programs=PROGRAMS) as program:
        said = program.event("counted")
        assert program.wait() == 0

    assert said["raised"] == {"KeyboardInterrupt": len(chosen)}
    assert said["missed"] <= len(chosen) // 2, "these lines are no longer executed: take a smaller range"


def test_signal_wakes_the_loop_whatever_the_main_thread_does() -> None:
    """O6, K04: one that comes when it is about to sleep, or to another thread, does not wait for something else."""

    def interrupt_here() -> None:
        time.sleep(0.2)  # the loop sleeps by then; else this shows less
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    async def main() -> None:
        loop, heard = asyncio.get_running_loop(), asyncio.Event()
        before = signal.signal(signal.SIGUSR1, lambda *_: loop.call_soon(heard.set))
        try:
            async with asyncio.timeout(HANG_SECONDS), trimesh.aio.open_trio():
                thread = threading.Thread(target=interrupt_here)
                thread.start()
                await heard.wait()
                thread.join()
        finally:
            signal.signal(signal.SIGUSR1, before)

    asyncio.run(main())


def test_signals_are_left_to_who_has_taken_them_over() -> None:
    """K04: the handlers of a program's own loop work during and after a block."""

    async def main() -> None:
        loop, heard = asyncio.get_running_loop(), asyncio.Event()
        async with trimesh.aio.open_trio():
            loop.add_signal_handler(signal.SIGUSR1, heard.set)
        try:
            async with asyncio.timeout(HANG_SECONDS):
                signal.raise_signal(signal.SIGUSR1)
                await heard.wait()
        finally:
            loop.remove_signal_handler(signal.SIGUSR1)

    asyncio.run(main())
    assert signal.set_wakeup_fd(-1) == -1
