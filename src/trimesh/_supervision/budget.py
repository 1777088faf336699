"""How often a mesh has failed lately, and whether that is too often."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec


class _Entry(msgspec.Struct, frozen=True):
    at: float
    unit: int
    cause: Exception
    is_counted: bool


class Budget:
    """The failures of the last `period` seconds.

    BU-1 it is exceeded when more than `intensity` counted failures lie within `period`.
    BU-2 causes are kept in the order in which they came, the last one included, those that were not counted too (P4).

    Attributes:
        intensity: Failures that are healed.
        period: Seconds.
    """

    def __init__(self, intensity: int, period: float) -> None:
        self.intensity = intensity
        self.period = period
        self._entries: deque[_Entry] = deque()

    def count(self, unit: int, cause: Exception, now: float) -> None:
        """Note a failure that is to be healed."""
        self._add(unit, cause, now, is_counted=True)

    def add(self, unit: int, cause: Exception, now: float) -> None:
        """Note a failure that belongs to one that is being healed already."""
        self._add(unit, cause, now, is_counted=False)

    def _add(self, unit: int, cause: Exception, now: float, *, is_counted: bool) -> None:
        while self._entries and self._entries[0].at <= now - self.period:
            self._entries.popleft()
        self._entries.append(_Entry(now, unit, cause, is_counted))

    def clear(self) -> None:
        self._entries.clear()

    @property
    def is_exceeded(self) -> bool:
        """Whether the last failure was one too many."""
        return sum(entry.is_counted for entry in self._entries) > self.intensity

    def attempts(self, unit: int) -> int:
        """Return how often a unit has failed in the period."""
        return sum(entry.is_counted and entry.unit == unit for entry in self._entries)

    @property
    def causes(self) -> Sequence[Exception]:
        """Every failure of the period, oldest first."""
        return [entry.cause for entry in self._entries]
