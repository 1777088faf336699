"""Stacks that `faulthandler` writes of a crash or a stall, without the frames of the library and of Trio.

Fatal Python error: Segmentation fault

Current thread 0x00007f... (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "train.py", line 17 in step
  File ".../trimesh/_runtime/actors/serve.py", line 241 in _first_step       left out, and so is all below it
  ...
Extension modules: msgspec._core, _cffi_backend (total: 2)                   left out
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from typing import Final

from trimesh._wire.exceptions.frames import keeps_all
from trimesh._wire.exceptions.stack_text import package_of_file

_FRAME: Final = re.compile(r'\s*File "(?P<path>[^"]+)", line \d+ in ')
_HEAD: Final = "Fatal Python error: "
_MODULES: Final = "Extension modules: "
_STACK: Final = "Current thread "

_BELOW: Final = frozenset(("outcome", "trimesh", "trio"))

FRAMES_MAX: Final = 3
"""Frames of a crash in the text of an error: where it was, and who has called that."""


def is_hidden(line: str) -> bool:
    """Return whether a line that a process has written is such a frame, or the list of extension modules.

    Nothing is with `TRIMESH_TRACEBACK=full`.
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
    """Return the line of the end of a standard error that says most: of a crash, with the frames of the user."""
    lines = tail.strip().splitlines()
    if not lines:
        return ""
    at = next((index for index in reversed(range(len(lines))) if lines[index].startswith(_HEAD)), None)
    if at is not None:
        frames = list(_user_frames(_stack_after(lines[at:])))[:FRAMES_MAX]
        return "; ".join([lines[at], *frames])
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
    """Yield the frames of the user, and of what else is installed; of the standard library the innermost at most."""
    for index, frame in enumerate(frames):
        path = _path(frame)
        if path is None or _is_below(path):
            continue
        is_of_library = package_of_file(path) in sys.stdlib_module_names
        if index == 0 or not is_of_library:
            yield frame


def _path(line: str) -> str | None:
    found = _FRAME.match(line)
    return None if found is None else found["path"]


def _is_below(path: str) -> bool:
    return path.startswith(("<frozen ", "<string>")) or package_of_file(path) in _BELOW
