"""`LearntReplay`: the replays of one recording, or sequence, which run by what this rank has learnt before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from trimesh import limits
from trimesh.tensor.dtensor.copied_view import has_copied_views
from trimesh.tensor.dtensor.local_trace import LocalTrace, NotLocal
from trimesh.tensor.rank.rank import Rank, TeamOnRank
from trimesh.tensor.rules.engine import engine_in

if TYPE_CHECKING:
    from trimesh.tensor.dtensor.local_program import LocalProgram
    from trimesh.tensor.rank.rank import Step


@attrs.define(eq=False)
class LearntReplay:
    """What a part of a recording, or a sequence, learns from its replays, to do the next ones sooner.

    A replay whose tensors lie as those of no replay before runs by the rules, and is learnt from.

    Attributes:
        is_counted: Whether each command counts, rather than all of a replay as one.
    """

    is_counted: bool = False
    _programs: list[LocalProgram] = attrs.field(factory=list["LocalProgram"])
    _learnt: int = 0

    def run(self, rank: Rank, team: TeamOnRank, steps: Sequence[Step], first_move: int) -> int:
        """Do some of the first steps; return how many. Never raises."""
        if type(rank) is not Rank or has_copied_views(rank):  # one that is profiled, or simulated, has its own ways
            return 0
        engine = engine_in(rank)
        for program in self._programs:
            if program.fits(rank.values, engine):
                return program.run(rank, team, first_move, is_counted=self.is_counted)
        if self._learnt >= limits.TENSOR_REPLAYS_LEARNT:
            return 0
        self._learnt += 1
        try:
            self._programs.append(LocalTrace(rank, team, is_counted=self.is_counted).run(steps, first_move))
        except NotLocal:
            pass
        return len(steps)
