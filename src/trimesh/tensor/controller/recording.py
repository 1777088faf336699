r"""Recordings of functions: the commands of one call, replayable with other tensors.

A function is recorded twice, in its second and third call, as the first may set up state. Comparing both gives the role
of each tensor in a replay:

    formal     a tensor among the arguments
    captured   one that existed before: parameters, the state of an optimizer
    internal   one that the call has made: freed by its end, or a result, or *kept* elsewhere (`p.grad`)
    carried    captured by a call, kept by the call before it: the next one starts from the tensor that this one kept

RC-1 Both recordings issue the same operations with the same numbers; else the error names the first that differs.
RC-2 A replay reads only formal, captured and carried tensors, so that it computes the same as a call.
RC-3 Ranks that are in several views run commands in the order of the call: the commands of such a view are split into
     parts, and commands of the other views run between them. If views have no rank in common, each has one part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch

from trimesh.tensor.protocol.messages import DEFINE, FREE, MOVE_OPERANDS, RecordingError

if TYPE_CHECKING:
    from trimesh.tensor.controller.shapes import Line, Plan
    from trimesh.tensor.controller.team import Team


@attrs.frozen
class RecordedCommand:
    """One command of a recording.

    Attributes:
        team: Team of the command.
        plan: Plan of its operation.
        first: Ref of its first output.
        outputs: Number of outputs.
        operands: Refs, numbers, indices of bodies.
        line: Line that issued it.
        freed: Refs that were freed before it.
    """

    team: Team
    plan: Plan
    first: int
    outputs: int
    operands: Sequence[Any]
    line: Line
    freed: Sequence[int]

    @property
    def made(self) -> range:
        """Refs of its outputs."""
        return range(self.first, self.first + self.outputs)

    @property
    def refs(self) -> list[int]:
        """Refs of its operands."""
        return [operand for kind, operand in zip(self.plan.kinds, self.operands, strict=True) if kind == "r"]


@attrs.define(eq=False)
class Recorder:
    """Records the commands of a call.

    Attributes:
        formals: Team of each tensor among the arguments, by ref.
        commands: The commands, in order.
        bodies: Bodies of the commands; operands are indices of it.
    """

    formals: Mapping[int, Team]
    commands: list[RecordedCommand] = attrs.field(factory=list[RecordedCommand])
    bodies: list[bytes] = attrs.field(factory=list[bytes])

    def took(
        self,
        team: Team,
        plan: Plan,
        first: int,
        outputs: int,
        operands: Sequence[Any],
        line: Line,
        freed: Sequence[int],
    ) -> None:
        """Record a command that has been issued.

        Raises:
            RecordingError: The command sends a value to the controller.
        """
        if plan.name in _UNRECORDED:
            read = [operand for kind, operand in zip(plan.kinds, operands, strict=True) if kind == "r"]
            raise self.looked(read, line, "the size" if plan.name == "metadata" else "a value")
        numbered = list(operands)
        for index, kind in enumerate(plan.kinds):
            if kind == "b":
                self.bodies.append(bytes(team.bodies[operands[index]]))
                numbered[index] = len(self.bodies) - 1
        self.commands.append(RecordedCommand(team, plan, first, outputs, numbered, line, freed))

    def looked(self, read: Sequence[int], line: Line, what: str = "a value") -> RecordingError:
        """Return the error for a request of tensor values during a recording."""
        made = next((one for one in reversed(self.commands) if not set(read).isdisjoint(one.made)), None)
        of = "" if made is None else f" of what {made.plan.name} returns"
        code, number = line
        return RecordingError(
            "a recorded function must not read values, as its Python code is not run in a replay, got a read of "
            f"{what}{of}, at {code.co_filename}:{number} in {code.co_qualname}: read what the function returns instead"
        )

    def end(self) -> None:
        """Drop commands for ranks on which the call has not computed."""
        computing = {one.team for one in self.commands if one.plan.name not in _EVERYWHERE}
        self.commands = [one for one in self.commands if one.team in computing]

    @property
    def teams(self) -> list[Team]:
        """Teams of the commands and of the arguments that these use."""
        teams = dict.fromkeys(one.team for one in self.commands)
        used = {ref for one in self.commands for ref in one.refs}
        teams.update(dict.fromkeys(team for ref, team in self.formals.items() if ref in used))
        return list(teams)

    def internal(self) -> set[int]:
        """Return the refs of tensors that the call has made."""
        return {ref for one in self.commands for ref in one.made}


_EVERYWHERE: Final = frozenset({"keep_generators", "give_generators_back"})
"""Kernels issued for every team of a process, whichever the caller uses: see `upload`."""

_UNRECORDED: Final = frozenset({"fetch_full", "function_fetch", "function_inspect", "metadata"})
"""Kernels that send a value to the controller."""


@attrs.frozen
class TeamRecording:
    """Recorded commands of the ranks of one view.

    Attributes:
        team: Team of the view.
        streams: Its commands, in parts, with the refs of the last recording; formals have new refs, and moves count
            from 0.
        bodies: Bodies of the commands.
        places: Indices of its tensors among the arguments.
        formals: Refs of these tensors in the streams.
        results: Refs of its tensors among the function's results.
        captured: Refs of captured tensors.
        carried: Pairs of refs: kept under the first, captured under the second by the next call.
    """

    team: Team
    streams: Sequence[list[Any]]
    bodies: Sequence[bytes]
    places: Sequence[int]
    formals: Sequence[int]
    results: Sequence[int]
    captured: Sequence[int]
    carried: Sequence[tuple[int, int]]


@attrs.frozen
class Recording:
    """A call that can be replayed.

    Attributes:
        of_teams: Recorded commands, by view.
        order: Order of the parts: index in `of_teams`, index of the part.
        moves: Number of moves.
    """

    of_teams: Sequence[TeamRecording]
    order: Sequence[tuple[int, int]]
    moves: int


def compare(before: Recorder, after: Recorder, results: Mapping[int, Team], freed: set[int], formals: int) -> Recording:
    """Make a recording from two recorded calls.

    Args:
        before: Recorder of the second call.
        after: Recorder of the third call.
        results: Team of each ref that the third call has returned.
        freed: Refs that are not held any more, except results.
        formals: First of as many unused refs as there are formals.

    Raises:
        RecordingError: The calls have issued different commands.
    """
    same = _Correspondence(before, after)
    for one, other in zip(before.commands, after.commands, strict=False):
        same.check(one, other)
    if len(before.commands) != len(after.commands):
        raise RecordingError(
            f"a recorded function must do the same in each call, got {len(before.commands)} operations and then "
            f"{len(after.commands)}: branches and loops of its Python code must not change"
        )
    internal = after.internal()
    kept = internal - freed - set(results)
    streams = _Streams(
        renamed={ref: formals + index for index, ref in enumerate(after.formals)},
        moves=same.moves,
        internal=internal,
    )
    teams = after.teams
    segments = _segments(after.commands)
    of_teams: list[TeamRecording] = []
    starts: list[tuple[int, int]] = []
    ends: list[tuple[int, int]] = []
    for place, team in enumerate(teams):
        own = [commands for other, commands in segments if other is team]
        is_alone = not any(other is not team and team.shares_order(other) for other in teams)
        written = streams.of(own)
        if not is_alone:
            written = [[], *written, []]
            starts.append((place, 0))
            ends.append((place, len(written) - 1))
        made = {ref for commands in own for one in commands for ref in one.made}
        last = sorted(made - kept - set(results) - streams.dropped)
        if last:
            written[-1] += (FREE, last)
        carried = [(new, old) for old in same.carried for new in [same.after_of[old]] if new in kept and new in made]
        given = [(index, ref) for index, (ref, other) in enumerate(after.formals.items()) if other is team]
        known = internal | set(after.formals) | set(same.carried)
        used = dict.fromkeys(ref for commands in own for one in commands for ref in one.refs)
        of_teams.append(
            TeamRecording(
                team,
                written,
                [after.bodies[index] for index in streams.take_bodies()],
                [index for index, _ in given],
                [streams.renamed[ref] for _, ref in given],
                [ref for ref, other in results.items() if other is team],
                [ref for ref in used if ref not in known],
                carried,
            )
        )
    seen: dict[Team, int] = dict.fromkeys((teams[place] for place, _ in starts), 1)
    order = list(starts)
    for team, _ in segments:
        part = seen.get(team, 0)
        seen[team] = part + 1
        order.append((teams.index(team), part))
    return Recording(of_teams, [*order, *ends], len(same.moves))


def _segments(commands: Iterable[RecordedCommand]) -> list[tuple[Team, list[RecordedCommand]]]:
    """Group commands by team; a team's commands stay in one group unless another team's must run in between."""
    segments: list[tuple[Team, list[RecordedCommand]]] = []
    growing: dict[Team, list[RecordedCommand]] = {}
    for one in commands:
        done = [other for other in growing if other is not one.team and one.team.shares_order(other)]
        segments += [(other, growing.pop(other)) for other in done]
        growing.setdefault(one.team, []).append(one)
    return [*segments, *growing.items()]


@attrs.define(eq=False)
class _Streams:
    """Encoder of recorded commands as streams.

    Attributes:
        renamed: New ref of each formal, by its ref in the last recording.
        moves: Index of each move in the call, by its number in the last recording.
        internal: Refs that the call makes.
        dropped: Refs of these that a stream frees.
    """

    renamed: Mapping[int, int]
    moves: Mapping[int, int]
    internal: set[int]
    dropped: set[int] = attrs.field(factory=set[int])
    _bodies: dict[int, int] = attrs.field(factory=dict[int, int])

    def of(self, parts: Sequence[Sequence[RecordedCommand]]) -> list[list[Any]]:
        defined: set[int] = set()
        streams: list[list[Any]] = []
        for commands in parts:
            stream: list[Any] = []
            for one in commands:
                if one.plan.number not in defined:
                    defined.add(one.plan.number)
                    stream += (DEFINE, one.plan.number, one.plan.description)
                gone = sorted((self.internal & set(one.freed)) - self.dropped)
                if gone:
                    self.dropped.update(gone)
                    stream += (FREE, gone)
                stream += (one.plan.number, one.first, *self._operands(one))
            streams.append(stream)
        return streams

    def take_bodies(self) -> list[int]:
        """Return the indices of the last team's bodies, in order."""
        taken, self._bodies = list(self._bodies), {}
        return taken

    def _operands(self, one: RecordedCommand) -> list[Any]:
        operands = list(one.operands)
        for index, kind in enumerate(one.plan.kinds):
            if kind == "r":
                operands[index] = self.renamed.get(operands[index], operands[index])
            elif kind == "b":
                operands[index] = self._bodies.setdefault(operands[index], len(self._bodies))
            elif MOVE_OPERANDS.get(one.plan.name) == index:
                operands[index] = self.moves[operands[index]]
        return operands


