"""Stacks cut to the few frames that say where a program is, for logs; PURE.

BS-1 At most `FRAMES_MAX` frames of one stack stay, innermost first: those of the program and of libraries that it uses.
BS-2 A stack that has no such frame keeps its innermost ones, but for those of frozen modules where it has others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Final

from trimesh._wire.exceptions.tracebacks import is_named, package_of_line

FRAMES_MAX: Final = 4

_FRAME: Final = re.compile(r'( *)(?:File "|and \d+ frames more)')


def brief(lines: Iterable[str]) -> list[str]:
    """Return lines of which some are stacks, with these cut."""
    found = list[str]()
    for indent, group in groupby(lines, _indent_of_frame):
        some = list(group)
        found += some if indent is None else _cut([line for line in some if 'File "' in line])
    return found


def _indent_of_frame(line: str) -> str | None:
    """Return how far a frame is indented, which tells stacks apart; None for a line that is no frame."""
    match = _FRAME.match(line)
    return None if match is None else match[1]


def _cut(frames: Sequence[str]) -> Sequence[str]:
    named = [line for line in frames if is_named(package_of_line(line))]
    return (named or [line for line in frames if 'File "<frozen ' not in line] or frames)[:FRAMES_MAX]
