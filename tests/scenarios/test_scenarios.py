"""State machines as their scripts say (`tests/scenarios/scripts`); see `script.py` for the form."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
import trio.testing
from tests.scenarios.calls import CallScene
from tests.scenarios.channels import ChannelScene
from tests.scenarios.credits import CreditScene
from tests.scenarios.deadlocks import DeadlockScene
from tests.scenarios.mailbox import MailboxScene
from tests.scenarios.meshes import MeshScene
from tests.scenarios.script import Scene, ScriptError, difference, parse, render
from tests.scenarios.streams import StreamScene
from tests.scenarios.supervision import SupervisionScene

from trimesh.testing.plans.determinism import scheduled_by

SCRIPTS = Path(__file__).parent / "scripts"
FILES = sorted(SCRIPTS.glob("*/*.txt"))

SCENES: dict[str, type[Scene]] = {
    "calls": CallScene,
    "channels": ChannelScene,
    "credits": CreditScene,
    "deadlocks": DeadlockScene,
    "mailbox": MailboxScene,
    "meshes": MeshScene,
    "streams": StreamScene,
    "supervision": SupervisionScene,
}


def run(text: str, scene: Scene) -> str:
    """Run a script under a virtual clock, in an order of tasks that is always the same."""
    with scheduled_by(0):
        return trio.run(render, text, scene, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.parametrize("path", [pytest.param(path, id=f"{path.parent.name}-{path.stem}") for path in FILES])
def test_machine_does_what_its_script_says(path: Path, rewrites: bool) -> None:
    expected = path.read_text()
    found = run(expected, SCENES[path.parent.name]())
    if rewrites:
        path.write_text(found)
        return
    differs = difference(path, expected, found)
    assert not differs, f"make scenarios rewrites the file, if this is what is meant:\n{differs}"


def test_every_scene_has_scripts() -> None:
    assert {path.parent.name for path in FILES} == set(SCENES)


class Counting(Scene):
    def __init__(self) -> None:
        self.total = 0

    def add(self, command: object) -> str:
        self.total += 1
        return f"now {self.total}"


SCRIPT = "# Why.\nadd\nadd\n----\nnow 1\nnow 2\n\nadd\n----\nnow 3\n"


def test_script_that_is_right_is_left_as_it_is() -> None:
    assert run(SCRIPT, Counting()) == SCRIPT


def test_script_that_is_wrong_is_shown_as_a_diff() -> None:
    wrong = SCRIPT.replace("now 2", "now 7")
    differs = difference(Path("counting.txt"), wrong, run(wrong, Counting()))
    assert "\n-now 7\n+now 2\n" in differs


def test_script_is_completed() -> None:
    assert run("# Why.\nadd\nadd\n----\n\nadd\n----", Counting()) == SCRIPT


def test_last_words_of_a_script_are_kept() -> None:
    assert run(f"{SCRIPT}\n# The end.\n", Counting()) == f"{SCRIPT}\n# The end.\n"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("add\n\nadd\n", "line 1: commands must have a rule"),
        ("# nothing\n----\n", "line 2: a rule must stand below commands"),
    ],
)
def test_script_that_cannot_be_read_is_refused(text: str, error: str) -> None:
    with pytest.raises(ScriptError, match=error):
        parse(text)


def test_unknown_command_names_its_line() -> None:
    with pytest.raises(ScriptError, match="line 2: there is no command 'sub'"):
        run("add\nsub\n----\n", Counting())
