"""A mesh of which one member cannot be started: the error names it, nothing is left, the program goes on (E11)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
from tests.lifetime.program import Program
from tests.patience import HANG_SECONDS
from tests.runtime.processes import wait_gone

from trimesh import MeshErrorGroup, SpawnError, configured, leaves, this_host

pytestmark = pytest.mark.real

PROCESSES: dict[str, tuple[dict[str, Any], str, dict[str, int] | None, str]] = {
    # plan; type, point and text of the leaf
    "interpreter": ({"options": {"python": "/nonexistent/python"}}, "SpawnError", {"n": 0}, "/nonexistent/python"),
    "interpreter that fails": ({"options": {"python": "false"}}, "SpawnError", {"n": 0}, "exit code 1"),
    "setup": ({"setup": "setup_raises"}, "LookupError", {"n": 2}, "no such device"),
    "death in setup": ({"setup": "setup_dies"}, "ProcDied", {"n": 2}, "exit code 7"),
    "env": ({"env": "env_raises"}, "LookupError", {"n": 2}, "no such variable"),
    "output": ({"output": "output_to_nowhere"}, "SpawnError", {"n": 2}, "/nonexistent/folder/file"),
    "preload": ({"options": {"preload": ["no_such_module"]}}, "SpawnError", None, "no_such_module"),
}


@pytest.mark.parametrize(("plan", "kind", "point", "text"), PROCESSES.values(), ids=PROCESSES)
def test_failed_process_is_named(plan: Any, kind: str, point: Any, text: str, tmp_path: Path) -> None:
    """E11, M1: entering raises, and no process is left when it does."""
    with Program(tmp_path, "spawn", plan) as program:
        failed = program.event("failed")
        assert program.family() == {program.process}
        assert program.process.children() == []
        program.say("on")
        program.event("over")
        assert program.wait() == 0
        program.check_gone()

    assert failed["where"] == "spawn_procs"
    assert failed["error"]["type"] == "MeshErrorGroup"
    leaf = failed["error"]["leaves"][0]
    assert leaf["type"] == kind
    assert text in leaf["text"]
    if point != {"n": 0}:  # all members have that interpreter; whichever failed first is named
        assert leaf["point"] == point
        assert len(failed["error"]["leaves"]) == 1


@pytest.mark.parametrize("spare", [2, 5, 11, 14, 17, 20, 25])
def test_descriptors_that_are_wanting_are_named(spare: int, tmp_path: Path) -> None:
    """E11: wherever the limit strikes, it is an error of ours, and nothing is left."""
    with Program(tmp_path, "spawn", {"spare": spare}) as program:
        failed = program.event("failed")
        assert program.family() == {program.process}
        assert program.process.children() == []
        program.say("on")
        program.event("over")
        assert program.wait() == 0

    assert failed["error"]["type"] == "MeshErrorGroup"
    for leaf in failed["error"]["leaves"]:
        assert leaf["type"] in ("SpawnError", "ProcDied", "LinkLost")
        assert "descriptor" in leaf["text"] or "Too many open files" in leaf["text"]


@pytest.mark.parametrize("cls", ["FailsInit", "FailsLifespan"])
def test_failed_actor_is_named(cls: str, tmp_path: Path) -> None:
    """E11: `spawn` raises the original with coordinates; the other actors are gone, the processes live on."""
    with Program(tmp_path, "spawn", {"cls": cls}) as program:
        failed = program.event("failed")
        assert sorted(said["rank"] for said in program.said("up")) == sorted(
            said["rank"] for said in program.said("down")
        )
        program.say("on")
        program.event("healthy")
        program.event("over")
        assert program.wait() == 0
        program.check_gone()

    assert failed["where"] == "spawn"
    assert failed["error"]["type"] == "MeshErrorGroup"
    [leaf] = failed["error"]["leaves"]
    assert (leaf["type"], leaf["point"], leaf["mesh"]) == ("LookupError", {"n": 2}, "members")


def test_process_that_dies_in_an_actor_s_start_is_the_block_s(tmp_path: Path) -> None:
    """X3: the death cancels the block, whose body was in `spawn`, and the block raises it."""
    with Program(tmp_path, "spawn", {"cls": "DiesInInit"}) as program:
        failed = program.event("failed")
        assert program.family() == {program.process}
        program.say("on")
        program.event("over")
        assert program.wait() == 0

    assert failed["where"] == "body"
    [leaf] = failed["error"]["leaves"]
    assert (leaf["type"], leaf["point"], leaf["exit_code"]) == ("ProcDied", {"n": 2}, 7)


async def test_time_limit_of_a_start_is_a_setting(tmp_path: Path) -> None:
    """Z01: an interpreter that does not come up is ended after `spawn_seconds`, and the error names the setting."""
    interpreter = tmp_path / "python"
    interpreter.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    interpreter.chmod(0o755)
    with configured(spawn_seconds=1.0), trio.fail_after(HANG_SECONDS), pytest.raises(MeshErrorGroup) as caught:
        async with this_host().spawn_procs({"gpus": 1}, python=str(interpreter)):
            pytest.fail("it has started")
    [error] = leaves(caught.value)
    assert isinstance(error, SpawnError)
    assert "the setting spawn_seconds (1 s)" in str(error)
    await wait_gone(written_pids(tmp_path))


def written_pids(folder: Path) -> list[int]:
    """Return the pid that the interpreter has written; none if a busy machine did not run it."""
    return [int(text) for path in folder.glob("pid") if (text := path.read_text())]
