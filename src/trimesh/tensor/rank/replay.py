"""Commands that a rank keeps, to run them again at one word of the controller: see `recording` for what they are."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from trimesh.tensor.rank.poison import Poison
from trimesh.tensor.rank.rank import Command, Rank, Step, TeamOnRank


@attrs.frozen(eq=False)
class ReplayRecord:
    """Keep commands.

    Attributes:
        number: Of the recording.
        steps: The commands.
        formals: Refs that stand for what a replay is given.
        results: Refs of what it gives back.
        captured: Refs of what was there before; kept as long as the recording.
        carried: (kept by a replay, captured by the next).
        held: The captured tensors.
    """

    number: int
    steps: Sequence[Step]
    formals: Sequence[int]
    results: Sequence[int]
    captured: Sequence[int]
    carried: Sequence[tuple[int, int]]
    held: dict[int, object] = attrs.field(factory=dict[int, object])

    def execute(self, rank: Rank, team: TeamOnRank) -> None:
        """See `Step`."""
        for ref in self.captured:
            if ref in rank.values:
                self.held[ref] = rank.values[ref]
        team.recordings[self.number] = self
        team.done += 1


@attrs.frozen
class Replay:
    """Run kept commands.

    Attributes:
        number: Of the recording.
        first: Ref of its first result.
        formals: The tensors that it is given.
    """

    number: int
    first: int
    formals: Sequence[int]

    def execute(self, rank: Rank, team: TeamOnRank) -> None:
        """See `Step`."""
        number, values = team.done, rank.values
        recording = team.recordings[self.number]
        assert isinstance(recording, ReplayRecord)
        borrowed = [ref for ref in recording.held if ref not in values]  # its own handle is gone at the controller
        for ref in borrowed:
            values[ref] = recording.held[ref]
        for kept, captured in recording.carried:
            if kept in values:
                values[captured] = values[kept]
        for formal, given in zip(recording.formals, self.formals, strict=True):
            if given in values:
                values[formal] = values[given]
        for step in recording.steps:
            _fresh(step).execute(rank, team)
            team.done = number  # all of it counts as one
        for index, ref in enumerate(recording.results):
            values[self.first + index] = values.pop(ref)
        for ref in (*recording.formals, *(captured for _, captured in recording.carried), *borrowed):
            found = values.pop(ref, None)
            if ref in recording.held and type(found) is Poison:
                recording.held[ref] = found
        team.done = number + 1


def _fresh(step: Step) -> Step:
    """Return a command with copies of its bodies: what is made of them may be written to."""
    if isinstance(step, Command) and "b" in step.signature.kinds:
        copies = [
            memoryview(bytearray(operand)) if kind == "b" else operand
            for kind, operand in zip(step.signature.kinds, step.operands, strict=True)
        ]
        return attrs.evolve(step, operands=copies)
    return step


@attrs.frozen
class Forget:
    """Let kept commands, and what they have captured, go."""

    number: int

    def execute(self, rank: Rank, team: TeamOnRank) -> None:
        """See `Step`."""
        del rank
        team.recordings.pop(self.number, None)
        team.done += 1
