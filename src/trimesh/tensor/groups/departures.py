"""`Departures`: which ranks of a team have left which operations. Pure.

A rank that has nothing to bring to operation `m` (its input is poisoned, or it failed) *leaves* it: it will not take
part in what the others do together in `m`, in any group.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import attrs

from trimesh import limits
from trimesh.tensor.groups.meeting import Leave


@attrs.define(eq=False)
class Departures:
    """What is known at the store of a team; of long ago nothing is."""

    _leaves: dict[int, list[Leave]] = attrs.field(factory=dict[int, list[Leave]])
    _last: dict[int, tuple[int, Leave]] = attrs.field(factory=dict[int, "tuple[int, Leave]"])

    def add(self, place: int, number: int, error: Any) -> Leave:
        """Note that a rank has left an operation.

        Args:
            place: Of the rank in the team.
            number: Of the operation.
            error: Why; None for the reason of its last time.
        """
        _, before = self._last.get(place, (0, None))
        leave = Leave(place, before.error if error is None and before is not None else error)
        self._last[place] = number, leave
        self._leaves.setdefault(number, []).append(leave)
        if len(self._leaves) > limits.GROUP_LEAVES:
            del self._leaves[next(iter(self._leaves))]
        return leave

    def at(self, number: int, places: Collection[int], asker: int) -> Leave | None:
        """Return which of some ranks was the first to leave an operation, other than the asker."""
        for leave in self._leaves.get(number, ()):
            if leave.place in places and leave.place != asker:
                return leave
        return None

    def since(self, number: int, places: Collection[int], asker: int) -> Leave | None:
        """Return one of some ranks, other than the asker, that has left an operation or is further."""
        found = self.at(number, places, asker)
        if found is not None:
            return found
        for place, (last, leave) in self._last.items():
            if last > number and place in places and place != asker:
                return leave
        return None
