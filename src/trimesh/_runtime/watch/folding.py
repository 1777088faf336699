"""Processes of which the same is said are told once; PURE.

FD-1 The same is what differs only in ages, in the pid, and in where in its mesh the process or its actor is.
FD-2 The first of them stands for all, whole; the others are named after it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

NAMED_MAX: Final = 4
"""Names of processes in one line; how many more there are is said."""

_AGE: Final = re.compile(r"\d+\.\d s\b")
_POINT: Final = re.compile(r"\[[^\[\]{}\s,=]+=\d+(?:,[^\[\]{}\s,=]+=\d+)*\]")


def fold(told: Iterable[tuple[str, int, Sequence[str]]]) -> list[str]:
    """Return the lines on some processes, each text once.

    Args:
        told: Label, pid, and lines of each process.
    """
    alike = dict[str, tuple[Sequence[str], list[str]]]()
    for label, pid, lines in told:
        text = _POINT.sub("", "\n".join(lines).replace(f"pid {pid}:", "pid:", 1))
        alike.setdefault(_AGE.sub("", text), (lines, []))[1].append(f"{label} pid {pid}")
    found = list[str]()
    for lines, (_, *others) in alike.values():
        found += lines
        if others:
            more = f" and {len(others) - NAMED_MAX} more" * (len(others) > NAMED_MAX)
            count = f"{len(others)} other process{'es' * (len(others) > 1)}"
            found.append(f"    and the same of {count}: {', '.join(others[:NAMED_MAX])}{more}")
    return found
