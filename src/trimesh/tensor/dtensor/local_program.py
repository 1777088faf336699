"""Local programs: a recording as a sequence of operators on one rank's parts, without dispatch by the rules.

LP-1 A program runs only if its inputs have the layouts that they had when it was made, and the same ones are identical.
LP-2 Commands keep their boundaries: one that fails has the same effects as by the rules, and later ones run by them.
LP-3 A command that cannot be decomposed (a user's function, a move) runs as it is, between the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch

from trimesh.tensor.dtensor.copied_view import has_copied_views
from trimesh.tensor.dtensor.sharding import KeptPlacements
from trimesh.tensor.rank.kernel import Poison, global_tensor, local_of
from trimesh.tensor.rank.rank import Command, Free, Rank, TeamOnRank, execute
from trimesh.tensor.rules.call import words
from trimesh.tensor.rules.cuts import SUM, cuts_of
from trimesh.tensor.rules.engine import engine_of

if TYPE_CHECKING:
    from trimesh.tensor.rank.rank import Step
    from trimesh.tensor.rules.engine import OperatorCounts, RuleEngine


@attrs.frozen(eq=False)
class PartLayout:
    """Layout of a value on this rank.

    Attributes:
        spec: `DTensorSpec` of a global tensor; None for any other value.
        size, stride, dtype: Those of this rank's part, or of a tensor per rank; None for other values.
        kept: Placements, if it is these; steps are learnt for them.
    """

    spec: Any = None
    size: torch.Size | None = None
    stride: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    kept: KeptPlacements | None = None

    def fits(self, value: Any) -> bool:
        """Return whether a value has this layout."""
        if not isinstance(value, torch.Tensor):
            return self.size is None and value is not None and type(value) is not Poison and self.kept == _kept(value)
        part, spec = local_of(value), getattr(value, "_spec", None)
        if spec is not self.spec and (spec is None or self.spec is None or not _is_alike(spec, self.spec)):
            return False
        return part.stride() == self.stride and part.size() == self.size and part.dtype is self.dtype


def _lay_of(value: Any) -> tuple[Any, Any]:
    """Return the local part of a value and its `DTensorSpec`; the value and None for other values."""
    return getattr(value, "_local_tensor", value), getattr(value, "_spec", None)


def is_in_parts(spec: Any) -> bool:
    """Return whether a `DTensorSpec` has partial placements; False for None."""
    return spec is not None and SUM in cuts_of(spec.placements)


def layout_of(value: Any) -> PartLayout:
    if not isinstance(value, torch.Tensor):
        return PartLayout(kept=_kept(value))
    part = local_of(value)
    return PartLayout(getattr(value, "_spec", None), part.size(), part.stride(), part.dtype)


def _kept(value: Any) -> KeptPlacements | None:
    return value if type(value) is KeptPlacements else None


def _is_alike(one: Any, other: Any) -> bool:
    # Torch treats device meshes over the same ranks as equal, even if their groups differ.
    return one.device_mesh is other.device_mesh and bool(one == other)


@attrs.frozen
class Made:
    """A value of a program, as recorded.

    Attributes:
        slot: Slot of its part; -1 if it is no tensor.
        layout: Its layout when it was made.
    """

    slot: int
    layout: PartLayout


class Slots(list[Any]):
    """The local parts of one run, by slot, and the values that they belong to.

    Args:
        program: The program that runs.

    Attributes:
        done: Number of steps begun.
    """

    def __init__(self, program: LocalProgram) -> None:
        super().__init__([None] * program.slots)
        self.done = 0
        self._values = program.values
        self._objects = dict(program.constants)
        self._laid: dict[int, tuple[int, Any]] = {}

    def take(self, number: int, value: Any) -> None:
        """Store a value that was not made by operators on parts."""
        self._objects[number] = value
        if isinstance(value, torch.Tensor):
            self[self._values[number].slot] = local_of(value)

    def lay(self, number: int, slot: int, spec: Any) -> None:
        """Give a global tensor the part in another slot, and another spec."""
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
        """Return a value if it was built and not forgotten; None otherwise."""
        return self._objects.get(number)

    def is_known_as(self, number: int, value: Any) -> bool:
        """Return whether a tensor is the known value of a number; if there is none yet, whether it is a new tensor."""
        if not isinstance(value, torch.Tensor):
            return True
        known = self._objects.get(number)
        return known is value if known is not None else all(value is not one for one in self._objects.values())

    def forget(self, number: int) -> None:
        """Drop a value."""
        self._objects.pop(number, None)

    def close(self) -> None:
        """Drop all values: the traceback of an error keeps the frame that holds them."""
        self.clear()
        self._objects.clear()


Op = Callable[[Slots], None]
"""One operator on parts."""

Named = tuple[int, int]
"""A ref, and the number of its value."""


@attrs.frozen
class LocalStep:
    """Local form of one step of a recording.

    Attributes:
        step: The original step, for execution by the rules.
        ops: The operators on parts; None for a command that runs as it is.
        given: Inputs of a command that runs as it is.
        made: Values that it makes.
        replaced: Refs of made values that until then name values of the previous replay.
        relaid: Values that a command that runs as it is reshards in place, and their new layouts.
        freed: Refs that it frees.
        dropped: Slots that no later operator needs.
        ran: Counts of the operators on global tensors that `ops` replaces.
        count: How many commands it counts as: 1 or 0.
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

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "count", int(type(self.step) is Command))


