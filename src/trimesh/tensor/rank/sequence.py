"""Sequences of commands that come again: a rank keeps them, and runs them as it runs recordings.

A program that trains issues the same operations in each step, for other tensors. The controller ends a batch where its
operations say so (`Team.emit`), so that the batches are the same in each step, too.

SQ-1 Two sequences are the same if they have the same operations with the same numbers, and tensors of the same places:
     made by the same one of their commands, or given by the same others.
SQ-2 Only operators are in a sequence, and what is made of such: nothing that has bodies, that sends or answers, or that
     only checks.
SQ-3 Each command counts as if it had come alone, and what has failed, or was lost, is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import attrs

from trimesh.tensor.rank.poison import Poison
from trimesh.tensor.rank.rank import Rank, Step, TeamOnRank
from trimesh.tensor.rank.sequence_pattern import SequencePattern

if TYPE_CHECKING:
    from trimesh.tensor.dtensor.learnt_replay import LearntReplay

GIVEN: Final = 1 << 60
"""The first of the refs that stand for tensors that a sequence is given: no controller has counted so far."""

MADE: Final = 1 << 61
"""The first of those that stand for what it makes."""


@attrs.define(eq=False)
class KeptSequence:
    """Commands, with refs of their own.

    Attributes:
        steps: In order.
        freed: Which of the tensors that they are given they forget, by number.
        unused: Those of them that they only forget.
        left: Which of those that they make they do not forget, by number.
        local: Runs what it can of them.
        pattern: Knows them again.
        next: What came after them the last time.
    """

    steps: Sequence[Step]
    freed: frozenset[int]
    unused: frozenset[int]
    left: Sequence[int]
    local: LearntReplay
    pattern: SequencePattern
    next: KeptSequence | None = None


@attrs.frozen
class SequenceRun:
    """Run kept commands for some tensors.

    Attributes:
        kept: They.
        given: Refs of the tensors that they are given.
        made: Refs of those that they make.
    """

    kept: KeptSequence
    given: Sequence[int]
    made: Sequence[int]

    def execute(self, rank: Rank, team: TeamOnRank) -> None:
        kept, values = self.kept, rank.values
        self._begin(rank)
        done = kept.local.run(rank, team, kept.steps, 0)
        for step in kept.steps[done:]:
            step.execute(rank, team)
        for number in kept.left:
            values[self.made[number]] = values.pop(MADE + number)
        for number, ref in enumerate(self.given):
            found = values.pop(GIVEN + number, None)
            if type(found) is Poison and ref in values and type(values[ref]) is not Poison:
                values[ref] = found  # it was to be written to

    def _begin(self, rank: Rank) -> None:
        """Give tensors the refs that they have here; those that will be forgotten have only these from now on."""
        kept, values = self.kept, rank.values
        for number, ref in enumerate(self.given):
            found = values.pop(ref, None) if number in kept.freed else values.get(ref)
            if found is not None and number not in kept.unused:
                values[GIVEN + number] = found
        if rank.results:
            for number in kept.freed:
                rank.results.pop(self.given[number], None)
