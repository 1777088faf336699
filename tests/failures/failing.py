"""Failing programs, run as a user runs them, and what they print: masked, measured and compared.

`programs/KIND/NAME.py` is a program of a user. Its docstring says what fails, and which words of the error must be read
at once (`Words: ...`). A program that prints "ready" gets a Ctrl-C then. `printed/KIND/NAME.txt` is what it prints.
`python -m tests.failures.failing` prints a table of all; with `--write` it also writes the texts anew.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import attrs
from tests.program_template import Run

HERE: Final = Path(__file__).parent
PROGRAMS: Final = HERE / "programs"
PRINTED: Final = HERE / "printed"

LINES_MAX: Final = {
    "one": 30,
    "many": 40,
    "nest": 35,
    "death": 25,
    "mistake": 20,
    "interrupt": 15,
    "notebook": 30,
    "pytest": 40,  # with its summary, and the seed
    "interrupt_asyncio": 25,  # asyncio.run() reports the cancel of its task, too: 20 lines of a program without meshes
}
"""Lines that a program of a kind may print, without the marks that newer Pythons put below lines of code."""

OWN_FRAMES_MAX: Final = 2
LAST_LINES: Final = 5
"""The words of the error are in so many lines at the end, or in the first line of a group."""

SECONDS: Final = 60.0
"""Until a program that does not end is killed: many times what the slowest takes."""

REACTION_SECONDS: Final = 0.5
"""Between "ready" and Ctrl-C: the program goes on to its next line, as before a person presses a key."""

_MARKS: Final = re.compile(r"[ |+]*[~^]+[~^ ]*")
_BUSY: Final = re.compile(r"^the block of .* has been stopping .*\n(  [^+|].*\n)*", re.MULTILINE)
"""What is logged on a busy machine alone: the end of 64 processes may take seconds there."""

_FRAME: Final = re.compile(r'File "(?P<path>[^"]+)", line (?P<line>\d+)')
_OWN: Final = str(Path(__file__).parents[2] / "src" / "trimesh")


@attrs.frozen
class Failure:
    """What a failing program has printed.

    Attributes:
        program: Its file.
        status: Its exit status.
        text: Its standard error, masked: paths, numbers of processes, lines of code that is not the program's.
        lines: Lines of it.
        own_frames: Frames of this library among them.
    """

    program: Path
    status: int
    text: str
    lines: int
    own_frames: int

    @property
    def name(self) -> str:
        """Its kind and name."""
        return f"{self.program.parent.name}/{self.program.stem}"

    @property
    def words(self) -> str:
        """Words of the error, by which its author knows what is wrong."""
        found = re.search(r"^Words: (.*)$", self.program.read_text(), re.MULTILINE)
        assert found is not None, f"{self.program} must say which words it prints"
        return found[1]

    @property
    def has_words_last(self) -> bool:
        """Whether the words are in the last lines."""
        return self.words in " ".join(self.text.splitlines()[-LAST_LINES:])

    @property
    def complaints(self) -> list[str]:
        """What is wrong with it."""
        found: list[str] = []
        if self.lines > (bound := LINES_MAX[self.program.parent.name]):
            found.append(f"{self.lines} lines, at most {bound}")
        if self.own_frames > OWN_FRAMES_MAX:
            found.append(f"{self.own_frames} frames of this library, at most {OWN_FRAMES_MAX}")
        if self.words not in self.text:
            found.append(f"{self.words!r} is hidden")
        elif not self.has_words_last:
            found.append(f"{self.words!r} is not in the last {LAST_LINES} lines")
        return found


def programs() -> list[Path]:
    """Return all failing programs."""
    return sorted(PROGRAMS.glob("*/*.py"))


def run_copy(program: Path, run_program: Run) -> Failure:
    """Run a program in a copy of an interpreter, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copy(program, folder))
        done = run_program(copy, cwd=copy.parent, seconds=SECONDS)
    return failure_of(program, done.returncode, done.stderr, copy)


