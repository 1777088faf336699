"""`Meeting`: where the ranks of one process group agree that they make it. Pure.

All ranks of a team execute the same operations, so the number of one means the same everywhere. For a collective in
operation `m` a rank that has no group *joins* with `m`; when all have joined with the same number, the next generation
of the group is made.

Invariants:

    ME-1  A generation is made of joins of all ranks for one operation.
    ME-2  A join that some rank will never answer, for it has left or gone on, fails; no rank waits for one that does
          not come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs


@attrs.frozen
class Leave:
    """A rank could not take part.

    Attributes:
        place: Of the rank in the team.
        error: Why, or None where it has just gone on.
    """

    place: int
    error: Any


@attrs.frozen(eq=False)
class _Join:
    number: int
    made: Callable[[int], None]
    failed: Callable[[Leave], None]


@attrs.define(eq=False)
class Meeting:
    """The joins of one process group.

    Attributes:
        places: Of its ranks in the team.
        generation: Of the group that was made last; 0 before the first.
        made_for: The operation that it was made for.
    """

    places: frozenset[int]
    generation: int = 0
    made_for: int = -1
    _joins: dict[int, _Join] = attrs.field(factory=dict[int, _Join])

    def join(self, place: int, number: int, made: Callable[[int], None], failed: Callable[[Leave], None]) -> None:
        """Take part in the next generation, for an operation; one of the functions is called, now or later.

        Args:
            place: Of the rank; who has left this operation, or a later one, was asked before.
            number: Of the operation.
            made: Called with the generation when all have joined.
            failed: Called with why it will not be made for this operation.
        """
        self._joins[place] = _Join(number, made, failed)
        latest = max(self._joins.values(), key=lambda join: join.number).number
        ahead = next(place for place, join in self._joins.items() if join.number == latest)
        self._fail(latest - 1, Leave(ahead, None))
        if self._joins.keys() == self.places:
            joins, self._joins = self._joins, {}
            self.generation += 1
            self.made_for = number
            for join in joins.values():
                join.made(self.generation)

    def left(self, number: int, why: Leave) -> None:
        """Learn that one of the ranks has left at an operation."""
        if why.place in self.places:
            self._joins.pop(why.place, None)
            self._fail(number, why)

    def lose(self, why: Leave) -> None:
        """Fail all joins."""
        joins, self._joins = self._joins, {}
        for join in joins.values():
            join.failed(why)

    def _fail(self, number: int, why: Leave) -> None:
        """Fail the joins for operations up to one (ME-2)."""
        for place, join in list(self._joins.items()):
            if join.number <= number:
                del self._joins[place]
                join.failed(why)
