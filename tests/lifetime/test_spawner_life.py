"""How long a spawner lives, who shares it, and what processes take over from the program (O1, O2)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.lifetime.processes import Process
from tests.lifetime.program import Program

pytestmark = pytest.mark.real

SPAWNERS = {
    "before": 0,
    "outer": 1,
    "inner": 1,
    "sibling": 1,
    "another preload": 2,
    "inner ones left": 1,
    "left": 0,
    "warm": 1,
    "two meshes": 1,
    "one mesh": 1,
    "cold": 0,
    "three": 1,
    "over": 0,
}


def test_spawner_belongs_to_the_outermost_block(tmp_path: Path) -> None:
    """O1: blocks inside share it; it has exited and been reaped when that block ends; a warm host keeps one."""
    seen: dict[str, list[Process]] = {}
    with Program(tmp_path, "sharing") as program:
        for name, count in SPAWNERS.items():
            assert program.event("step")["name"] == name
            seen[name] = program.named("trimesh-spawner")
            assert len(program.process.children()) == count  # zombies would be children, too
            program.say("next")
        assert program.wait() == 0
        assert program.stderr == ""

    assert {name: len(found) for name, found in seen.items()} == SPAWNERS
    assert seen["outer"] == seen["inner"] == seen["sibling"] == seen["inner ones left"]
    assert seen["warm"] == seen["two meshes"] == seen["one mesh"]


@pytest.mark.parametrize("python", [None, sys.executable], ids=["fork", "exec"])
def test_process_takes_over_what_the_program_has_now(python: str | None, tmp_path: Path) -> None:
    """O2: not what it had when the spawner was started."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    with Program(tmp_path, "inheriting", {"folder": str(folder), "python": python}) as program:
        found = program.event("found")
        assert program.wait() == 0

    own = found["own"]
    assert own["cwd"] == str(folder)
    assert [theirs.pop("own") for theirs in found["theirs"]] == ["00", "01", "10", "11"]
    for theirs in found["theirs"]:
        for name in ("cwd", "umask", "argv", "limit", "path", "kept", "gone", "warnings"):
            assert theirs[name] == own[name], name
        assert theirs["main"] is False  # the user's __main__ is never imported
        assert theirs["threads"] == "1"  # one of several
        assert theirs["session"] is True
        assert theirs["tasks"] == 2  # Trio and the native thread
