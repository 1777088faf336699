"""A recording as a rank has once run it: the operators on its parts, without the rules that have found them.

LP-1 A program runs where what it reads lies as it did when the program was made, and the same tensors are the same.
LP-2 Commands keep their boundaries: one that fails leaves what it would by the rules, and those after it run by them.
LP-3 A command that cannot be taken apart (a function of the user's, a move) runs as it is, between the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import attrs
import torch

from trimesh.tensor.dtensor.copied_view import has_copied_views
from trimesh.tensor.rank.kernel import Poison, global_tensor, local_of
from trimesh.tensor.rank.rank import Command, Rank, TeamOnRank, execute
from trimesh.tensor.rules.cuts import SUM, cuts_of
from trimesh.tensor.rules.engine import engine_of

if TYPE_CHECKING:
    from trimesh.tensor.rank.rank import Step
    from trimesh.tensor.rules.engine import OperatorCounts, RuleEngine


@attrs.frozen(eq=False)
class PartLayout:
    """How a value lies on this rank.

    Attributes:
        spec: What torch knows of a global tensor; None for any other value.
        size, stride, dtype: Of this rank's part, or of a tensor of its own; None for what is no tensor.
    """

    spec: Any = None
    size: torch.Size | None = None
    stride: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None

    def fits(self, value: Any) -> bool:
        """Whether a value lies so."""
        if not isinstance(value, torch.Tensor):
            return self.size is None and value is not None and type(value) is not Poison
        part, spec = local_of(value), getattr(value, "_spec", None)
        if spec is not self.spec and (spec is None or self.spec is None or not _is_alike(spec, self.spec)):
            return False
        return part.stride() == self.stride and part.size() == self.size and part.dtype is self.dtype


def _is_in_shared_parts(rank: Rank, value: Any) -> bool:
    return is_in_parts(getattr(value, "_spec", None)) and engine_of(rank).sums.is_shared(value)


def _lay_of(value: Any) -> tuple[Any, Any]:
    """Return the part of a value, and what torch knows of it."""
    return getattr(value, "_local_tensor", value), getattr(value, "_spec", None)


def is_in_parts(spec: Any) -> bool:
    """Whether what torch knows of a tensor says that its parts are to be added up."""
    return spec is not None and SUM in cuts_of(spec.placements)


def layout_of(value: Any) -> PartLayout:
    if not isinstance(value, torch.Tensor):
        return PartLayout()
    part = local_of(value)
    return PartLayout(getattr(value, "_spec", None), part.size(), part.stride(), part.dtype)


def _is_alike(one: Any, other: Any) -> bool:
    # To torch device meshes over the same ranks are equal, whatever groups they name.
    return one.device_mesh is other.device_mesh and bool(one == other)


@attrs.frozen
class Made:
    """A value of a program, as it was made.

    Attributes:
        slot: Of its part; -1 for what is no tensor.
        layout: How it lay.
    """

    slot: int
    layout: PartLayout


class Slots(list[Any]):
    """The parts of one run, by number, and the values that they are parts of.

    Args:
        program: That runs.

    Attributes:
        done: Steps that were begun.
    """

    def __init__(self, program: LocalProgram) -> None:
        super().__init__([None] * program.slots)
        self.done = 0
        self._values = program.values
        self._objects = dict(program.constants)
        self._laid: dict[int, tuple[int, Any]] = {}

    def take(self, number: int, value: Any) -> None:
        """Take a value that was not made by operators on parts."""
        self._objects[number] = value
        if isinstance(value, torch.Tensor):
            self[self._values[number].slot] = local_of(value)

    def lay(self, number: int, slot: int, spec: Any) -> None:
        """Let a global tensor have another part, and lie otherwise."""
        self._laid[number] = slot, spec
        found = self._objects.get(number)
        if found is not None:
            found._local_tensor, found._spec = self[slot], spec

    def value(self, number: int) -> Any:
        found = self._objects.get(number)
        if found is None:
            made = self._values[number]
            slot, spec = self._laid.get(number, (made.slot, made.layout.spec))
            found = self._objects[number] = self[slot] if spec is None else global_tensor(self[slot], spec)
        return found

    def found(self, number: int) -> Any:
        """Return a value, if anything has asked for it, and it was not forgotten."""
        return self._objects.get(number)

    def is_known_as(self, number: int, value: Any) -> bool:
        """Whether a tensor is the one of a number, or, where that has none yet, a new one."""
        if not isinstance(value, torch.Tensor):
            return True
        known = self._objects.get(number)
        return known is value if known is not None else all(value is not one for one in self._objects.values())

    def forget(self, number: int) -> None:
        """Let a value go."""
        self._objects.pop(number, None)

    def close(self) -> None:
        """Let all go: an error keeps the frame that has these."""
        self.clear()
        self._objects.clear()


Op = Callable[[Slots], None]
"""One operator on parts."""

Named = tuple[int, int]
"""A ref, and the number of the value that it stands for."""


@attrs.frozen
class LocalStep:
    """What a rank does for one step of a recording.

    Attributes:
        step: It, as it runs by the rules.
        ops: The operators on parts; None for a command that runs as it is.
        given: What must be there for one that runs as it is.
        made: What it makes.
        replaced: Those of the refs of what it makes that name something of the replay before until then.
        relaid: Values that one that runs as it is lays anew, and how they are then.
        freed: What has no name after it.
        dropped: Slots that nothing needs after it.
        ran: The operators on global tensors that its operators on parts stand for.
        count: How many commands it is: 1, or 0.
        is_named: Whether it replaces or frees anything.
    """

    step: Step
    ops: Sequence[Op] | None
    given: Sequence[Named] = ()
    made: Sequence[Named] = ()
    replaced: Sequence[int] = ()
    relaid: Sequence[tuple[int, Made]] = ()
    freed: Sequence[Named] = ()
    dropped: Sequence[int] = ()
    ran: OperatorCounts | None = None
    count: int = attrs.field(init=False)
    is_named: bool = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "count", int(type(self.step) is Command))
        object.__setattr__(self, "is_named", bool(self.replaced or self.freed))


class _Counts:
    """Lets commands count that ran as operators on parts.

    Args:
        team: Whose they are.
        is_counted: Whether they do, rather than all as one.
    """

    def __init__(self, team: TeamOnRank, is_counted: bool) -> None:  # noqa: FBT001
        self.is_counted = is_counted
        self._team = team
        self._more = team.steps - team.done

    def settle(self) -> None:
        """Let those count that have run so far."""
        if self.is_counted:
            self._team.done = self._team.steps - self._more


@attrs.frozen(eq=False)
class LocalProgram:
    """What a rank does for a recording.

    Attributes:
        externals: Refs of what it reads and has not made; their places are the numbers of these values.
        twins: Further refs of some of them.
        alone: The numbers of those of whose parts it makes a sum: nothing else may share their memory.
        steps: In order.
        values: By number.
        constants: By number: what is no tensor, and the same each time.
        slots: How many parts there are.
        makes_parts: Whether it makes tensors in parts of a sum.
        ran: The operators on global tensors that its steps stand for, as the engine of the rules counts them.
    """

    externals: Sequence[int]
    twins: Sequence[Named]
    alone: Sequence[int]
    steps: Sequence[LocalStep]
    values: Sequence[Made]
    constants: Mapping[int, Any]
    slots: int
    makes_parts: bool
    ran: OperatorCounts
    _left: dict[int, int] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "_left", _live(self.steps))

    def fits(self, values: Mapping[int, Any], engine: RuleEngine | None) -> bool:
        """Whether what it reads is as it was."""
        found = [values.get(ref) for ref in self.externals]
        return (
            all(made.layout.fits(value) for value, made in zip(found, self.values, strict=False))
            and all(values.get(ref) is found[number] for ref, number in self.twins)
            and len(set(map(id, found))) == len(found)
            and not any(engine is not None and engine.sums.is_shared(found[number]) for number in self.alone)
        )

    def run(self, rank: Rank, team: TeamOnRank, first_move: int, *, is_counted: bool) -> int:
        """Do it; return how many steps were done, of which the last may have failed. Never raises.

        Args:
            rank: That does it.
            team: Whose commands these are.
            first_move: What moves are numbered from.
            is_counted: See `LearntReplay`.
        """
        counts = _Counts(team, is_counted)
        slots = Slots(self)
        for number, ref in enumerate(self.externals):
            slots.take(number, rank.values[ref])
        try:
            self._do(rank, team, slots, first_move, counts)
        except BaseException as error:  # noqa: BLE001 - waits for whoever fetches
            self._put_back(rank, slots, slots.done - 1)
            slots.close()
            counts.settle()
            _fail(rank, team, self.steps[slots.done - 1].step, error)
        else:
            self._put_back(rank, slots, slots.done)
        counts.settle()
        self._count(rank, slots.done)
        return slots.done

    def _do(self, rank: Rank, team: TeamOnRank, slots: Slots, first_move: int, counts: _Counts) -> None:
        """Do steps until one has not done as it did."""
        for one in self.steps:
            slots.done += 1
            if one.ops is None:
                counts.settle()
                if not self._run_as_it_is(rank, team, slots, one, first_move, is_counted=counts.is_counted):
                    break
            else:
                for op in one.ops:
                    op(slots)
                team.steps += one.count
                if one.is_named:
                    _name(rank, slots, one)
            for slot in one.dropped:
                slots[slot] = None

    def _run_as_it_is(
        self, rank: Rank, team: TeamOnRank, slots: Slots, one: LocalStep, first_move: int, *, is_counted: bool
    ) -> bool:
        """Run a command by the rules; return whether all of it is as it was."""
        given = [(ref, number, slots.value(number)) for ref, number in one.given]
        lay = [_lay_of(value) for _, _, value in given]
        rank.values.update((ref, value) for ref, _, value in given)
        execute(one.step, rank, team, first_move, is_counted=is_counted)
        relaid = dict(one.relaid)
        for (ref, number, value), (part, spec) in zip(given, lay, strict=True):
            if rank.values.get(ref) is not value or _is_in_shared_parts(rank, value):  # it has failed, or is not alone
                return False
            made, (now, spec_now) = relaid.get(number), _lay_of(value)
            if (now is not part or spec_now is not spec) if made is None else not made.layout.fits(value):
                return False
        for ref, number in one.made:
            value = rank.values.get(ref)
            if not self.values[number].layout.fits(value) or not slots.is_known_as(number, value):
                return False
            slots.take(number, value)
        for number, made in one.relaid:
            slots[made.slot] = local_of(slots.value(number))
            slots.lay(number, made.slot, made.layout.spec)
        return not has_copied_views(rank)

    def _put_back(self, rank: Rank, slots: Slots, done: int) -> None:
        """Let a rank have what there is after some steps."""
        live = self._left if done == len(self.steps) else _live(self.steps[:done])
        ran = self.steps[done - 1] if done else None
        # What a command that ran as it is was given and has made is there, and need not be as it was.
        there = {ref for ref, _ in (*ran.given, *ran.made)} if ran is not None and ran.ops is None else set[int]()
        for ref, number in live.items():
            if ref not in there:
                rank.values[ref] = slots.value(number)
        if self.makes_parts:
            self._tell_of_parts(rank, slots, {number for number in live.values() if self.values[number].slot >= 0})

    def _count(self, rank: Rank, done: int) -> None:
        """Count the operators of some steps; those that ran by the rules have counted themselves."""
        if not self.ran.all:
            return
        counts = engine_of(rank).counts
        for ran in [self.ran] if done == len(self.steps) else [one.ran for one in self.steps[:done]]:
            if ran is not None:
                counts.add(ran)

    def _tell_of_parts(self, rank: Rank, slots: Slots, made: set[int]) -> None:
        """Let the rules know of tensors in parts that share memory, of each other's or of what was given."""
        sums = engine_of(rank).sums
        for number in (*made, *range(len(self.externals))):
            value = slots.found(number)
            if value is not None and is_in_parts(getattr(value, "_spec", None)):
                sums.viewed(value, [value])


