"""The programs of the tutorial print what it says. `make tutorial` follows it literally, its set-up included."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.program_template import Run
from tests.spawner_template import IS_POSSIBLE
from tests.told_losses import losses_told
from website.tutorial import Command, File, differences, pages, steps

COMMAND_SECONDS = 100.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the reader, with all files of the tutorial."""
    made = tmp_path_factory.mktemp("words")
    for step in (step for page in pages() for step in steps(page)):
        if isinstance(step, File):
            (made / step.name).write_text(step.text)
    return made


def programs(with_torch: bool) -> list[Command]:
    """Return the commands that run a program of the tutorial."""
    found = [step for page in pages() for step in steps(page) if isinstance(step, Command)]
    named = [step for step in found if step.line.startswith("python ") and step.line.endswith(".py")]
    return [step for step in named if "-m" not in step.line and (step.line == "python sums.py") == with_torch]


def check(run: Run, command: Command, folder: Path) -> None:
    """Run a program and compare what it prints."""
    name = command.line.removeprefix("python ")
    losses = folder / f"{name}.losses"
    done = run(folder / name, cwd=folder, seconds=COMMAND_SECONDS, losses=losses)
    said = differences(command, done.stdout, done.stderr)
    if said:
        pytest.fail(f"{said}\n{losses_told(losses)}", pytrace=False)


@pytest.mark.real
@pytest.mark.parametrize("command", programs(with_torch=False), ids=lambda command: command.line)
def test_program_prints_what_the_tutorial_says(command: Command, run_program: Run, folder: Path) -> None:
    check(run_program, command, folder)


@pytest.mark.real
@pytest.mark.skipif(not IS_POSSIBLE, reason="losses of programs that are executed are not told")
def test_output_that_differs_is_told_with_the_hosts_that_were_lost(run_program: Run, folder: Path) -> None:
    (folder / "loses.py").write_text("from trimesh import HostLost\nHostLost('gone', host='n1', reason='lease')\n")

    with pytest.raises(pytest.fail.Exception) as failure:
        check(run_program, Command("python loses.py", ("nothing",)), folder)

    assert ".host='n1' .point=None .reason='lease' gone" in str(failure.value)


@pytest.mark.real
@pytest.mark.torch
@pytest.mark.parametrize("command", programs(with_torch=True), ids=lambda command: command.line)
def test_program_with_torch_prints_what_the_tutorial_says(command: Command, run_program: Run, folder: Path) -> None:
    check(run_program, command, folder)


@pytest.mark.real
def test_suite_of_the_tutorial_passes(folder: Path) -> None:
    """With one seed."""
    options = ["-q", "-p", "no:cacheprovider", "-p", "trimesh.testing.plugin", "-c", "/dev/null", "--mesh-seeds", "1"]
    command = [sys.executable, "-m", "pytest", *options, "--rootdir", str(folder), "test_wordcount.py"]

    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)

    assert "3 passed" in done.stdout, done.stdout


def test_every_page_of_the_tutorial_is_followed() -> None:
    shown = set(pages())

    assert shown == {path.name for path in Path("docs/tutorial").absolute().glob("*.md")}
    assert len(programs(with_torch=False)) >= 8


@pytest.mark.parametrize(
    ("printed", "stdout", "stderr", "is_same"),
    [
        (("a", "b"), "a\nb\n", "", True),
        (("a", "b"), "b\na\n", "", False),
        (("a",), "a\nb\n", "", False),
        (("a", "b"), "a\n", "", False),
        (("a", "..."), "a\nb\nc\n", "", True),
        (("pid ...",), "pid 42\n", "", True),
        (("x",), "", "x\n", True),
        (("p[gpus=1] | b", "a", "p[gpus=0] | b"), "a\np[gpus=0] | b\np[gpus=1] | b\n", "", True),
        (("p[gpus=1] | b", "a"), "a\n", "", False),
    ],
)
def test_differences(printed: tuple[str, ...], stdout: str, stderr: str, is_same: bool) -> None:
    said = differences(Command("python a.py", printed), stdout, stderr)

    assert (said == "") == is_same
