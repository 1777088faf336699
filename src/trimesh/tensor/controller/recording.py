r"""What the commands of one call of a function are, whichever tensors it is called with.

A function is recorded twice, in its second and third call: the first may set up what later calls find. From what both
have done in common follows what a replay has to do:

    formal     a tensor among the arguments
    captured   one that was there before: parameters, the state of an optimizer
    internal   one that the call has made: freed by its end, or a result, or *kept* elsewhere (`p.grad`)
    carried    captured by a call, kept by the call before it: the next one starts from what this one has kept

RC-1 both recordings issue the same operations with the same numbers; else the error names the first that differs.
RC-2 a replay reads of the world only what is formal, captured or carried, so that it computes what a call would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import attrs

from trimesh.tensor.protocol.errors import RecordingError
from trimesh.tensor.protocol.messages import DEFINE, FREE

if TYPE_CHECKING:
    from trimesh._transport.interface.base import Buffer
    from trimesh.tensor.controller.plan import Line, Plan


class Issuer(Protocol):
    """What issues the commands that are recorded: a `Team`."""

    bodies: list[Buffer]

    @property
    def name(self) -> str:
        """For people."""
        ...


@attrs.frozen
class RecordedCommand:
    """One command.

    Attributes:
        plan: Its operation.
        first: Ref of its first output.
        outputs: How many it has.
        operands: Refs, numbers, numbers of bodies.
        line: Where it was issued.
        freed: Tensors that were gone before it.
    """

    plan: Plan
    first: int
    outputs: int
    operands: Sequence[Any]
    line: Line
    freed: Sequence[int]


@attrs.define(eq=False)
class Recorder:
    """Listens to the commands of a call.

    Attributes:
        formals: Refs of the tensors among its arguments.
        team: Whose commands they are, once there is one.
        commands: In order.
        bodies: What they carry; operands number them.
    """

    formals: Sequence[int]
    team: Issuer | None = None
    commands: list[RecordedCommand] = attrs.field(factory=list[RecordedCommand])
    bodies: list[bytes] = attrs.field(factory=list[bytes])
    _early: list[tuple[Issuer, RecordedCommand]] = attrs.field(factory=list["tuple[Issuer, RecordedCommand]"])

    def took(
        self,
        team: Issuer,
        plan: Plan,
        first: int,
        outputs: int,
        operands: Sequence[Any],
        line: Line,
        freed: Sequence[int],
    ) -> None:
        """Take a command that has been issued.

        Raises:
            RecordingError: It is of another team than those before, or brings a value to the controller.
        """
        if plan.name in _EVERYWHERE and team is not self.team:
            if self.team is None:
                self._early.append((team, RecordedCommand(plan, first, outputs, list(operands), line, freed)))
            return
        if self.team is None:
            self.team = team
            self.commands = [early for other, early in self._early if other is team]
        elif team is not self.team:
            raise RecordingError(
                f"a recorded function must compute on one mesh, got {self.team.name} and then {team.name}: "
                "record the parts on each mesh by themselves"
            )
        if plan.name in _UNRECORDED:
            raise RecordingError(
                f"a recorded function must not {_UNRECORDED[plan.name]}, for it runs again without its Python code: "
                "do that with what it returns"
            )
        kinds = plan.kinds
        numbered = list(operands)
        for index, kind in enumerate(kinds):
            if kind == "b":
                self.bodies.append(bytes(team.bodies[operands[index]]))
                numbered[index] = len(self.bodies) - 1
        self.commands.append(RecordedCommand(plan, first, outputs, numbered, line, freed))

    def internal(self) -> set[int]:
        """Return the refs that the call has made."""
        return {ref for one in self.commands for ref in range(one.first, one.first + one.outputs)}

    def captured(self) -> list[int]:
        """Return the refs that were there before the call, in the order of their first use."""
        known = self.internal() | set(self.formals)
        return list(
            dict.fromkeys(
                operand
                for one in self.commands
                for kind, operand in zip(one.plan.kinds, one.operands, strict=True)
                if kind == "r" and operand not in known
            )
        )


_EVERYWHERE: Final = frozenset({"keep_generators", "give_generators_back"})
"""What is issued for every team of a process, wherever the caller computes: see `generator_states`."""

_UNRECORDED: Mapping[str, str] = {
    "fetch": "look at values",
    "fetch_full": "look at values",
    "function_fetch": "look at values",
    "function_inspect": "look at values",
    "metadata": "look at values",
    "send": "move tensors between ranks",
}


@attrs.frozen
class Recording:
    """A call that can be replayed.

    Attributes:
        stream: Its commands, with the refs of the last recording; those of formals are new.
        formals: Refs that stand for the tensors among the arguments, in the stream.
        results: Refs of what it returns.
        captured: Refs that were there before.
        carried: Pairs of refs: what is kept under the first is captured under the second by the next call.
    """

    stream: list[Any]
    formals: Sequence[int]
    results: Sequence[int]
    captured: Sequence[int]
    carried: Sequence[tuple[int, int]]


def compare(before: Recorder, after: Recorder, results: Sequence[int], freed: set[int], formals: int) -> Recording:
    """Make a recording of two calls.

    Args:
        before: Of the second call.
        after: Of the third.
        results: Refs that the third has returned.
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
    renamed = {ref: formals + index for index, ref in enumerate(after.formals)}
    stream: list[Any] = []
    for plan in {one.plan: None for one in after.commands}:
        stream += (DEFINE, plan.number, plan.description)
    dropped: set[int] = set()
    for one in after.commands:
        gone = sorted((internal & set(one.freed)) - dropped)
        if gone:
            dropped.update(gone)
            stream += (FREE, gone)
        operands = [
            renamed.get(operand, operand) if kind == "r" else operand
            for kind, operand in zip(one.plan.kinds, one.operands, strict=True)
        ]
        stream += (one.plan.number, one.first, *operands)
    last = sorted(internal - kept - set(results) - dropped)
    if last:
        stream += (FREE, last)
    carried = [(new, old) for old in same.carried for new in [same.after_of[old]] if new in kept]
    captured = [ref for ref in after.captured() if ref not in same.carried]
    return Recording(stream, list(renamed.values()), list(results), captured, carried)


@attrs.define(eq=False)
class _Correspondence:
    """Which ref of one recording is which of the other.

    Attributes:
        after_of: By ref of the first: that of the second with the same place.
        carried: Refs that the first has made and the second captures.
    """

    before: Recorder
    after: Recorder
    after_of: dict[int, int] = attrs.field(init=False)
    carried: dict[int, None] = attrs.field(factory=dict[int, None])
    _made_before: set[int] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.after_of = dict(zip(self.before.formals, self.after.formals, strict=True))
        self._made_before = self.before.internal()

    def check(self, one: RecordedCommand, other: RecordedCommand) -> None:
        """Compare two commands of the same place, and learn from them."""
        if one.plan is not other.plan:
            raise self._differs(other, f"{one.plan.name} and then {other.plan.name}")
        for kind, old, new in zip(one.plan.kinds, one.operands, other.operands, strict=True):
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
