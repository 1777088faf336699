"""In which order a block is left (M3, Z15), and that it is left in silence (Z11, Z12)."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from tests.lifetime.program import Program

pytestmark = pytest.mark.real


def at(said: list[dict[str, Any]], **wanted: Any) -> list[float]:
    """Return the moments of the events with these fields; the clock is one for all processes."""
    return [one["at"] for one in said if all(one[key] == value for key, value in wanted.items())]


def leave(program: Program) -> None:
    program.event("calling")
    program.say("leave")
    program.event("left")
    assert program.wait() == 0
    assert program.said("stopping")


@pytest.mark.daily
def test_block_stops_meshes_in_reverse_order_and_ranks_together(tmp_path: Path) -> None:
    """M3 (3), Z15: a rank waits for its sibling, so ranks one after the other would never end."""
    with Program(tmp_path, "ordered") as program:
        leave(program)
        stopping, stopped = program.said("stopping"), program.said("stopped")

    assert len(stopping) == len(stopped) == 6
    for later, earlier in itertools.pairwise(["mesh 2", "mesh 1", "mesh 0"]):
        assert max(at(stopped, mesh=later)) < min(at(stopping, mesh=earlier))


def test_block_runs_accepted_messages_first(tmp_path: Path) -> None:
    """M3 (2): all that was accepted is done, in order, before any actor stops."""
    with Program(tmp_path, "ordered") as program:
        leave(program)
        done, stopping = program.said("done"), program.said("stopping")

    assert len(done) == 3 * 2 * 3
    assert max(at(done)) < min(at(stopping))
    for mesh, rank in itertools.product(["mesh 0", "mesh 1", "mesh 2"], range(2)):
        numbers = [one["number"] for one in done if (one["mesh"], one["rank"]) == (mesh, rank)]
        assert numbers == [0, 1, 2]


def test_block_refuses_others_first(tmp_path: Path) -> None:
    """M3 (1): who holds a reference gets `MeshStopped` while accepted messages still run."""
    with Program(tmp_path, "ordered", {"until_refused": True}) as program:
        leave(program)
        [refused] = program.said("refused")
        done, stopping = program.said("done"), program.said("stopping")

    assert refused["at"] < max(at(done)) < min(at(stopping))


def test_block_that_failed_cancels_what_runs(tmp_path: Path) -> None:
    """M3: exit by an exception skips the messages, cancels the running ones, and still cleans up in order."""
    with Program(tmp_path, "ordered", {"messages": 10, "body": "raise"}) as program:
        leave(program)
        assert [leaf["text"] for leaf in program.event("raised")["error"]["leaves"]] == ["on purpose"]
        begun, done, cut = (program.said(name) for name in ("begun", "done", "cut"))
        stopping, stopped = program.said("stopping"), program.said("stopped")

    assert len(done) + len(cut) == len(begun) < 3 * 2 * 10
    assert len(stopped) == 6
    for later, earlier in itertools.pairwise(["mesh 2", "mesh 1", "mesh 0"]):
        assert max(at(stopped, mesh=later)) < min(at(stopping, mesh=earlier))


@pytest.mark.parametrize("flags", [(), ("-W", "error", "-X", "dev")], ids=["plain", "with all warnings"])
@pytest.mark.parametrize("plan", [{}, {"during": [["sleep"]], "body": "cancel"}], ids=["healthy", "cancelled"])
def test_block_is_left_in_silence(plan: dict[str, Any], flags: tuple[str, ...], tmp_path: Path) -> None:
    """Z11: nothing is printed, also where Python tells of every descriptor that nobody closed."""
    with Program(tmp_path, "hold", {"actor": "Talking", **plan}, flags=flags) as program:
        program.say("open")
        program.event("open")
        program.say("leave")
        program.event("left all")
        program.say("end")
        assert program.wait() == 0

        assert program.stdout == ""
        assert program.stderr == ""


@pytest.mark.daily
def test_process_ends_as_python_programs_do(tmp_path: Path) -> None:
    """Z12, O3: clean-up of `lifespan`, then atexit functions, then buffered output is written."""
    with Program(tmp_path, "hold", {"actor": "Talking", "before": [["at_exit"], ["buffer", "last line"]]}) as program:
        program.say("open")
        program.event("open")
        program.say("leave")
        program.event("left all")
        down, ended = program.said("down"), program.said("atexit")

        assert {one["rank"] for one in ended} == {0, 1}
        assert max(at(down)) < min(at(ended))
        assert sorted(program.stdout.splitlines()) == ["procs[n=0] | last line", "procs[n=1] | last line"]
