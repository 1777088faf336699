r"""Scenario scripts: a text of commands, and under each block of them what a state machine answers.

    # why
    command word key=value
    another command
    ----
    what came of the block, one line each

A line of `#` is a comment, an empty line ends a block. What a machine answers is written by `render`, never by hand:
`pytest tests/scenarios --rewrite-scenarios` (`make scenarios`) writes the files anew, and the diff is what is reviewed.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import attrs

from trimesh.errors import TrimeshError

RULE = "----"


@attrs.frozen
class Command:
    """One line.

    Attributes:
        line: Its number in the file, from 1.
        verb: What to do.
        words: What follows it.
        options: The `key=value` among that.
        text: All of it, as it stands there.
    """

    line: int
    verb: str
    words: Sequence[str]
    options: dict[str, str]
    text: str

    @property
    def numbers(self) -> list[int]:
        """The words, as numbers."""
        return [int(word) for word in self.words]


@attrs.frozen
class Block:
    """Commands, and what is expected of them.

    Attributes:
        head: The lines before the rule: comments and commands.
        commands: The commands.
        expected: The lines below the rule.
    """

    head: Sequence[str]
    commands: Sequence[Command]
    expected: Sequence[str]


@attrs.frozen
class Script:
    """A file.

    Attributes:
        blocks: In order.
        tail: Comments below the last one.
    """

    blocks: Sequence[Block]
    tail: Sequence[str]


class ScriptError(Exception):
    """A script cannot be read, or has a command that its scene does not know."""


def parse_command(number: int, line: str) -> Command:
    """Read one command."""
    verb, _, text = line.strip().partition(" ")
    pairs = [word.partition("=") for word in text.split()]
    words = [key for key, equals, _ in pairs if not equals]
    return Command(number, verb, words, {key: value for key, equals, value in pairs if equals}, text.strip())


def parse(text: str) -> Script:
    """Read a script.

    Raises:
        ScriptError: It has a rule without commands, or commands without a rule.
    """
    blocks: list[Block] = []
    head: list[str] = []
    commands: list[Command] = []
    expected: list[str] | None = None
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if expected is not None and line:
            expected.append(line)
        elif expected is not None:
            blocks.append(Block(head, commands, expected))
            head, commands, expected = [], [], None
        elif line == RULE:
            if not commands:
                raise ScriptError(f"line {number}: a rule must stand below commands")
            expected = []
        else:
            head.append(line)
            if line and not line.startswith("#"):
                commands.append(parse_command(number, line))
    if commands:
        raise ScriptError(f"line {commands[0].line}: commands must have a rule ({RULE}) below them")
    return Script(blocks, head[:-1])


class Scene:
    """What commands act on; each public method is a command, `_` in its name stands for `-`.

    A method takes the `Command` and returns the lines that come of it, or an awaitable of them.
    """

    def surroundings(self) -> AbstractAsyncContextManager[Any] | None:
        """Return what the whole script runs within, if anything."""
        return None

    async def run(self, command: Command) -> list[str]:
        """Carry a command out; an error of the product is an answer like any other."""
        method = getattr(self, command.verb.replace("-", "_"), None)
        if method is None or command.verb.startswith("_") or hasattr(Scene, command.verb):
            raise ScriptError(f"line {command.line}: there is no command {command.verb!r}")
        try:
            found = method(command)
            if inspect.isawaitable(found):
                found = await found
            lines: Iterable[str] = [found] if isinstance(found, str) else list(found or ())
        except TrimeshError as error:
            lines = [f"{type(error).__name__}: {error}"]
        except Exception as error:
            error.add_note(f"in line {command.line}: {command.verb} {command.text}")
            raise
        return list(lines)


async def render(text: str, scene: Scene) -> str:
    """Run a script; return it with what has really come of it."""
    surroundings = scene.surroundings()
    if surroundings is None:
        return await _render(text, scene)
    async with surroundings:
        return await _render(text, scene)


async def _render(text: str, scene: Scene) -> str:
    parts: list[str] = []
    script = parse(text)
    for block in script.blocks:
        lines = [line for command in block.commands for line in await scene.run(command)]
        parts.append("\n".join([*block.head, RULE, *(lines or ["ok"])]))
    if script.tail:
        parts.append("\n".join(script.tail))
    return "\n\n".join(parts) + "\n"


def difference(path: Path, expected: str, found: str) -> str:
    """Return how what has come differs from what the file says; empty when it does not."""
    lines = difflib.unified_diff(
        expected.splitlines(), found.splitlines(), f"{path.name} (as written)", f"{path.name} (as it is)", lineterm=""
    )
    return "\n".join(lines)