class _Counts:
    """Counts commands that ran as operators on parts.

    Args:
        team: The team of the commands.
        is_counted: Whether each command counts by itself, not the whole replay as one.
    """

    def __init__(self, team: TeamOnRank, is_counted: bool) -> None:  # noqa: FBT001
        self.is_counted = is_counted
        self._team = team
        self._more = team.steps - team.done

    def settle(self) -> None:
        """Update the team's count of executed commands, if each counts by itself."""
        if self.is_counted:
            self._team.done = self._team.steps - self._more


@attrs.frozen(eq=False)
class LocalProgram:
    """The program of one rank for a recording.

    Attributes:
        externals: Refs of its inputs; their positions are the numbers of these values.
        twins: Further refs of some inputs, each with the number of its value.
        alone: Numbers of inputs whose partial sums it reduces: no other tensor may share their memory.
        steps: The steps, in order.
        values: Layouts of all values, by number.
        constants: Values that are no tensors and the same in each replay, by number.
        slots: How many slots it needs.
        makes_parts: Whether it makes partial tensors.
        ran: Counts of the operators on global tensors that its steps replace, as the rule engine counts them.
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
        """Return whether all inputs have their recorded layouts and identities (LP-1)."""
        found = [values.get(ref) for ref in self.externals]
        return (
            all(made.layout.fits(value) for value, made in zip(found, self.values, strict=False))
            and all(values.get(ref) is found[number] for ref, number in self.twins)
            and len(set(map(id, found))) == len(found)
            and not any(engine is not None and engine.sums.is_shared(found[number]) for number in self.alone)
        )

    def run(self, rank: Rank, team: TeamOnRank, first_move: int, *, is_counted: bool) -> int:
        """Run the program; return how many steps ran, of which the last may have failed. Never raises.

        Args:
            rank: The rank that runs it.
            team: The team of the commands.
            first_move: Number of the first move.
            is_counted: See `LearntReplay`.
        """
        counts = _Counts(team, is_counted)
        slots = Slots(self)
        for number, ref in enumerate(self.externals):
            slots.take(number, rank.values[ref])
        try:
            self._do(rank, team, slots, first_move, counts)
        except BaseException as error:  # noqa: BLE001 - becomes the poison of its outputs
            self._put_back(rank, slots, slots.done - 1)
            slots.close()
            counts.settle()
            step = self.steps[slots.done - 1].step
            assert type(step) is Command, "nothing else has operators"
            rank.fail(team, step, error)
            team.steps += 1
        else:
            self._put_back(rank, slots, slots.done)
        counts.settle()
        self._count(rank, slots.done)
        return slots.done

    def _do(self, rank: Rank, team: TeamOnRank, slots: Slots, first_move: int, counts: _Counts) -> None:
        """Run steps until one deviates from the recording."""
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
                for ref in one.replaced:
                    rank.values.pop(ref, None)
                if type(one.step) is Free:
                    one.step.execute(rank, team)
                    for _, number in one.freed:
                        slots.forget(number)
            for slot in one.dropped:
                slots[slot] = None

    def _run_as_it_is(
        self, rank: Rank, team: TeamOnRank, slots: Slots, one: LocalStep, first_move: int, *, is_counted: bool
    ) -> bool:
        """Run a command by the rules; return whether its effects are those recorded."""
        given = [(ref, number, slots.value(number)) for ref, number in one.given]
        lay = [_lay_of(value) for _, _, value in given]
        rank.values.update((ref, value) for ref, _, value in given)
        execute(one.step, rank, team, first_move, is_counted=is_counted)
        relaid = dict(one.relaid)
        for (ref, number, value), (part, spec) in zip(given, lay, strict=True):
            if rank.values.get(ref) is not value:  # it has failed
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
        """Give a rank the values that exist after some steps."""
        live = self._left if done == len(self.steps) else _live(self.steps[:done])
        ran = self.steps[done - 1] if done else None
        # Inputs and results of a command that ran as it is are there already, and may deviate from the recording.
        there = {ref for ref, _ in (*ran.given, *ran.made)} if ran is not None and ran.ops is None else set[int]()
        for ref, number in live.items():
            if ref not in there:
                rank.values[ref] = slots.value(number)
        if self.makes_parts:
            self._tell_of_parts(rank, slots, live.values())

    def _count(self, rank: Rank, done: int) -> None:
        """Count the operators of some steps; those that ran by the rules have counted themselves."""
        if not self.ran.all:
            return
        counts = engine_of(rank).counts
        for ran in [self.ran] if done == len(self.steps) else [one.ran for one in self.steps[:done]]:
            if ran is not None:
                counts.add(ran)

    def _tell_of_parts(self, rank: Rank, slots: Slots, made: Iterable[int]) -> None:
        """Register partial tensors with the rules, which track those that share memory."""
        sums = engine_of(rank).sums
        for number in {*made, *range(len(self.externals))}:
            value = slots.found(number)
            if value is not None and is_in_parts(getattr(value, "_spec", None)):
                sums.viewed(value, [value])


def _live(steps: Sequence[LocalStep]) -> dict[int, int]:
    """Return the numbers of values that steps make and do not free, by ref."""
    live: dict[int, int] = {}
    for one in steps:
        live.update(one.made)
        for ref, _ in one.freed:
            live.pop(ref, None)
    return live


# ---- operators on parts: noted during a replay by the rules, repeated in later ones ----------------------------------


@attrs.frozen
class PartSlot:
    """Placeholder for a part among the arguments of an operator."""

    number: int


@attrs.frozen
class NotedCall:
    """An operator on parts.

    Attributes:
        operator: The torch operator.
        args, kwargs: Its arguments, with a `PartSlot` for each part.
        outs: Slots of its results; -1 for None.
        is_list: Whether it returns a list.
    """

    operator: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    outs: Sequence[int]
    is_list: bool


@attrs.frozen
class Relayout:
    """A change of layout of a global tensor: its number, and its layout from here on."""

    number: int
    made: Made


def slots_in(value: Any) -> Iterator[int]:
    """Yield the numbers of the parts in an argument."""
    if type(value) is PartSlot:
        yield value.number
    elif isinstance(value, list):
        for one in value:
            yield from slots_in(one)


def renumbered(value: Any, same: Mapping[int, int]) -> Any:
    """Return an argument with other slots for its parts, where `same` has one."""
    if type(value) is PartSlot:
        return PartSlot(same.get(value.number, value.number))
    return [renumbered(one, same) for one in value] if isinstance(value, list) else value


def op_of(call: NotedCall | Relayout, dropped: Sequence[int]) -> Op:
    """Return a function that repeats a noted call, then drops slots that no later operator needs."""
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
    function, kwargs, outs = _callable(call.operator), call.kwargs, call.outs
    tensors = list(slots_in([call.args, list(kwargs.values())]))
    leading = [one.number for one in takewhile(lambda one: type(one) is PartSlot, call.args[:2])]
    if not call.is_list and outs[0] >= 0 and leading == tensors and tensors:
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


_BOUND: Final = {
    **dict.fromkeys(
        words("""
            add.Tensor cat clone cos div.Tensor mean.dim mm mul.Tensor neg permute pow.Tensor_Scalar rsqrt sigmoid sin
            sub.Tensor sum.dim_IntList t transpose.int unsqueeze where.self
        """),
        torch,
    ),
    **dict.fromkeys(words("add_.Tensor copy_ detach expand mul_.Tensor sub_.Tensor view zero_"), torch.Tensor),
}
"""Operators that functions of torch, or methods of tensors, call with the same arguments in half of the time."""


def _callable(operator: Any) -> Any:
    """Return the fastest way to call an operator."""
    if operator.namespace == "_c10d_functional":
        return _without_autograd(operator)
    name = operator.name().removeprefix("aten::")
    return getattr(_BOUND[name], name.partition(".")[0]) if name in _BOUND else operator


def _without_autograd(operator: Any) -> Any:
    """Return an operator without its derivative, which torch has in Python: it takes longer than a small collective."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args, **kwargs)

    return run


def _simple(function: Any, tensors: Sequence[int], rest: Sequence[Any], kwargs: dict[str, Any], out: int) -> Op:
    """Return a fast path for nearly all operators: one or two parts, then other arguments, and one result."""
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
