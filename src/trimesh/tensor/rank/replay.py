"""Commands that a rank keeps, to run them again at one word of the controller: see `recording` for what they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs

from trimesh.tensor.protocol.messages import MOVE_OPERANDS
from trimesh.tensor.rank.poison import Poison
from trimesh.tensor.rank.rank import Command, Rank, Step, TeamOnRank
from trimesh.tensor.rank.signature import Signature

if TYPE_CHECKING:
    from trimesh.tensor.dtensor.learnt_replay import LearntReplay

_TAKEN_APART: Final = frozenset({"redistribute", "redistribute_back", "to_local", "to_global"})
"""Kernels of ours that are operators on parts, and nothing else."""


def is_of_operators(signature: Signature) -> bool:
    """Whether something is an operator of torch, or a kernel that is made of such, and leaves nothing but tensors."""
    kernel = signature.kernel
    if signature.has_info:
        return False
    return kernel is None or kernel.operator is not None or kernel.name in _TAKEN_APART


@attrs.frozen(eq=False)
class VaryingCommand:
    """A command of a recording that is not the same in each run.

    Attributes:
        command: With bodies that no run may write to, and a move that counts from 0.
        move: Which of its operands is the number of a move; None for none.
    """

    command: Command
    move: int | None

    def execute(self, rank: Rank, team: TeamOnRank, first_move: int = 0) -> None:
        """Run it with copies of its bodies: what is made of them may be written to."""
        operands: list[Any] = [
            memoryview(bytearray(operand)) if kind == "b" else operand
            for kind, operand in zip(self.command.signature.kinds, self.command.operands, strict=True)
        ]
        if self.move is not None:
            operands[self.move] += first_move
        attrs.evolve(self.command, operands=operands).execute(rank, team)


def varying(step: Step) -> Step:
    """Return a command of a recording as that keeps it."""
    if isinstance(step, Command):
        kernel = step.signature.kernel
        move = None if kernel is None else MOVE_OPERANDS.get(kernel.name)
        if move is not None or "b" in step.signature.kinds:
            return VaryingCommand(step, move)
    return step


def execute(step: Step, rank: Rank, team: TeamOnRank, first_move: int, *, is_counted: bool = False) -> None:
    """Run a step of a recording, all of which counts as one command; or of a sequence, each of which counts."""
    number = team.done
    if type(step) is VaryingCommand:
        step.execute(rank, team, first_move)
    else:
        step.execute(rank, team)
    if not is_counted:
        team.done = number


@attrs.define(eq=False)
class ReplayRecord:
    """Keep commands.

    Attributes:
        number: Of the recording.
        parts: The commands, in parts: between two of them others may come, of teams that have some of the ranks.
        formals: Refs that stand for what a replay is given.
        results: Refs of what it gives back.
        captured: Refs of what was there before; kept as long as the recording.
        carried: (kept by a replay, captured by the next).
        locals: Run what they can of a replay, one for each part.
        held: The captured tensors.
        borrowed: Those of them that a replay has put there.
    """

    number: int
    parts: Sequence[Sequence[Step]]
    formals: Sequence[int]
    results: Sequence[int]
    captured: Sequence[int]
    carried: Sequence[tuple[int, int]]
    locals: Sequence[LearntReplay]
    held: dict[int, object] = attrs.field(factory=dict[int, object])
    borrowed: Sequence[int] = ()

    def execute(self, rank: Rank, team: TeamOnRank) -> None:
        for ref in self.captured:
            if ref in rank.values:
                self.held[ref] = rank.values[ref]
        team.recordings[self.number] = self
        team.done += 1

    def begin(self, values: dict[int, Any], formals: Sequence[int]) -> None:
        """Put there what a replay reads."""
        self.borrowed = [ref for ref in self.held if ref not in values]  # its own handle is gone at the controller
        for ref in self.borrowed:
            values[ref] = self.held[ref]
        for kept, captured in self.carried:
            if kept in values:
                values[captured] = values[kept]
        for formal, given in zip(self.formals, formals, strict=True):
            if given in values:
                values[formal] = values[given]

    def end(self, values: dict[int, Any], first: int) -> None:
        """Take that away, and give results their numbers."""
        for index, ref in enumerate(self.results):
            values[first + index] = values.pop(ref)
        for ref in (*self.formals, *(captured for _, captured in self.carried), *self.borrowed):
            found = values.pop(ref, None)
            if ref in self.held and type(found) is Poison:
                self.held[ref] = found


@attrs.frozen
class Replay:
    """Run a part of kept commands.

    Attributes:
        number: Of the recording.
        part: Which one.
        first: Ref of its first result, in the last part.
        formals: The tensors that it is given, in the first part.
        first_move: What moves are numbered from.
    """

    number: int
    part: int
    first: int
    formals: Sequence[int]
    first_move: int

    def execute(self, rank: Rank, team: TeamOnRank) -> None:
        recording = team.recordings[self.number]
        assert isinstance(recording, ReplayRecord)
        if self.part == 0:
            recording.begin(rank.values, self.formals)
        steps = recording.parts[self.part]
        done = recording.locals[self.part].run(rank, team, steps, self.first_move)
        for step in steps[done:]:
            execute(step, rank, team, self.first_move)
        if self.part == len(recording.parts) - 1:
            recording.end(rank.values, self.first)
        team.done += 1


@attrs.frozen
class Forget:
    """Let kept commands, and what they have captured, go."""

    number: int

    def execute(self, rank: Rank, team: TeamOnRank) -> None:
        del rank
        team.recordings.pop(self.number, None)
        team.done += 1