def _live(steps: Sequence[LocalStep]) -> dict[int, int]:
    """Return what steps make and do not free, by ref."""
    live: dict[int, int] = {}
    for one in steps:
        live.update(one.made)
        for ref, _ in one.freed:
            live.pop(ref, None)
    return live


def _name(rank: Rank, slots: Slots, one: LocalStep) -> None:
    """Forget what a step forgets, and what had the names of what it makes."""
    for ref in one.replaced:
        rank.values.pop(ref, None)
    for ref, number in one.freed:
        rank.values.pop(ref, None)
        slots.forget(number)


def _fail(rank: Rank, team: TeamOnRank, step: Step, error: BaseException) -> None:
    assert type(step) is Command, "nothing else has operators"
    kinds = step.signature.kinds
    operands = [rank.values[one] if kind == "r" else one for one, kind in zip(step.operands, kinds, strict=True)]
    rank.fail(team, step, operands, error)
    team.steps += 1


# ---- operators on parts, as they were noted during a replay by the rules, and what does them again -------------------


@attrs.frozen
class PartSlot:
    """Stands for a part among the arguments of an operator."""

    number: int


@attrs.frozen
class NotedCall:
    """An operator on parts.

    Attributes:
        operator: Of torch.
        args, kwargs: Its arguments, with a `PartSlot` for each part.
        outs: The slots of what it makes; -1 for what was there.
        is_list: Whether it returns several.
    """

    operator: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    outs: Sequence[int]
    is_list: bool


