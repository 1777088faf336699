"""What faults and steps are called on the command line, and lists of them in few words. PURE.

`f0`, `f1` are faults that the test plans, `c0.3` is one of chaos, `s0.7` a step, `buyers.7` a step of a named series.
`s0.0-6` stands for the steps 0 to 6, `s0.7-` for all from 7 on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

_NUMBERED: Final = re.compile(r"(\w+\.)(\d+)")
_RANGE: Final = re.compile(r"(\w+\.)(\d+)-(\d+)")
_REST: Final = re.compile(r"(\w+\.)(\d+)-")
_NAME: Final = re.compile(r"[A-Za-z_]\w*")
_TAKEN: Final = re.compile(r"[fcs]\d+")

RANGE_MAX: Final = 1_000_000
"""Keys that one range may stand for: more are a slip of the pen, and would fill the memory."""


def checked_series(name: object) -> str:
    """Return the name of a series of steps.

    Raises:
        ValueError: It is no word, or one that we give ourselves.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name) or _TAKEN.fullmatch(name):
        raise ValueError(f'a series of steps has a name like "buyers", of letters and digits, got {name!r}')
    return name


def rest_after(keys: Iterable[str]) -> list[str]:
    """Return what stands for all that comes after the last one of each series: `s0.7-` where `s0.6` is the last."""
    last: dict[str, int] = {}
    for key in keys:
        numbered = _NUMBERED.fullmatch(key)
        if numbered is not None:
            last[numbered[1]] = max(last.get(numbered[1], -1), int(numbered[2]))
    return [f"{series}{number + 1}-" for series, number in last.items()]


def is_among(key: str, keys: frozenset[str]) -> bool:
    """Return whether a key is one of `keys`, or in the rest of a series that one of them stands for."""
    numbered = _NUMBERED.fullmatch(key)
    if key in keys or numbered is None:
        return key in keys
    rests = (_REST.fullmatch(one) for one in keys if one.endswith("-"))
    return any(rest is not None and rest[1] == numbered[1] and int(numbered[2]) >= int(rest[2]) for rest in rests)


def compact(keys: Iterable[str]) -> str:
    """Return keys as they are written on the command line; neighbours become a range."""
    found: list[str] = []
    runs: dict[str, list[int]] = {}
    for key in keys:
        numbered = _NUMBERED.fullmatch(key)
        if numbered is None:
            found.append(key)
        else:
            runs.setdefault(numbered[1], []).append(int(numbered[2]))
    rests = [key for key in found if _REST.fullmatch(key)]
    found = [key for key in found if key not in rests]
    for series, numbers in runs.items():
        found += [f"{series}{first}" + (f"-{last}" if last > first else "") for first, last in _ranges(sorted(numbers))]
    return ",".join([*found, *rests])


def _ranges(numbers: list[int]) -> Iterator[tuple[int, int]]:
    first = last = numbers[0]
    for number in numbers[1:]:
        if number > last + 1:
            yield first, last
            first = number
        last = number
    yield first, last


def expand(text: str) -> frozenset[str]:
    """Undo `compact`.

    Raises:
        ValueError: A range is none.
    """
    found: set[str] = set()
    for word in text.split(","):
        part = word.strip()
        many = _RANGE.fullmatch(part)
        if many is None:
            found.add(part)
            continue
        series, first, last = many[1], int(many[2]), int(many[3])
        if not 0 <= last - first < RANGE_MAX:
            raise ValueError(f"a range goes from a number up to another, as in s0.3-7; got {part!r}")
        found.update(f"{series}{number}" for number in range(first, last + 1))
    return frozenset(found - {""})
