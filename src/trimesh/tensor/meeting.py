"""`Meeting`: where the ranks of one process group agree that they make it, and learn why it broke. Pure.

All ranks of a team execute the same commands, so the number of a command means the same everywhere. For a collective of
command `m` a rank that has no group *joins* with `m`; when all have joined with the same number, the next generation of
the group is made. A rank that cannot take part in command `m` *leaves* with `m` and destroys what it has of the group,
which frees the others. Each of them then asks why:

    a rank has left at m        the collective of m has failed, at every rank
    only at earlier commands    the rank that left takes part in m: all join again, and m is done in a new generation
    nobody has left             the group failed by itself; the asker leaves with what it has seen

Invariants:

    ME-1  A generation is made of joins of all ranks for one command.
    ME-2  A join that some rank can never answer, for it has gone on, fails; no rank waits for one that does not come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from trimesh import limits


@attrs.frozen
class Leave:
    """One rank could not take part in one command.

    Attributes:
        place: Of the rank in the team.
        error: What it said.
    """

    place: int
    error: Any


@attrs.frozen(eq=False)
class _Join:
    number: int
    places: frozenset[int]
    made: Callable[[int], None]
    failed: Callable[[Leave], None]


@attrs.define(eq=False)
class Meeting:
    """The joins and leaves of one process group.

    Attributes:
        generation: Of the group that was made last; 0 before the first.
    """

    generation: int = 0
    _joins: dict[int, _Join] = attrs.field(factory=dict[int, _Join])
    _leaves: dict[int, Leave] = attrs.field(factory=dict[int, Leave])

    def join(
        self,
        place: int,
        number: int,
        places: frozenset[int],
        made: Callable[[int], None],
        failed: Callable[[Leave], None],
    ) -> None:
        """Take part in the next generation, for a command; one of the functions is called, now or later.

        Args:
            place: Of the rank.
            number: Of the command.
            places: Of all ranks of the group.
            made: Called with the generation when all have joined.
            failed: Called with why it will not be made for this command.
        """
        self._joins[place] = _Join(number, places, made, failed)
        self._settle()

    def leave(self, place: int, number: int, error: Any) -> None:
        """Note that a rank takes no part in a command; the first to say so for a command is the cause."""
        self._joins.pop(place, None)
        self._leaves.setdefault(number, Leave(place, error))
        if len(self._leaves) > limits.GROUP_LEAVES:
            del self._leaves[next(iter(self._leaves))]
        self._settle()

    def lose(self, why: Leave) -> None:
        """Fail all joins."""
        joins, self._joins = self._joins, {}
        for join in joins.values():
            join.failed(why)

    def cause(self, number: int) -> Leave | None:
        """Return who has left at a command."""
        return self._leaves.get(number)

    def has_left_before(self, number: int) -> bool:
        """Whether some rank has left this generation, but none at this command."""
        return any(left < number for left in self._leaves)

    def _settle(self) -> None:
        for place, join in list(self._joins.items()):
            why = self._passed(place, join.number)
            if why is not None:
                del self._joins[place]
                join.failed(why)
        if not self._joins or any(self._joins.keys() != join.places for join in self._joins.values()):
            return
        joins, self._joins = self._joins, {}
        self._leaves.clear()
        self.generation += 1
        for join in joins.values():
            join.made(self.generation)

    def _passed(self, place: int, number: int) -> Leave | None:
        """Return who will never join for a command, because it has left at it or is further already (ME-2)."""
        exactly = self._leaves.get(number)
        if exactly is not None and exactly.place != place:
            return exactly
        for left, leave in self._leaves.items():
            if left > number and leave.place != place:
                return leave
        for other, join in self._joins.items():
            if join.number > number:
                return Leave(other, None)
        return None