@attrs.define(eq=False)
class _Correspondence:
    """Mapping between the refs of two recordings.

    Attributes:
        after_of: Ref in the second recording, by the ref of the first at the same place.
        carried: Refs that the first has made and the second captures.
        moves: Index of each move, by its number in the second recording.
    """

    before: Recorder
    after: Recorder
    after_of: dict[int, int] = attrs.field(init=False)
    carried: dict[int, None] = attrs.field(factory=dict[int, None])
    moves: dict[int, int] = attrs.field(factory=dict[int, int])
    _made_before: set[int] = attrs.field(init=False)
    _moves_before: dict[int, int] = attrs.field(factory=dict[int, int])

    def __attrs_post_init__(self) -> None:
        self.after_of = dict(zip(self.before.formals, self.after.formals, strict=True))
        self._made_before = self.before.internal()

    def check(self, one: RecordedCommand, other: RecordedCommand) -> None:
        """Compare two commands at the same place, and add their refs to the mapping."""
        if one.plan is not other.plan:
            is_other = one.plan.name != other.plan.name
            then = f"{one.plan.name} and then {other.plan.name}" if is_other else f"{one.plan.name} of another kind"
            raise self._differs(other, then)
        if one.team is not other.team:
            raise self._differs(other, f"{one.plan.name} on {one.team.name} and then on {other.team.name}")
        move = MOVE_OPERANDS.get(one.plan.name)
        for index, (kind, old, new) in enumerate(zip(one.plan.kinds, one.operands, other.operands, strict=True)):
            if index == move:
                known = self._moves_before.setdefault(old, len(self._moves_before))
                if self.moves.setdefault(new, len(self.moves)) != known:
                    raise self._differs(other, f"{one.plan.name} of another move")
                continue
            if kind == "n" and (old != new and not (old != old and new != new)):  # noqa: PLR0124 - nan
                raise self._differs(other, f"{one.plan.name} with {old!r} and then {new!r}")
            if kind == "b" and self.before.bodies[old] != self.after.bodies[new]:
                raise self._differs(other, f"{one.plan.name} with other data")
            if kind == "r" and self.after_of.get(old, old) != new:
                if new not in self._made_before:
                    raise self._differs(other, f"{one.plan.name} of another tensor")
                self.carried[new] = None
        for index in range(one.outputs):
            self.after_of[one.first + index] = other.first + index

    def _differs(self, other: RecordedCommand, got: str) -> RecordingError:
        code, line = other.line
        return RecordingError(
            f"a recorded function must do the same in each call, got {got}, issued at {code.co_filename}:{line} "
            f"in {code.co_qualname}: a value that changes must be a tensor (an argument, or the state of a fused "
            "optimizer), not a Python number"
        )


# ---- compiling -------------------------------------------------------------------------------------------------------

# `torch.compile` around mesh tensors is refused: it has no operations to compile, and reorders Python code.
#
# The compiler cannot trace a tensor without memory. It would run each operation by itself, and compile trimesh's own
# functions, which number and send commands: nothing would be faster, and the order of commands would be undefined.

is_traced: Final[Any] = torch.compiler.is_dynamo_compiling
"""Returns whether the calling code is being traced by the compiler."""

_compiler: Final[Any] = torch._C._dynamo.eval_frame.get_eval_frame_callback  # type: ignore[attr-defined, unused-ignore]


def check_not_compiled() -> None:
    """Refuse operations on mesh tensors in a compiled function.

    Raises:
        TypeError: The code that runs was given to `torch.compile`.
    """
    if _compiler():
        raise TypeError(
            "torch.compile cannot compile operations on tensors of a mesh, got some in a compiled function or module: "
            "compile what runs on the ranks, in a function under @trimesh.remote, and record a whole step by "
            "trimesh.compile"
        )


# The compiler must not trace this function: it warns of C functions that it does not know.
check_not_compiled._torchdynamo_disable = True  # type: ignore[attr-defined]
