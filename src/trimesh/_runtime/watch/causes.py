"""What is behind an error, as texts: the errors of a group, causes of causes, and where a remote one was raised."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import Final

from trimesh import limits
from trimesh.errors import RemoteTraceback

_RAISED: Final = re.compile(r"^(?:\w+\.)*\w+(?:: .*)?$")
_PLACE: Final = re.compile(r'^\s+(File ".*", line \d+, in .*)$')
_TEXT_LINES_MAX: Final = 2_000


def causes_of(error: BaseException) -> tuple[str, ...]:
    """Return the errors behind one, each after what it has caused, at most `limits.OBSERVED_CAUSES`."""
    return tuple(text[: limits.OBSERVED_TEXT_CHARS] for text in islice(_behind(error), limits.OBSERVED_CAUSES))


def _behind(error: BaseException) -> Iterator[str]:
    seen = {id(error)}
    todo = _next(error)
    while todo:
        one = todo.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, RemoteTraceback):
            yield from _of_traceback(one.text)
        else:
            yield f"{type(one).__name__}: {one}"
        todo = [*_next(one), *todo]


def _next(error: BaseException) -> list[BaseException]:
    """Return what an error is made of, then what it was raised from."""
    found: list[BaseException] = list(error.exceptions) if isinstance(error, BaseExceptionGroup) else []  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    behind = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return found if behind is None else [*found, behind]


def _of_traceback(text: str) -> Iterator[str]:
    """Yield where the error of a traceback was raised, and the errors before it there, newest first."""
    lines = text.splitlines()[-_TEXT_LINES_MAX:]
    place, found = "", list[tuple[str, str]]()
    for line in lines:
        if match := _PLACE.match(line):
            place = match[1]
        elif _RAISED.match(line) and place:
            found.append((line, place))
            place = ""
    for number, (line, at) in enumerate(reversed(found)):
        yield f"at {at}" if number == 0 else f"{line}, at {at}"
