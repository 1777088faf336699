r"""What the commands of one call of a function are, whichever tensors it is called with.

A function is recorded twice, in its second and third call: the first may set up what later calls find. From what both
have done in common follows what a replay has to do:

    formal     a tensor among the arguments
    captured   one that was there before: parameters, the state of an optimizer
    internal   one that the call has made: freed by its end, or a result, or *kept* elsewhere (`p.grad`)
    carried    captured by a call, kept by the call before it: the next one starts from what this one has kept

RC-1 both recordings issue the same operations with the same numbers; else the error names the first that differs.
RC-2 a replay reads of the world only what is formal, captured or carried, so that it computes what a call would.
RC-3 ranks that several views have run their commands in the order of the call: those of a view are in parts then, and
     between two parts come those of the others. Where views have no rank in common, each has one part.
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
    """One command.

    Attributes:
        team: Whose it is.
        plan: Its operation.
        first: Ref of its first output.
        outputs: How many it has.
        operands: Refs, numbers, numbers of bodies.
        line: Where it was issued.
        freed: Tensors that were gone before it.
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
        """The refs of what it makes."""
        return range(self.first, self.first + self.outputs)

    @property
    def refs(self) -> list[int]:
        """Those of what it is given."""
        return [operand for kind, operand in zip(self.plan.kinds, self.operands, strict=True) if kind == "r"]


@attrs.define(eq=False)
class Recorder:
    """Listens to the commands of a call.

    Attributes:
        formals: The tensors among its arguments, by ref, and whose they are.
        commands: In order.
        bodies: What they carry; operands number them.
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
        """Take a command that has been issued.

        Raises:
            RecordingError: It brings a value to the controller.
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
        """Return the error for what brings the value of some tensors to the controller."""
        made = next((one for one in reversed(self.commands) if not set(read).isdisjoint(one.made)), None)
        of = "" if made is None else f" of what {made.plan.name} returns"
        code, number = line
        return RecordingError(
            "a recorded function must not look at values, for it runs again without its Python code, got a look at "
            f"{what}{of}, at {code.co_filename}:{number} in {code.co_qualname}: do that with what the function returns"
        )

    def end(self) -> None:
        """Forget what was issued for ranks that the call has not computed on."""
        computing = {one.team for one in self.commands if one.plan.name not in _EVERYWHERE}
        self.commands = [one for one in self.commands if one.team in computing]

    @property
    def teams(self) -> list[Team]:
        """Whose commands they are, and whose arguments these use."""
        teams = dict.fromkeys(one.team for one in self.commands)
        used = {ref for one in self.commands for ref in one.refs}
        teams.update(dict.fromkeys(team for ref, team in self.formals.items() if ref in used))
        return list(teams)

    def internal(self) -> set[int]:
        """Return the refs that the call has made."""
        return {ref for one in self.commands for ref in one.made}


_EVERYWHERE: Final = frozenset({"keep_generators", "give_generators_back"})
"""What is issued for every team of a process, wherever the caller computes: see `upload`."""

_UNRECORDED: Final = frozenset({"fetch_full", "function_fetch", "function_inspect", "metadata"})
"""Commands that bring a value to the controller."""


@attrs.frozen
class TeamRecording:
    """What the ranks of one view do in a call.

    Attributes:
        team: Of the view.
        streams: Its commands, in parts, with the refs of the last recording; those of formals are new, and moves count
            from 0.
        bodies: What they carry.
        places: Which of the tensors among the arguments are its own.
        formals: Refs that stand for those, in the streams.
        results: Refs of what the function returns of its tensors.
        captured: Refs that were there before.
        carried: Pairs of refs: what is kept under the first is captured under the second by the next call.
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
        of_teams: What the ranks of each view do.
        order: In which order: places in `of_teams`, and which part.
        moves: How many numbers of moves it takes.
    """

    of_teams: Sequence[TeamRecording]
    order: Sequence[tuple[int, int]]
    moves: int


def compare(before: Recorder, after: Recorder, results: Mapping[int, Team], freed: set[int], formals: int) -> Recording:
    """Make a recording of two calls.

    Args:
        before: Of the second call.
        after: Of the third.
        results: Refs that the third has returned, and whose they are.
        freed: Refs that are not held any more, results aside.
        formals: The first of as many unused refs as there are formals.

    Raises:
        RecordingError: They have not done the same.
    """
    same = _Correspondence(before, after)
    for one, other in zip(before.commands, after.commands, strict=False):
        same.check(one, other)
    if len(before.commands) != len(after.commands):
        raise RecordingError(
            f"a recorded function must do the same in each call, got {len(before.commands)} operations and then "
            f"{len(after.commands)}: what its Python code decides must not change"
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
    """Return commands by team, a team's as one where those of no other one must come in between."""
    segments: list[tuple[Team, list[RecordedCommand]]] = []
    growing: dict[Team, list[RecordedCommand]] = {}
    for one in commands:
        done = [other for other in growing if other is not one.team and one.team.shares_order(other)]
        segments += [(other, growing.pop(other)) for other in done]
        growing.setdefault(one.team, []).append(one)
    return [*segments, *growing.items()]


@attrs.define(eq=False)
class _Streams:
    """Commands as ranks read them.

    Attributes:
        renamed: What stands for a formal, by its ref in the last recording.
        moves: By number of a move there, which one of the call it is.
        internal: Refs that the call makes.
        dropped: Those of them that a stream forgets.
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
        """Return which bodies the last team's commands carry, in order."""
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
    """Which ref of one recording is which of the other.

    Attributes:
        after_of: By ref of the first: that of the second with the same place.
        carried: Refs that the first has made and the second captures.
        moves: By number of a move of the second, how many came before it.
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
        """Compare two commands of the same place, and learn from them."""
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
            "optimizer), not a number of Python"
        )


# ---- compiling -------------------------------------------------------------------------------------------------------

# `torch.compile` around mesh tensors is refused: it has no operations to compile, and reorders what Python code does.
#
# The compiler cannot trace a tensor without memory. It would run each operation by itself, and our own functions, which
# number commands and send them, as compiled ones: nothing would be faster, and no order would be sure.

is_traced: Final[Any] = torch.compiler.is_dynamo_compiling
"""Whether the code that asks is read by the compiler rather than run."""

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


# Nor does the compiler read this: it warns of functions in C that it does not know.
check_not_compiled._torchdynamo_disable = True  # type: ignore[attr-defined]