@attrs.frozen
class Relayout:
    """A global tensor that lies otherwise from here on: its number, and how."""

    number: int
    made: Made


def slots_in(value: Any) -> Iterator[int]:
    """Yield the numbers of the parts in an argument."""
    if type(value) is PartSlot:
        yield value.number
    elif isinstance(value, list):
        for one in value:
            yield from slots_in(one)


def op_of(call: NotedCall | Relayout, dropped: Sequence[int]) -> Op:
    """Return what does again what was seen, and lets slots go that nothing needs after it."""
    op = _again(call)
    if not dropped:
        return op

    def run(slots: Slots) -> None:
        op(slots)
        for slot in dropped:
            slots[slot] = None

    return run


def _again(call: NotedCall | Relayout) -> Op:
    if isinstance(call, Relayout):
        number, slot, spec = call.number, call.made.slot, call.made.layout.spec
        return lambda slots: slots.lay(number, slot, spec)
    function, kwargs, outs = call.operator, call.kwargs, call.outs
    tensors = list(slots_in([call.args, list(kwargs.values())]))
    leading = [one.number for one in takewhile(lambda one: type(one) is PartSlot, call.args[:2])]
    if len(outs) == 1 and not call.is_list and outs[0] >= 0 and leading == tensors and tensors:
        return _simple(function, leading, call.args[len(leading) :], kwargs, outs[0])

    def run(slots: Slots) -> None:
        named = {name: _filled(one, slots) for name, one in kwargs.items()}
        result = function(*_filled(call.args, slots), **named)
        if call.is_list:
            for one, out in zip(result, outs, strict=True):
                if out >= 0:
                    slots[out] = one
        elif outs[0] >= 0:
            slots[outs[0]] = result

    return run


def _simple(function: Any, tensors: Sequence[int], rest: Sequence[Any], kwargs: dict[str, Any], out: int) -> Op:
    """Return an operator that takes one part or two, then what is no part, and makes one: nearly all do."""
    first, second = tensors[0], tensors[-1]

    def on_one(slots: Slots) -> None:
        slots[out] = function(slots[first], *rest, **kwargs)

    def on_two(slots: Slots) -> None:
        slots[out] = function(slots[first], slots[second], *rest, **kwargs)

    return on_one if len(tensors) == 1 else on_two


def _filled(value: Any, slots: Slots) -> Any:
    if type(value) is PartSlot:
        return slots[value.number]
    return [_filled(one, slots) for one in value] if type(value) is list else value