def run(program: Path, python: str = sys.executable) -> Failure:
    """Run a program as a user does, in a folder of its own."""
    unset = ("PYTHONUNBUFFERED", "COVERAGE_PROCESS_START")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"NO_COLOR": "1", "COLUMNS": "120", "PYTHONHASHSEED": "0"}
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copy(program, folder)
        process = subprocess.Popen(
            [python, copy],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        try:
            if '"ready"' in program.read_text():
                assert process.stdout.readline() == "ready\n"
                time.sleep(REACTION_SECONDS)
                process.send_signal(signal.SIGINT)
            _, text = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
            process.communicate()
    return failure_of(program, process.returncode, text, Path(copy))


def failure_of(program: Path, status: int, text: str, copy: Path) -> Failure:
    """Return what a program has printed, masked."""
    own = sum(frame["path"].startswith(_OWN) for frame in _FRAME.finditer(text))
    shown = masked(text, program, copy)
    return Failure(program, status, shown, len(shown.splitlines()), own)


def masked(text: str, program: Path, copy: Path) -> str:
    """Return a text without what differs from run to run, and the marks below lines of code."""
    kept = [line.rstrip() for line in text.splitlines() if not _MARKS.fullmatch(line)]
    text = "\n".join(kept) + "\n"
    text = text.replace(f"{copy.parent}/{copy.name}:", f"{copy.name}:")
    text = _FRAME.sub(lambda frame: _frame(frame["path"], frame["line"], copy), text)
    text = _BUSY.sub("", text)
    if program.parent.name == "many":  # some ranks may be cancelled before they fail
        text = re.sub(r"\d+ of 64", "N of 64", text)
        text = re.sub(r"( and \d+ more)?\)$", ")", text, flags=re.MULTILINE)
        text = re.sub(r"^.*the same at .*\n", "", text, flags=re.MULTILINE)
        text = re.sub(r"\[gpus=\d+\]", "[gpus=N]", text)
    text = re.sub(r"\bpid \d+", "pid N", text)
    text = re.sub(r"\bfor \d+\.\d s(?=$|\. )", "for N s", text, flags=re.MULTILINE)
    text = re.sub(r"\bon [\w.-]+(?=$|\)|, )", "on HOST", text, flags=re.MULTILINE)
    text = re.sub(r"\bafter [\d.]+ s\b", "after N s", text)
    text = re.sub(r"\bin [\d.]+s$", "in Ns", text, flags=re.MULTILINE)
    text = re.sub(r"^trace hash: .*", "trace hash: N", text, flags=re.MULTILINE)
    return re.sub(r"0x[0-9a-f]{6,}", "0xN", text)


def _frame(path: str, line: str, program: Path) -> str:
    if path == str(program):
        return f'File "{program.name}", line {line}'
    parts = Path(path).parts
    shown = next((parts[at + 1 :] for at in reversed(range(len(parts))) if parts[at] in _ROOTS), parts[-1:])
    return f'File "{"/".join(shown)}", line N'


_ROOTS: Final = frozenset(("site-packages", "src", "lib"))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--write", action="store_true", help="write what is printed to the files that tests compare")
    parser.add_argument("--show", action="store_true", help="print the texts, too")
    parser.add_argument("names", nargs="*", help="KIND/NAME; all without")
    options = parser.parse_args()
    print("| program | lines | frames of trimesh | words at the end | |\n|---|---|---|---|---|")
    for program in programs():
        if options.names and f"{program.parent.name}/{program.stem}" not in options.names:
            continue
        failure = run(program)
        place = "yes" if failure.has_words_last else "no"
        complaints = "; ".join(failure.complaints)
        print(f"| {failure.name} | {failure.lines} | {failure.own_frames} | {place} | {complaints} |", flush=True)
        if options.show:
            print(failure.text)
        if options.write:
            file = PRINTED / failure.program.parent.name / f"{failure.program.stem}.txt"
            file.parent.mkdir(exist_ok=True)
            file.write_text(failure.text)


if __name__ == "__main__":
    main()
