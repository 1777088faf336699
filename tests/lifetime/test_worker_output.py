"""Where the output of workers goes (O7)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.lifetime.program import Program
from tests.patience import HANG_SECONDS

pytestmark = pytest.mark.real


def run(program: Program) -> None:
    """Hold and leave a mesh."""
    program.say("open")
    program.event("open")
    program.say("leave")
    program.event("left all")
    program.say("end")
    assert program.wait() == 0


WRITE = ["write", "to out\nin two lines\n", "to err\n"]


@pytest.mark.daily
def test_output_is_forwarded_with_coordinates(tmp_path: Path) -> None:
    """O7: line by line, stream by stream, by default."""
    with Program(tmp_path, "hold", {"before": [WRITE]}) as program:
        run(program)
        out, err = program.stdout, program.stderr

    for rank in range(2):
        lines = [line for line in out.splitlines() if line.startswith(f"procs[n={rank}] | ")]
        assert lines == [f"procs[n={rank}] | to out", f"procs[n={rank}] | in two lines"]
        assert f"procs[n={rank}] | to err\n" in err
    assert len(out.splitlines()) == 4
    assert len(err.splitlines()) == 2


def test_output_may_be_inherited_or_discarded(tmp_path: Path) -> None:
    """O7: `inherit` shows it as it is, `discard` nothing."""
    with Program(tmp_path, "hold", {"size": 1, "before": [WRITE], "options": {"output": "inherit"}}) as program:
        run(program)
        assert (program.stdout, program.stderr) == ("to out\nin two lines\n", "to err\n")
    with Program(tmp_path, "hold", {"size": 1, "before": [WRITE], "options": {"output": "discard"}}) as program:
        run(program)
        assert (program.stdout, program.stderr) == ("", "")


@pytest.mark.parametrize("output", ["forward", "discard"])
def test_last_words_are_in_the_error(output: str, tmp_path: Path) -> None:
    """O7: also of what nobody was shown."""
    plan: dict[str, Any] = {"size": 1, "during": [["leave", 1, "good bye\n"]], "options": {"output": output}}
    plan["limits"] = {"EXIT_REPORT_SECONDS": HANG_SECONDS}  # a busy spawner may say it later than a program waits
    with Program(tmp_path, "hold", plan) as program:
        program.say("open")
        [leaf] = program.event("raised")["error"]["leaves"]
        assert leaf["stderr_tail"] == "good bye\n"
        assert leaf["text"].endswith("last output: good bye")
        assert ("good bye" in program.stderr) == (output == "forward")


def test_output_of_clean_up_is_shown_before_the_program_goes_on(tmp_path: Path) -> None:
    """O7: what was written last is there when the outermost block has been left."""
    with Program(tmp_path, "hold", {"size": 4, "actor": "Wordy"}) as program:
        program.say("open")
        program.event("open")
        program.say("leave")
        program.event("left all")
        lines = program.stdout.splitlines()

    assert sorted(lines) == sorted(f"procs[n={rank}] | line {number}" for rank in range(4) for number in range(500))


def test_output_nobody_reads_never_holds_a_worker(tmp_path: Path) -> None:
    """O7: a stopped program reads nothing; its workers go on writing, and end."""
    with Program(tmp_path, "hold", {"during": [["flood", 64 << 20]]}) as program:
        program.say("open")
        program.event("open")
        program.events("running", 2)
        program.stop_for(lambda: program.events("flooded", 2))
        program.say("leave")
        program.event("left all")
        assert "lines lost" in program.stdout
