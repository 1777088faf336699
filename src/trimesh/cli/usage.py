"""Errors of the command line in words of ours: the rule, what came, what to write instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from cyclopts import CoercionError, CycloptsError, MissingArgumentError, UnknownCommandError, UnknownOptionError
from cyclopts.exceptions import UnusedCliTokensError

from trimesh.cli.members import nearest
from trimesh.cli.text import one_line

_KINDS: Final = {"int": "a whole number", "float": "a number"}


def usage_error(error: CycloptsError, arguments: Sequence[str]) -> str:
    """Return the text of an error in the arguments of a command, with the nearest right name and the help to read.

    Args:
        error: The error.
        arguments: The arguments.
    """
    command = " ".join(["trimesh", *(error.command_chain or ())])
    return f"{one_line(_rule(error, command, arguments), 400)}\nsee: {one_line(command)} --help"


def _rule(error: CycloptsError, command: str, arguments: Sequence[str]) -> str:
    match error:
        case UnknownCommandError():
            names = [] if error.app is None else [name for name in error.app if not name.startswith("-")]
            word = (error.unused_tokens or [*arguments, ""])[0]
            return f"{command} has no command {word!r}{nearest(word, names)}"
        case UnknownOptionError():
            option = error.token.keyword or error.token.value
            names = [name for one in error.argument_collection for name in one.names if name.startswith("-")]
            return f"{command} has no option {option}{nearest(option, names)}"
        case CoercionError() if error.token is not None:
            what = error.token.keyword or _named(error)
            kind = _KINDS.get(getattr(error.target_type, "__name__", ""), "another value")
            return f"{what} takes {kind}, got {error.token.value!r}"
        case MissingArgumentError() if error.argument is not None:
            name = error.keyword or _named(error)
            return f"{name} needs a value" if name.startswith("-") and error.keyword else f"{command} needs {name}"
        case UnusedCliTokensError():
            words = error.unused_tokens or []
            return f"{command} takes fewer arguments, got {' '.join(words)!r} too many"
        case _:
            return str(error)


def _named(error: CycloptsError) -> str:
    name = "" if error.argument is None else error.argument.name
    return name if name.startswith("--") else name.lstrip("-").upper()
