"""Shortened tracebacks: without frames of the library and of packages that it calls, so that users read their own.

`TRIMESH_TRACEBACK=full` keeps all frames. So does an error that looks like a bug of trimesh: one raised below the last
user frame neither by a `raise` statement of trimesh nor by Trio.

The same for stacks that `faulthandler` writes at a crash or a stall.

Fatal Python error: Segmentation fault

Current thread 0x00007f... (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "train.py", line 17 in step
  File ".../trimesh/_runtime/actors/serve.py", line 241 in _first_step       left out, and so is all below it
  ...
Extension modules: msgspec._core, _cffi_backend (total: 2)                   left out
"""

from __future__ import annotations

import dis
import linecache
import re
import reprlib
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from types import TracebackType
from typing import Any, Final, ParamSpec, TypeVar

from trimesh import config, limits
from trimesh._wire.pickled.exception_values import chain_of, group_members, plain_text
from trimesh.errors import (
    SHORTENED,
    TRACEBACK_HEAD,
    ConfigError,
    RemoteTraceback,
    TrimeshInternalError,
    add_note,
    entries_of,
    notes_on,
    traceback_frames,
)

_E = TypeVar("_E", bound=BaseException)
P = ParamSpec("P")
T = TypeVar("T")

OURS: Final = "trimesh"
BELOW: Final = frozenset(("attr", "cloudpickle", "msgspec", "outcome", "torch", "trio")) | sys.stdlib_module_names
"""Packages whose frames are hidden where the library has called them, and shown where the program has."""

_RAISES: Final = frozenset(("outcome", "torch", "trio"))
"""Packages whose exceptions pass through the library on purpose: cancels, errors of tasks, shapes that do not fit."""

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


_BUG_NOTE: Final = "This was raised inside of trimesh. If your program is correct, please report it with the traceback."


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
    """Return the traceback of an exception without the frames that do not help the user."""
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
    """Return the line of the program that raised an error here, `File "train.py", line 12 in step`; "" for none."""
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
    """Return whether the error looks like a bug: raised below our code by something that was not meant to raise."""
    if not frames or isinstance(error, TrimeshInternalError):
        return bool(frames)
    if not isinstance(error, Exception) or isinstance(error, ImportError):
        return False  # a cancel, or Ctrl-C, hits any waiting task; a missing package is not a bug
    last = frames[-1]
    package = _package(last)
    if package == OURS:
        return type(error) is AssertionError or last.tb_frame.f_code.co_code[last.tb_lasti] != _RAISE
    if package not in BELOW or package in _RAISES:
        return False
    callers = (_package(frame) for frame in reversed(frames))
    return next((package == OURS for package in callers if package not in BELOW), False)


# ---- rule for hidden frames, for frames of any kind ------------------------------------------------------------------


def package_of(module: object) -> str:
    """Return the package of a module's name, as the globals of a frame have it."""
    return str(module).partition(".")[0]


def shown_frames(frames: Iterable[T], package: Callable[[T], str], *, is_inside: bool = False) -> list[T]:
    """Return frames without the library's, and without those of packages that it has called.

    Args:
        frames: Outermost first.
        package: Returns the package of one.
        is_inside: True if the library called the first one.
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


# ---- stack text ------------------------------------------------------------------------------------------------------

# Packages of frames in a textual stack, by their files; the rule for hidden frames is above.

_NAMED: Final = frozenset(("torch",))
"""Packages of `BELOW` that a reader knows: they show where a computation is, but not the line of the program."""

_HERE: Final = __file__.rpartition(f"/{OURS}/")[0] + f"/{OURS}/"
# Patterns are texts, which `re` compiles on first use and keeps: few processes need them.
_INSTALLED: Final = r".*/(?:site|dist)-packages/"
_STANDARD: Final = r".*/(?:python|pypy)3\.\d+t?/"
_LINE: Final = r'\s*File "(.*?)"'


def package_of_file(file: str) -> str:
    """Return the package of a source file; "" for a file of a program.

    Code without a file (`<string>`, which started a worker, and frozen modules) counts as Python's own.

    Example:
        >>> package_of_file("/venv/lib/python3.12/site-packages/trio/_timeouts.py"), package_of_file("train.py")
        ('trio', '')
    """
    if file.startswith("<frozen ") or file == "<string>":
        return "importlib"
    if file.startswith(_HERE) or f"/{OURS}/_" in file:
        return OURS
    for place in (_INSTALLED, _STANDARD):
        if found := re.match(place, file):
            top = file[found.end() :].partition("/")[0].removesuffix(".py")
            return top if place is _INSTALLED or top in sys.stdlib_module_names else ""
    return ""


def package_of_line(line: str) -> str:
    """Return the package of a line of a stack: `File "train.py", line 12 in step`; "" for one of a program."""
    found = re.match(_LINE, line)
    return "" if found is None else package_of_file(found[1])


def is_named(package: str) -> bool:
    """Return whether a frame of this package tells a reader where a program is: its own, or one of a known library."""
    return package in _NAMED or (package != OURS and package not in BELOW)


# ---- texts about exceptions: names, messages, shortened reprs and the traceback that travels -------------------------

# None of these functions raises, whatever `__str__` and `__repr__` of the user's classes do, and every text can be
# encoded as UTF-8.

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
    """Return `str(error)`, or a substitute if that fails."""
    try:
        return plain_text(str(error))
    except Exception:  # noqa: BLE001 - a __str__ of the user's
        return f"<str of {type_name(type(error))} failed>"


def traceback_text(error: BaseException) -> str:
    """Return the traceback of an exception and its chain, without frames of this library.

    Without remote tracebacks of the chain and without the members of a group, which are sent separately.
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
    """Return a traceback with the source of lines that were typed into this process, such as a cell of a notebook."""
    if 'File "<' not in text and "ipykernel" not in text:
        return text
    return re.sub(_TYPED_FRAME, lambda frame: _with_source(frame[0], frame["file"], int(frame["line"])), text)


