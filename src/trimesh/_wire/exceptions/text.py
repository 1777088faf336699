"""Texts about exceptions: names, messages, shortened reprs and the traceback that travels.

None of these functions raises, whatever `__str__` and `__repr__` of the user's classes do, and every text can be
encoded as UTF-8.
"""

from __future__ import annotations

import linecache
import re
import reprlib
import traceback
from typing import Any, Final

from trimesh import limits
from trimesh._wire.exceptions.frames import shown_traceback
from trimesh._wire.pickled.exception_parts import chain_of, plain_text
from trimesh.errors import TRACEBACK_HEAD, RemoteTraceback, entries_of, traceback_frames

_CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
_CONTEXT = "\nDuring handling of the above exception, another exception occurred:\n\n"

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 200
_short.maxlevel = 3


def is_plain(text: object) -> bool:
    """Return whether this is a string that has a UTF-8 form."""
    return isinstance(text, str) and plain_text(text) == text


def notes_of(error: BaseException) -> list[str]:
    """Return the notes of an exception; one that is no string as its repr."""
    notes: Any = entries_of(error).get("__notes__")
    if not issubclass(type(notes), list):
        return []
    return [plain_text(note) if isinstance(note, str) else short_repr(note) for note in notes]


def short_repr(value: object) -> str:
    """Return a repr of some hundred characters at most."""
    try:
        return plain_text(_short.repr(value))
    except Exception:  # noqa: BLE001 - a class of the user's
        return f"<{type_name(type(value))} whose repr failed>"


def type_name(cls: type) -> str:
    """Return the qualified name of a class; builtins have no module."""
    try:
        module, name = str(cls.__module__), str(cls.__qualname__)
    except Exception:  # noqa: BLE001 - a metaclass of the user's
        return "<unnamed class>"
    return plain_text(name if module == "builtins" else f"{module}.{name}")


def message_of(error: BaseException) -> str:
    """Return `str(error)`, or what is known if that fails."""
    try:
        return plain_text(str(error))
    except Exception:  # noqa: BLE001 - a __str__ of the user's
        return f"<str of {type_name(type(error))} failed>"


def traceback_text(error: BaseException) -> str:
    """Return the traceback of an exception and its chain, without frames of this library.

    Remote tracebacks in the chain are left out, they travel by themselves; so are the members of a group.
    """
    text = ""
    seen: set[int] = set()
    link = error
    while True:
        seen.add(id(link))
        text = _one(link) + text
        cause, context, suppress = chain_of(link)
        following = cause if cause is not None else None if suppress else context
        if following is None or id(following) in seen or isinstance(following, RemoteTraceback):
            break
        if len(seen) >= limits.EXCEPTION_CHAIN_MAX:
            text = f"(more than {limits.EXCEPTION_CHAIN_MAX} exceptions: the first ones were left out)\n" + text
            break
        text = (_CONTEXT if cause is None else _CAUSE) + text
        link = following
    return plain_text(text).rstrip("\n")


def with_local_sources(text: str) -> str:
    """Return a traceback with the lines of code that were typed into this process: a cell of a notebook."""
    return _TYPED_FRAME.sub(lambda frame: _with_source(frame[0], frame["file"], int(frame["line"])), text)


def _with_source(frame: str, file: str, line: int) -> str:
    entry = linecache.cache.get(file)  # what was typed is in there; no file is read because a peer names it
    lines = entry[2] if entry is not None and len(entry) > 1 else []
    source = lines[line - 1].strip() if 0 < line <= len(lines) else ""
    return f"{frame}\n    {source}" if source else frame


_TYPED_FRAME: Final = re.compile(
    r'^  File "(?P<file><[^"]*>|[^"]*ipykernel[^"]*)", line (?P<line>\d+).*(?!\n    )$', re.MULTILINE
)


def joined_tracebacks(outer: str, inner: str) -> str | None:
    """Return the traceback of a process that has called another one, with that of the other below; None for a chain."""
    frames = traceback_frames(outer)
    if not frames or _CAUSE in outer or _CONTEXT in outer or not inner.startswith(TRACEBACK_HEAD):
        return None
    return "\n".join(frames) + inner.removeprefix(TRACEBACK_HEAD)


def _one(error: BaseException) -> str:
    lines: list[str] = []
    try:
        walked = traceback.walk_tb(shown_traceback(error))
        frames = traceback.StackSummary.extract(walked).format()  # without marks below the lines
    except Exception:  # noqa: BLE001 - source files that vanish or cannot be decoded
        frames = ["  (the frames cannot be shown)\n"]
    if frames:
        lines = ["Traceback (most recent call last):\n", *frames]
    if isinstance(error, SyntaxError):
        try:
            lines += traceback.TracebackException(type(error), error, None).format_exception_only()
        except Exception:  # noqa: BLE001 - details of a strange kind
            lines.append(f"{type_name(type(error))}: {message_of(error)}\n")
        return "".join(lines)
    message = message_of(error)
    lines.append(f"{type_name(type(error))}: {message}\n" if message else f"{type_name(type(error))}\n")
    return "".join(lines + [f"{note}\n" for note in notes_of(error)])
