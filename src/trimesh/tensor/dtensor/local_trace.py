"""Tracing of a replay by the rules into a `LocalProgram` of operators on this rank's parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from trimesh import limits
from trimesh.tensor.dtensor.copied_view import has_copied_views
from trimesh.tensor.dtensor.local_program import (
    LocalProgram,
    LocalStep,
    Made,
    Named,
    NotedCall,
    PartSlot,
    Relayout,
    is_in_parts,
    layout_of,
    op_of,
    renumbered,
    slots_in,
)
from trimesh.tensor.rank.kernel import Poison, local_of, memory_of
from trimesh.tensor.rank.rank import Command, Free, Rank, Step, TeamOnRank, VaryingCommand, execute, is_of_operators
from trimesh.tensor.rules.engine import OperatorCounts, engine_in

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


_PLAIN: Final = (
    int, float, complex, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
    torch.Generator,
)  # fmt: skip
"""Types of non-tensor arguments that are the same in each replay."""

_VARYING: Final = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
"""Tags of operators whose result sizes or control flow depend on data."""


_AFTER: Final = -1
"""Operator index that stands for the end of a step."""


class NotLocal(Exception):
    """A replay cannot be traced: it may vary, or does not consist of operators on parts. The text has the reason."""


@attrs.define(eq=False)
class _Seen:
    """A step, and its observed effects: see `LocalStep`."""

    step: Step
    calls: Sequence[NotedCall | Relayout] | None = ()
    given: Sequence[Named] = ()
    made: Sequence[Named] = ()
    relaid: Sequence[tuple[int, Made]] = ()
    freed: Sequence[Named] = ()
    ran: OperatorCounts | None = None


class _Listener(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Notes the operators on parts that a command runs.

    Attributes:
        slots: Slots of the live parts.
        count: Slots assigned so far.
        calls: Noted calls of the command.
        is_lost: Whether the command did something that cannot be replayed.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.slots: Any = WeakIdKeyDictionary()
        self.count = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; this spares torch the import of its compiler, which takes a second."""
        return False

    def begin(self) -> None:
        self.calls: list[NotedCall | Relayout] = []
        self.is_lost = False
        self._first = self.count

    def lose(self) -> None:
        """Note no more calls of the command, use none of them, and drop the slots of its results."""
        self.is_lost = True
        for part, slot in list(self.slots.items()):
            if slot >= self._first:
                del self.slots[part]

    def slot_of(self, part: torch.Tensor) -> int:
        """Return the slot of a part; assign a new one if it has none."""
        slot: int | None = self.slots.get(part)
        if slot is None:
            slot = self.slots[part] = self.count
            self.count += 1
        return slot

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if FakeTensor in types:  # only metadata is computed
            return func(*args, **kwargs)
        if any(kind is not torch.Tensor and kind is not torch.nn.Parameter for kind in types):
            return NotImplemented  # its parts are dispatched here next
        result = func(*args, **kwargs)
        if not self.is_lost:
            try:
                self._note(func, args, kwargs, result)
            except NotLocal:
                self.lose()
        return result

    def _note(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        is_list = isinstance(result, list | tuple)
        found = result if is_list else [result]
        if any(isinstance(one, torch.Tensor) and one.is_meta for one in found):
            return  # only metadata is computed
        if any(tag in operator.tags for tag in _VARYING):
            raise NotLocal(f"results of {operator} depend on data")
        marked, named = self._marked(list(args)), {name: self._marked(one) for name, one in kwargs.items()}
        outs = [-1 if one is None else self._made(one) for one in found]
        self.calls.append(NotedCall(operator, marked, named, outs, is_list))

    def _marked(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value not in self.slots:
                raise NotLocal("a tensor comes from elsewhere")
            return PartSlot(self.slots[value])
        if isinstance(value, list | tuple):
            return [self._marked(one) for one in value]
        if not isinstance(value, _PLAIN):
            raise NotLocal(f"an argument is a {type(value).__name__}")
        return value

    def _made(self, value: Any) -> int:
        if not isinstance(value, torch.Tensor):
            raise NotLocal("an operator returns a Python value")
        return self.slot_of(value)


class LocalTrace:
    """The trace of one replay.

    Args:
        rank: The rank that runs it.
        team: The team of the recording.
        is_counted: See `LearntReplay`.
    """

    def __init__(self, rank: Rank, team: TeamOnRank, *, is_counted: bool) -> None:
        self._rank = rank
        self._team = team
        self._is_counted = is_counted
        self._engine = engine_in(rank)
        self._listener = _Listener()
        self._numbers: Any = WeakIdKeyDictionary()
        self._values: list[Made] = []
        self._constants: dict[int, Any] = {}
        self._named: dict[int, int] = {}
        self._externals: list[int] = []
        self._twins: list[Named] = []
        self._seen: list[_Seen] = []
        self._relaid: dict[int, DTensor] = {}
        self._slots_now: dict[int, int] = {}
        self._in_parts: dict[int | None, list[int]] = {}
        self._alone: set[int] = set()
        self._forgotten = False

    def run(self, steps: Sequence[Step], first_move: int) -> LocalProgram:
        """Run all steps by the rules, and return the program.

        Raises:
            NotLocal: The replay cannot be traced; the steps have run all the same.
        """
        why = ""  # not an error, whose frames would hold tensors until the garbage collector finds the cycle
        try:
            self._take_externals(steps)
        except NotLocal as error:
            why = str(error)
        engine = self._engine
        shared: set[int] = set()
        if engine is not None:
            engine.sums.on_laid = self._laid
            values = self._rank.values
            shared = {self._named[ref] for ref in self._externals if engine.sums.is_shared(values[ref])}
        for step in steps:
            if why:
                execute(step, self._rank, self._team, first_move, is_counted=self._is_counted)
                continue
            before = OperatorCounts()
            if engine is not None:
                before.add(engine.counts)
            self._listen(step, first_move)
            try:
                self._see(step)
            except NotLocal as error:
                why = str(error)
                continue
            if engine is not None and self._seen[-1].calls is not None:
                self._seen[-1].ran = engine.counts.since(before)
        if engine is not None:
            engine.sums.on_laid = None
        if self._forgotten:
            why = "the layout of a tensor without a ref has changed"
        if not shared.isdisjoint(self._alone):
            why = "a reduced tensor shares memory with one that these steps do not use"
        if why:
            raise NotLocal(why)
        return self._program()

    def _listen(self, step: Step, first_move: int) -> None:
        """Run a step by the rules, and note the operators on parts that it runs."""
        self._listener.begin()
        self._relaid.clear()
        if isinstance(step, Command) and is_of_operators(step.signature):
            with self._listener:
                execute(step, self._rank, self._team, first_move, is_counted=self._is_counted)
        else:  # user functions are not traced: they may have dispatch modes of their own
            self._listener.lose()
            execute(step, self._rank, self._team, first_move, is_counted=self._is_counted)

    # ---- observation -----------------------------------------------------------------------------------------

    def _take_externals(self, steps: Sequence[Step]) -> None:
        """Number the inputs of the steps: values that they read and do not make."""
        made: set[int] = set()
        for command in filter(None, map(_command_of, steps)):
            for ref in _refs_of(command):
                if ref in made or ref in self._named:
                    continue
                value = self._found(ref)
                number = self._numbers.get(value) if isinstance(value, torch.Tensor) else None
                if number is None:
                    number = self._number(value)
                    self._externals.append(ref)
                    if is_in_parts(getattr(value, "_spec", None)):
                        self._in_parts.setdefault(memory_of(value), []).append(number)
                else:
                    self._twins.append((ref, number))
                self._named[ref] = number
            made.update(_outs_of(command))

    def _found(self, ref: int) -> Any:
        value = self._rank.values.get(ref)
        if value is None or type(value) is Poison:
            raise NotLocal(f"the input {ref} is not on this rank, or the command that computes it has failed")
        return value

    def _check_alone(self, value: Any) -> None:
        if self._engine is not None and self._engine.sums.is_shared(value):
            raise NotLocal("partial tensors share memory, so reducing one would have to change all")

    def _number(self, value: Any) -> int:
        """Give a value a number, and its part a slot."""
        number = len(self._values)
        if isinstance(value, torch.Tensor):
            self._numbers[value] = number
            self._values.append(Made(self._listener.slot_of(local_of(value)), layout_of(value)))
        else:
            self._constants[number] = value
            self._values.append(Made(-1, layout_of(value)))
        self._slots_now[number] = self._values[number].slot
        return number

    def _laid(self, value: DTensor, before: torch.Tensor) -> None:
        """Note a change of layout of a global tensor, unless only the running command has the tensor."""
        # A reduction of partial sums also reaches all tensors that share their memory.
        self._alone.update(self._in_parts.get(memory_of(before), ()))
        number = self._numbers.get(value)
        if number is None:
            return
        if number not in self._named.values():  # freed, but held elsewhere, where a replay would not change it
            self._forgotten = True
        self._relaid[number] = value
        slot = self._listener.slots.get(value._local_tensor)
        if slot is None:
            self._listener.lose()
        elif not self._listener.is_lost:
            self._slots_now[number] = slot
            self._listener.calls.append(Relayout(number, Made(slot, layout_of(value))))

    def _see(self, step: Step) -> None:
        """Derive the effects of a step."""
        if isinstance(step, Free):
            freed = [(ref, self._named.pop(ref)) for ref in step.refs if ref in self._named]
            left = set(self._named.values())
            self._seen.append(_Seen(step, freed=[(ref, -1 if number in left else number) for ref, number in freed]))
            return
        command = _command_of(step)
        if command is None:
            raise NotLocal(f"{type(step).__name__} is not a command")
        if has_copied_views(self._rank):
            raise NotLocal("the rank has copied views")
        read = {ref: self._found(ref) for ref in _refs_of(command)}
        made = {ref: self._found(ref) for ref in _outs_of(command)}
        slots = self._listener.slots
        if not self._listener.is_lost and all(
            local_of(one) in slots for one in made.values() if isinstance(one, torch.Tensor)
        ):
            self._seen.append(_Seen(step, self._listener.calls, made=self._name(made)))
            return
        self._listener.lose()
        for ref, value in read.items():
            self._check_alone(value)
            self._alone.update(self._in_parts.get(memory_of(value), ()))
            number = self._named[ref]
            is_known = not isinstance(value, torch.Tensor) or slots.get(local_of(value)) == self._slots_now[number]
            if number not in self._relaid and not is_known:
                raise NotLocal("a command has given a tensor another part")
        relaid = [
            (number, Made(self._listener.slot_of(local_of(value)), layout_of(value)))
            for number, value in self._relaid.items()
        ]
        self._slots_now.update((number, one.slot) for number, one in relaid)
        given = [(ref, self._named[ref]) for ref in read]
        if not {number for number, _ in relaid} <= {number for _, number in given}:
            raise NotLocal("a command has changed the layout of a tensor that is not among its operands")
        self._seen.append(_Seen(step, None, given, self._name(made), relaid))

    def _name(self, made: dict[int, Any]) -> list[Named]:
        """Record the values of refs."""
        named: list[Named] = []
        for ref, value in made.items():
            number = self._numbers.get(value) if isinstance(value, torch.Tensor) else None
            self._named[ref] = self._number(value) if number is None else number
            named.append((ref, self._named[ref]))
        return named

    # ---- the program -----------------------------------------------------------------------------------------

    def _program(self) -> LocalProgram:
        self._share_views()
        ran = OperatorCounts()
        for one in self._seen:
            if one.ran is not None:
                ran.add(one.ran)
        dropped: dict[tuple[int, int], list[int]] = {}
        for slot, place in self._needed().items():
            dropped.setdefault(place, []).append(slot)
        steps = [
            LocalStep(
                one.step,
                None
                if one.calls is None
                else [op_of(call, dropped.get((place, number), ())) for number, call in enumerate(one.calls)],
                one.given,
                one.made,
                [ref for ref, _ in one.made if ref in self._named and one.calls is not None],
                one.relaid,
                one.freed,
                dropped.get((place, _AFTER), ()),
                one.ran,
            )
            for place, one in enumerate(self._seen)
        ]
        return LocalProgram(
            externals=self._externals,
            twins=self._twins,
            alone=sorted(self._alone),
            makes_parts=any(is_in_parts(one.layout.spec) for one in self._values[len(self._externals) :]),
            steps=steps,
            values=self._values,
            constants=self._constants,
            slots=self._listener.count,
            ran=ran,
        )

    def _share_views(self) -> None:
        """Make each view once that is the same again and that only operators on parts read."""
        calls = [call for one in self._seen for call in one.calls or ()]
        if any(torch.Tag.inplace_view in call.operator.tags for call in calls if isinstance(call, NotedCall)):
            return
        freed = {number for one in self._seen for _, number in one.freed}
        freed -= {number for one in self._seen for _, number in one.given}
        apart = {made.slot for number, made in enumerate(self._values) if number not in freed}
        apart.update(call.made.slot for call in calls if isinstance(call, Relayout))
        apart.update(made.slot for one in self._seen for _, made in one.relaid)
        same: dict[int, int] = {}
        found: dict[str, int] = {}
        for one in self._seen:
            if one.calls is None:
                continue
            kept: list[NotedCall | Relayout] = []
            for call in one.calls:
                if isinstance(call, Relayout):
                    kept.append(call)
                    continue
                args = renumbered(call.args, same)
                named = {name: renumbered(value, same) for name, value in call.kwargs.items()}
                out = call.outs[0] if len(call.outs) == 1 else -1
                if call.operator.is_view and out >= 0:
                    is_base = call.operator in (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
                    first = args[0].number if is_base else found.setdefault(repr((call.operator, args, named)), out)
                    if first != out and out not in apart:
                        same[out] = first
                        continue
                kept.append(attrs.evolve(call, args=args, kwargs=named))
            one.calls = kept
        self._values = [attrs.evolve(made, slot=same.get(made.slot, made.slot)) for made in self._values]

    def _needed(self) -> dict[int, tuple[int, int]]:
        """Return, for each slot, the step and the operator in it that use the slot last."""
        last: dict[int, tuple[int, int]] = {}
        at = {number: self._values[number].slot for number in range(len(self._externals))}
        for place, one in enumerate(self._seen):
            for number, call in enumerate(one.calls or ()):
                if isinstance(call, NotedCall):
                    used = [*slots_in([call.args, list(call.kwargs.values())]), *call.outs]
                else:
                    used = [at[call.number], call.made.slot]
                    at[call.number] = call.made.slot
                last.update(dict.fromkeys(used, (place, number)))
            after = place, _AFTER
            last.update((at[number], after) for _, number in one.given)
            for number, made in one.relaid:
                at[number] = made.slot
                last[made.slot] = after
            for _, number in one.made:
                at.setdefault(number, self._values[number].slot)
                last[at[number]] = after
            for _, number in one.freed:
                if number >= 0:
                    last[at.pop(number)] = after
        for slot in (-1, *at.values()):
            last.pop(slot, None)
        return last


def _command_of(step: Step) -> Command | None:
    if isinstance(step, VaryingCommand):
        return step.command
    return step if isinstance(step, Command) else None


def _refs_of(command: Command) -> list[int]:
    kinds = command.signature.kinds
    return [one for one, kind in zip(command.operands, kinds, strict=True) if kind == "r"]


def _outs_of(command: Command) -> list[int]:
    return [command.first + out for out in command.signature.outs if out >= 0]


# ---- learnt replay ---------------------------------------------------------------------------------------------------

# `LearntReplay`: replays of one recording, or sequence, by the local programs that this rank has traced.


@attrs.define(eq=False)
class LearntReplay:
    """Cache of local programs for a part of a recording, or a sequence.

    A replay with layouts that no earlier replay had runs by the rules and is traced.

    Attributes:
        is_counted: Whether each command counts by itself, not the whole replay as one.
    """

    is_counted: bool = False
    _programs: list[LocalProgram] = attrs.field(factory=list["LocalProgram"])
    _learnt: int = 0

    def run(self, rank: Rank, team: TeamOnRank, steps: Sequence[Step], first_move: int) -> int:
        """Run some of the first steps; return how many. Never raises."""
        if type(rank) is not Rank or has_copied_views(rank):  # profiled and simulated ranks execute differently
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
