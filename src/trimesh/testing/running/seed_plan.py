"""Which seeds a test runs under, as the command line says it; how many runs came of it."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Iterable, Iterator
from typing import Final

import attrs
import pytest

from trimesh.testing.plans.determinism import stream

SEEDED: Final = pytest.mark.mesh_seeded
"""Marks what runs under seeds; as a property of a report, the number of its runs."""

FRESH: Final = "fresh"
"""As `--mesh-first-seed`: begin where no run has begun before."""

FRESH_BITS: Final = 32
"""Of a first seed that is drawn: short enough to be typed, and no two runs of a year begin at the same."""


REAL_SEEDS: Final = 3
"""Seeds of a test over real processes whose faults a seed decides: its mesh takes a quarter of a second to start."""

NETWORK_SEEDS: Final = 1
"""The same over hosts in network namespaces, which take seconds to start."""


REAL_JITTERS: Final = (0.001, 0.01, 0.05)
"""Seconds that a message between real processes may be under way; which of them a run has, its seed decides. The first
seed leaves links as they are, so that a test without chance is the same by default."""


@attrs.frozen
class SeedPlan:
    """The seeds of every seeded test of a session.

    Attributes:
        only: The only one, or None.
        first: Where to begin.
        count: How many instead of what a test says, or None.
        seconds: How long to go on with the next ones, in each test, instead of counting them; None to count.
        fresh_first: Where seeds that were never run begin.
        fresh_seconds: How long to go on with those, in each test, after the others.
    """

    only: int | None = None
    first: int = 0
    count: int | None = None
    seconds: float | None = None
    fresh_first: int = 0
    fresh_seconds: float = 0.0

    def seeds(self, asked: int) -> Iterator[int]:
        """Yield the seeds of a test that asks for so many; the first of them in any case."""
        if self.only is not None:
            yield self.only
            return
        if self.seconds is None:
            yield from range(self.first, self.first + (self.count or asked))
        else:
            yield from _seeds_for(self.seconds, self.first)
        if self.fresh_seconds > 0:
            yield from _seeds_for(self.fresh_seconds, self.fresh_first)

    @property
    def is_chosen(self) -> bool:
        """Whether the command line says which seeds, or how many."""
        return self.only is not None or self.count is not None

    def real_seeds(self, asked: int, most: int) -> Iterator[int]:
        """Yield the seeds of a test over real processes that asks for so many: those of the command line, or few."""
        if self.only is not None:
            yield self.only
        else:
            yield from range(self.first, self.first + (self.count or min(asked, most)))


def _seeds_for(seconds: float, first: int) -> Iterator[int]:
    end = time.monotonic() + seconds
    for seed in itertools.count(first):
        yield seed
        if time.monotonic() >= end:
            return


def real_jitter(seed: int) -> float:
    """Return by how much messages between real processes may be late under a seed."""
    return stream(seed, "jitter").choice(REAL_JITTERS) if seed else 0.0


def read_seed(text: str) -> int:
    """Return the seed that a text names: `42`, `0x2a`; `fresh` draws one.

    Raises:
        ValueError: It is no number.
    """
    return secrets.randbits(FRESH_BITS) if text == FRESH else int(text, 0)


def runs_told(properties: Iterable[Iterable[tuple[str, object]]], first: int, fresh: int | None = None) -> str:
    """Say how many tests were run under how many seeds, by the properties of their reports; "" for none."""
    counts = [value for one in properties for name, value in one if name == SEEDED.name and isinstance(value, int)]
    if not counts:
        return ""
    each = f"{min(counts)} to {max(counts)} seeds each, from {first:#x} on"
    if fresh is not None:
        each += f", then from {fresh:#x} on"
    return f"{len(counts)} tests under seeds, {sum(counts)} runs: {each}"
