"""Packages of frames in a stack that was written as text, by their files; `frames` has the rule for what is hidden."""

from __future__ import annotations

import re
import sys
from typing import Final

from trimesh._wire.exceptions.frames import BELOW, OURS

_NAMED: Final = frozenset(("torch",))
"""Those of `BELOW` that a reader knows: they say where a computation is, though not at which line of the program."""

_HERE: Final = __file__.rpartition(f"/{OURS}/")[0] + f"/{OURS}/"
_INSTALLED: Final = re.compile(r".*/(?:site|dist)-packages/")
_STANDARD: Final = re.compile(r".*/(?:python|pypy)3\.\d+t?/")
_LINE: Final = re.compile(r'\s*File "(.*?)"')


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


def is_named(package: str) -> bool:
    """Return whether a frame of this package tells a reader where a program is: its own, or one of a known library."""
    return package in _NAMED or (package != OURS and package not in BELOW)
