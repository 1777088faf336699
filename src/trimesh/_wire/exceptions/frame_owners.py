"""Owners of stack frames: the library, the packages that it runs on, or the program. The one rule for what is hidden.

Frames of live code are judged by the module that they name, lines of a stack that was written as text by their file.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

T = TypeVar("T")

OURS: Final = "trimesh"
BELOW: Final = frozenset(("attr", "cloudpickle", "msgspec", "outcome", "torch", "trio")) | sys.stdlib_module_names
"""Packages whose frames are hidden where the library has called them, and shown where the program has."""

_NAMED: Final = frozenset(("torch",))
"""Those of `BELOW` that a reader knows: they say where a computation is, though not at which line of the program."""

_HERE: Final = __file__.rpartition(f"/{OURS}/")[0] + f"/{OURS}/"
_INSTALLED: Final = re.compile(r".*/(?:site|dist)-packages/")
_STANDARD: Final = re.compile(r".*/(?:python|pypy)3\.\d+t?/")
_LINE: Final = re.compile(r'\s*File "(.*?)"')


def package_of(module: object) -> str:
    """Return the package of a module's name, as the globals of a frame have it."""
    return str(module).partition(".")[0]


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
        if found := place.match(file):
            top = file[found.end() :].partition("/")[0].removesuffix(".py")
            return top if place is _INSTALLED or top in sys.stdlib_module_names else ""
    return ""


def package_of_line(line: str) -> str:
    """Return the package of a line of a stack: `File "train.py", line 12 in step`; "" for one of a program."""
    found = _LINE.match(line)
    return "" if found is None else package_of_file(found[1])


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


def is_named(package: str) -> bool:
    """Return whether a frame of this package tells a reader where a program is: its own, or one of a known library."""
    return package in _NAMED or (package != OURS and package not in BELOW)
