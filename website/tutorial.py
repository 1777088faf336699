"""The tutorial as what a reader does: files to write, commands to run, what they are to print.

`python -m website.tutorial` follows it literally, in a home folder of its own, and stops where a command prints
something else. `tests/test_tutorial.py` runs its programs in the environment of the tests.
"""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "tutorial"

BLOCK = re.compile(r'^```(python title="(?P<name>[^"]+)"|console)\n(?P<text>.*?)^```$', re.MULTILINE | re.DOTALL)
PROMPT = "$ "
ANYTHING = "..."
FORWARDED = re.compile(r"\w+\[.*\] \| ")
"""A line that another process has printed; it may come in any place."""


@dataclass(frozen=True)
class File:
    """A listing that the reader saves."""

    name: str
    text: str


@dataclass(frozen=True)
class Command:
    """A command, and the lines that it is to print."""

    line: str
    printed: tuple[str, ...]


def pages() -> list[str]:
    """Return the pages in the order in which the first one links them."""
    index = (FOLDER / "index.md").read_text()
    return ["index.md", *re.findall(r"^\d+\. \[[^\]]+\]\(([\w-]+\.md)\)", index, re.MULTILINE)]


def steps(page: str) -> Iterator[File | Command]:
    """Yield what the reader of a page does, in order."""
    for block in BLOCK.finditer((FOLDER / page).read_text()):
        if block["name"]:
            yield File(block["name"], block["text"])
            continue
        for part in re.split(r"^\$ ", block["text"], flags=re.MULTILINE)[1:]:
            line, *printed = part.splitlines()
            yield Command(line, tuple(printed))


def differences(command: Command, stdout: str, stderr: str) -> str:
    """Return how what a command has printed differs from what it is to print, or an empty text.

    The lines of each of the two streams come in their order; those of the two streams, and those of other processes,
    mix freely. `...` stands for any text in a line, and for any lines where it stands alone.
    """
    has_gaps = ANYTHING in command.printed
    wanted = [line for line in command.printed if line != ANYTHING]
    streams = [stdout.splitlines(), stderr.splitlines()]
    forwarded = [line for stream in streams for line in stream if FORWARDED.match(line)]
    rest = [[line for line in stream if not FORWARDED.match(line)] for stream in streams]
    missing = []
    for line in wanted:
        pattern = re.compile(".*".join(re.escape(part) for part in line.split(ANYTHING)))
        for stream in [forwarded] if FORWARDED.match(line) else rest:
            found = next((index for index, told in enumerate(stream) if pattern.fullmatch(told)), None)
            if found is not None and (has_gaps or found == 0 or stream is forwarded):
                del stream[found if stream is forwarded else 0 : found + 1]
                break
        else:
            missing.append(line)
    if not missing and (has_gaps or not any([forwarded, *rest])):
        return ""
    told = [*stdout.splitlines(), *stderr.splitlines()]
    return "\n".join(difflib.unified_diff(command.printed, told, "the tutorial", command.line, lineterm=""))


# ---- followed literally ----------------------------------------------------------------------------------------------

MARK = "--- end of the command, status"


class Shell:
    """A shell that runs one command after the other, as a reader's does."""

    def __init__(self, home: Path) -> None:
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL"))}
        self._process = subprocess.Popen(
            ["/bin/bash"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            cwd=ROOT,
            env={**environment, "HOME": str(home)},
        )

    def run(self, line: str) -> tuple[str, str]:
        """Return what a command prints on its two streams."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stderr.seek(0)
        self._stderr.truncate()
        self._process.stdin.write(f"{line} </dev/null\necho '{MARK}' $?\n")
        self._process.stdin.flush()
        told = ""
        for text in self._process.stdout:
            if text.startswith(MARK):
                break
            told += text
        self._stderr.seek(0)
        return told, self._stderr.read().decode()

    def close(self) -> None:
        """End the shell."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._stderr.close()


def follow(shell: Shell, words: Path) -> None:
    """Do what the tutorial says, and end the program where something else comes of it."""
    for page in pages():
        print(f"== {page}")
        for step in steps(page):
            if isinstance(step, File):
                (words / step.name).write_text(step.text)
                continue
            print(f"$ {step.line}", flush=True)
            said = differences(step, *shell.run(step.line))
            if said:
                sys.exit(f"{page}: another output\n{said}")
    print("The tutorial does what it says.")


def main() -> None:
    """Follow the tutorial in a new home folder."""
    with tempfile.TemporaryDirectory() as home:
        shell = Shell(Path(home))
        try:
            follow(shell, Path(home) / "words")
        finally:
            shell.close()


if __name__ == "__main__":
    main()
