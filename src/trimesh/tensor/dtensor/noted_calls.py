"""Operators on parts, as they were noted during a replay by the rules, and what does them again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

import attrs

from trimesh.tensor.dtensor.local_program import Made, Op, Slots


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