def _with_source(frame: str, file: str, line: int) -> str:
    entry = linecache.cache.get(file)  # typed source is in there; a file is never read because a peer names it
    lines = entry[2] if entry is not None and len(entry) > 1 else []
    source = lines[line - 1].strip() if 0 < line <= len(lines) else ""
    return f"{frame}\n    {source}" if source else frame


_TYPED_FRAME: Final = r'(?m)^  File "(?P<file><[^"]*>|[^"]*ipykernel[^"]*)", line (?P<line>\d+).*(?!\n    )$'


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


# ---- fault stack -----------------------------------------------------------------------------------------------------

# Stacks that `faulthandler` writes of a crash or a stall, without the frames of the library and of Trio.

_FRAME: Final = r'\s*File "(?P<path>[^"]+)", line \d+ in '
_HEAD: Final = "Fatal Python error: "
_MODULES: Final = "Extension modules: "
_STACK: Final = "Current thread "

_BELOW: Final = frozenset(("outcome", "trimesh", "trio"))

FRAMES_MAX: Final = 3
"""Frames of a crash in the text of an error: its place and the callers."""


def is_hidden(line: str) -> bool:
    """Return whether a line that a process has written is such a frame, or the list of extension modules.

    Always False with `TRIMESH_TRACEBACK=full`.
    """
    if line.startswith(_MODULES):
        return not keeps_all()
    path = _path(line)
    return path is not None and _is_below(path) and not keeps_all()


def shown_stack(stack: str) -> str:
    """Return a stack without its hidden lines; all of it if no frame of a user would remain."""
    lines = stack.splitlines()
    shown = [line for line in lines if not is_hidden(line)]
    return "\n".join(shown) if any(_path(line) for line in shown) else stack


def last_words(tail: str) -> str:
    """Return the most informative line at the end of a standard error; of a crash, with the frames of the user."""
    lines = tail.strip().splitlines()
    if not lines:
        return ""
    at = next((index for index in reversed(range(len(lines))) if lines[index].startswith(_HEAD)), None)
    if at is not None:
        frames = list(_user_frames(_stack_after(lines[at:])))
        shown, own = frames[:FRAMES_MAX], program_frame(frames, package_of_line)
        if own is not None and own not in shown:
            shown[-1] = own
        return "; ".join([lines[at], *shown])
    said = [line for line in lines if line.strip() and _path(line) is None and not line.startswith(_MODULES)]
    return (said or lines)[-1]


def _stack_after(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines of the stack of the thread that has crashed."""
    is_inside = False
    for line in lines:
        if line.startswith(_STACK):
            is_inside = True
        elif is_inside:
            if _path(line) is None:
                return
            yield line.strip()


def _user_frames(frames: Iterable[str]) -> Iterator[str]:
    """Yield the frames of the user and of installed packages; of the standard library at most the innermost."""
    for index, frame in enumerate(frames):
        path = _path(frame)
        if path is None or _is_below(path):
            continue
        is_of_library = package_of_file(path) in sys.stdlib_module_names
        if index == 0 or not is_of_library:
            yield frame


def _path(line: str) -> str | None:
    found = re.match(_FRAME, line)
    return None if found is None else found["path"]


def _is_below(path: str) -> bool:
    return path.startswith(("<frozen ", "<string>")) or package_of_file(path) in _BELOW
