"""Tracebacks without the library's own frames, and without those of packages that it calls: users read their own.

`TRIMESH_TRACEBACK=full` keeps all frames. So does an error that looks like a bug of ours: one that no `raise` statement
of ours, and not Trio, has raised below the last frame of the user.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from types import TracebackType
from typing import Final, ParamSpec, TypeVar

from trimesh import config
from trimesh._wire.pickled.exception_parts import chain_of, group_members
from trimesh.errors import SHORTENED, ConfigError, RemoteTraceback, TrimeshInternalError, add_note, entries_of, notes_on

_E = TypeVar("_E", bound=BaseException)
P = ParamSpec("P")
T = TypeVar("T")

OURS: Final = "trimesh"
BELOW: Final = frozenset(("attr", "cloudpickle", "msgspec", "outcome", "torch", "trio")) | sys.stdlib_module_names
"""Packages whose frames are hidden where the library has called them, and shown where the program has."""

_RAISES: Final = frozenset(("outcome", "torch", "trio"))
"""Packages that raise by intent what passes through us: a cancel, the error of a task, shapes that do not fit."""

_RAISE: Final = dis.opmap["RAISE_VARARGS"]
_CHAIN_MAX: Final = 1000
"""Exceptions whose tracebacks are shortened; the rest of a larger tree keeps its frames."""


def without_own_frames(error: _E) -> _E:
    """Remove the library's frames from the tracebacks of an exception, its members and its chain; return it."""
    if keeps_all():
        return error
    pending: list[BaseException] = [error]
    seen: set[int] = set()
    while pending and len(seen) < _CHAIN_MAX:
        one = pending.pop()
        if id(one) in seen or isinstance(one, RemoteTraceback):
            continue
        seen.add(id(one))
        if one.__traceback__ is not None:
            shown = shown_traceback(one)
            if shown is one.__traceback__:
                _note_bug(one)
            else:
                entries_of(one)[SHORTENED] = True  # the frame that has raised it may be gone
                BaseException.with_traceback(one, shown)  # also where a class refuses attributes
        cause, context, _ = chain_of(one)
        pending += [link for link in (cause, context, *(group_members(one) or ())) if link is not None]
    return error


def _note_bug(error: BaseException) -> None:
    if _BUG_NOTE not in notes_on(error):
        add_note(error, _BUG_NOTE)


_BUG_NOTE: Final = "This was raised inside of trimesh. If your program is right, please report it, with what is above."


def shortens_tracebacks(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that users call outside of blocks, which shorten tracebacks where they are left."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            without_own_frames(error)
            raise

    return run


def shown_traceback(error: BaseException) -> TracebackType | None:
    """Return the traceback of an exception without the frames that say nothing to the user."""
    frames = _walk(error.__traceback__)
    if keeps_all() or (SHORTENED not in entries_of(error) and _is_bug(error, frames)):
        return error.__traceback__
    kept = shown_frames(frames, _package)
    if isinstance(error, KeyboardInterrupt):  # which Trio raises wherever a task waits
        while kept and _package(kept[-1]) in _RAISES:
            kept.pop()
    shown: TracebackType | None = None
    for frame in reversed(kept):
        shown = TracebackType(shown, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return shown


def raised_at(error: BaseException) -> str:
    """Return the line of the program that has raised an error here: `File "train.py", line 12 in step`; or ""."""
    frame = program_frame(_walk(error.__traceback__)[::-1], _package)
    if frame is None:
        return ""
    code = frame.tb_frame.f_code
    return f'File "{code.co_filename}", line {frame.tb_lineno} in {code.co_name}'


def has_user_frame(error: BaseException) -> bool:
    """Return whether an exception has passed through code of the user so far."""
    return any(_package(frame) != OURS and _package(frame) not in BELOW for frame in _walk(error.__traceback__))


def keeps_all() -> bool:
    """Return whether the setting `traceback` keeps the frames of the library."""
    try:
        return config.current().traceback == "full"
    except ConfigError:  # raised where a setting is used, not while another error is shown
        return False


def _walk(traceback: TracebackType | None) -> list[TracebackType]:
    frames: list[TracebackType] = []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    return frames


def _package(frame: TracebackType) -> str:
    return package_of(frame.tb_frame.f_globals.get("__name__", ""))


def _is_bug(error: BaseException, frames: list[TracebackType]) -> bool:
    """Tell whether the error was raised below our code by something that was not meant to raise."""
    if not frames or isinstance(error, TrimeshInternalError):
        return bool(frames)
    if not isinstance(error, Exception) or isinstance(error, ImportError):
        return False  # a cancel, or Ctrl-C, comes wherever a task waits; what is not installed is no bug
    last = frames[-1]
    package = _package(last)
    if package == OURS:
        return isinstance(error, AssertionError) or last.tb_frame.f_code.co_code[last.tb_lasti] != _RAISE
    if package not in BELOW or package in _RAISES:
        return False
    callers = (_package(frame) for frame in reversed(frames))
    return next((package == OURS for package in callers if package not in BELOW), False)


# ---- the rule, for frames of any kind --------------------------------------------------------------------------------


def package_of(module: object) -> str:
    """Return the package of a module's name, as the globals of a frame have it."""
    return str(module).partition(".")[0]


def shown_frames(frames: Iterable[T], package: Callable[[T], str], *, is_inside: bool = False) -> list[T]:
    """Return frames without the library's, and without those of packages that it has called.

    Args:
        frames: Outermost first.
        package: Returns the package of one.
        is_inside: Whether the library is what has called the first one.
    """
    kept: list[T] = []
    for frame in frames:
        owner = package(frame)
        if owner == OURS:
            is_inside = True
        elif not is_inside or owner not in BELOW:
            kept.append(frame)
            is_inside = False
    return kept


def program_frame(frames: Sequence[T], package: Callable[[T], str]) -> T | None:
    """Return the innermost frame of a program, or else of a package that it has called; None without one.

    Args:
        frames: Innermost first.
        package: Returns the package of one.
    """
    kept = shown_frames(reversed(frames), package, is_inside=True)
    of_program = (frame for frame in reversed(kept) if package(frame) not in BELOW)
    return next(of_program, kept[-1] if kept else None)
