"""Fault plan of one run: planned, fired and left-out faults and steps."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

import attrs

from trimesh.testing.plans.fault import Fault


@attrs.frozen
class Fired:
    """A fault that happened.

    Attributes:
        time: Seconds since the run began; virtual in a simulation.
        site: Site of the runtime.
        where: Coordinates of the process or actor.
        fault: The fault.
    """

    time: float
    site: str
    where: str
    fault: Fault


class UnfiredFault(AssertionError):
    """A planned fault did not happen: the test tested less than it claims."""


@attrs.define(eq=False)
class Planned:
    """One planned fault.

    Attributes:
        index: Its number, in the order of planning.
        key: Its name on the command line: `f0`, `f1` for those that the test plans, `c0.3` for chaos.
        fault: The fault.
        fired: Number of times that it has happened.
        is_left_out: Whether this run omits it (to find the faults that matter).
    """

    index: int
    key: str
    fault: Fault
    fired: int = 0
    is_left_out: bool = False

    @property
    def is_certain(self) -> bool:
        """True if it must happen in every run that plans it."""
        return not self.is_chance and self.fault.is_certain

    @property
    def is_chance(self) -> bool:
        """True if chaos drew it."""
        return self.key.startswith("c")

    @property
    def is_drawn(self) -> bool:
        """True if a seed decides its target or its strength."""
        return not self.is_certain or self.fault.is_drawn


@attrs.define(eq=False)
class FaultPlan:
    """All faults of one run.

    Attributes:
        planned: Planned faults, in order.
        log: Fired faults, in order: the fixture `fault_log`.
        left_out: Keys of faults and steps that this run omits.
        steps: Steps that the test took by `chaos.steps`, by key.
    """

    planned: list[Planned] = attrs.field(factory=list[Planned])
    log: list[Fired] = attrs.field(factory=list[Fired])
    left_out: frozenset[str] = frozenset()
    steps: dict[str, object] = attrs.field(factory=dict[str, object])

    def takes(self, key: str, step: object) -> bool:
        """Record a step of the test; return False for one that this run leaves out."""
        if is_among(key, self.left_out):
            return False
        self.steps[key] = step
        return True

    def add(self, fault: Fault, key: str | None = None) -> Planned:
        own = sum(not one.is_chance for one in self.planned)
        key = key or f"f{own}"
        made = Planned(len(self.planned), key, fault, is_left_out=is_among(key, self.left_out))
        self.planned.append(made)
        return made

    def fire(self, index: int, time: float, site: str, where: str) -> Fired:
        """Record that a fault happens."""
        planned = self.planned[index]
        planned.fired += 1
        fired = Fired(time, site, where, planned.fault)
        self.log.append(fired)
        return fired

    def unfired(self) -> list[Planned]:
        return [one for one in self.planned if not one.fired and not one.is_left_out]

    def check(self) -> None:
        """Check that all certain faults have happened.

        Raises:
            UnfiredFault: Some have not; the text names them.
        """
        missing = [str(one.fault) for one in self.unfired() if one.is_certain]
        if missing:
            raise UnfiredFault(f"planned faults must happen, and these never did: {'; '.join(missing)}")


# ---- keys of faults and steps on the command line, and compact lists of them. PURE -----------------------------------

# `f0`, `f1` are faults that the test plans, `c0.3` is one of chaos, `s0.7` a step, `buyers.7` a step of a named series.
# `s0.0-6` stands for the steps 0 to 6, `s0.7-` for all from 7 on.

_NUMBERED: Final = re.compile(r"(\w+\.)(\d+)")
_RANGE: Final = re.compile(r"(\w+\.)(\d+)-(\d+)")
_REST: Final = re.compile(r"(\w+\.)(\d+)-")
_NAME: Final = re.compile(r"[A-Za-z_]\w*")
_TAKEN: Final = re.compile(r"[fcs]\d+")

RANGE_MAX: Final = 1_000_000
"""Maximum keys of one range: more are a typing error, and would fill the memory."""


def checked_series(name: object) -> str:
    """Return the name of a series of steps.

    Raises:
        ValueError: It is no identifier, or has the form of a generated key.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name) or _TAKEN.fullmatch(name):
        raise ValueError(f'a series of steps needs a name like "buyers", of letters and digits, got {name!r}')
    return name


def rest_after(keys: Iterable[str]) -> list[str]:
    """Return keys that stand for all after the last one of each series: `s0.7-` if `s0.6` is the last."""
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
        ValueError: A range is invalid.
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
            raise ValueError(f"a range must go from a number up to another, as in s0.3-7, got {part!r}")
        found.update(f"{series}{number}" for number in range(first, last + 1))
    return frozenset(found - {""})
