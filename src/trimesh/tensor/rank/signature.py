"""What an operation is, on the rank: a function and how its arguments come out of the operands of a command."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import torch

from trimesh.errors import ProtocolError
from trimesh.tensor.protocol.arguments import Build, read
from trimesh.tensor.protocol.messages import kinds_of
from trimesh.tensor.rank.kernel import Kernel, Kernels
from trimesh.tensor.rank.poison import OnKept, Poison, on_kept_of


@attrs.frozen
class Signature:
    """One operation.

    Attributes:
        name: Of the operator of torch, or of a kernel of ours: "aten::add.Tensor", "trimesh::fetch".
        arity: How many operands it takes.
        kinds: "r", "n" or "b" by operand.
        outs: For each leaf of its result, the index among the new tensors, or -1 for what has a name already.
        writes: The operands that it changes in place.
        strides: For each new tensor how it is to lie, as far as it matters; none of any for what makes views.
        kernel: Set for one of ours.
        has_info: Whether one of its results says whether the others are right, for another operation to check.
        on_kept: What it does with memory that is left of something poisoned.
    """

    name: str
    arity: int
    kinds: str
    outs: Sequence[int]
    writes: Sequence[int]
    strides: Sequence[tuple[int, ...]]
    kernel: Kernel | None
    has_info: bool
    on_kept: OnKept
    _function: Callable[..., Any]
    _args: Sequence[tuple[Build | None, Any]]
    _kwargs: Sequence[tuple[str, Build | None, Any]]

    def run(self, operands: Sequence[Any], *first: Any) -> Any:
        """Call it, with `first` before its own arguments."""
        return self.call(self._function, operands, *first)

    def call(self, function: Callable[..., Any], operands: Sequence[Any], *first: Any) -> Any:
        args = [constant if build is None else build(operands) for build, constant in self._args]
        if not self._kwargs:
            return function(*first, *args)
        kwargs = {name: constant if build is None else build(operands) for name, build, constant in self._kwargs}
        return function(*first, *args, **kwargs)

    def take_kept(self, operands: Sequence[Any]) -> bool:
        """Put what is left of poisoned operands into their place, if it may be run on that; return whether."""
        if not self.on_kept:
            return False
        places = self.writes if self.on_kept == "overwrites" else [self.kinds.index("r")]
        poisoned = [index for index, kind in enumerate(self.kinds) if kind == "r" and type(operands[index]) is Poison]
        if any(index not in places or operands[index].kept is None for index in poisoned):
            return False
        assert isinstance(operands, list)
        for index in poisoned:
            operands[index] = operands[index].kept
        return True


def define(description: Any, device: torch.device, kernels: Kernels) -> Signature:
    """Understand a description: [name, args, kwargs, outs, writes], and strides, if any matter.

    Raises:
        ProtocolError: It is none.
    """
    match description:
        case [str(name), ["l", *args], ["d", *kwargs], [*outs], [*writes]]:
            strides: list[tuple[int, ...]] = []
        case [str(name), ["l", *args], ["d", *kwargs], [*outs], [*writes], [*told]]:
            strides = _strides(told, max(outs, default=-1) + 1)
        case _:
            raise ProtocolError(f"an operation must be described by a name, arguments and outputs, got {description!r}")
    if not all(isinstance(number, int) for number in (*outs, *writes)):
        raise ProtocolError(f"outputs and writes must be numbers, got {outs!r}, {writes!r}")
    at = 0
    positional: list[tuple[Build | None, Any]] = []
    for part in args:
        build, constant, at = read(part, at, device)
        positional.append((build, constant))
    named: list[tuple[str, Build | None, Any]] = []
    for key, part in zip(kwargs[::2], kwargs[1::2], strict=True):
        build, constant, at = read(part, at, device)
        named.append((str(key), build, constant))
    kinds = "".join(map(kinds_of, (*args, *kwargs[1::2])))
    if any(not 0 <= index < len(kinds) for index in writes) or at != len(kinds):
        raise ProtocolError(f"{name} is described with operands that it does not have")
    name, kernel = _kernel(name, kernels)
    function = kernel.function if kernel is not None else _operator(name)
    operator = function if kernel is None else kernel.operator
    schema = getattr(operator, "_schema", None)
    has_info = schema is not None and any(result.name == "info" for result in schema.returns)
    on_kept = on_kept_of(operator, is_global=kernel is not None)
    return Signature(name, at, kinds, outs, writes, strides, kernel, has_info, on_kept, function, positional, named)


def _strides(told: Sequence[Any], count: int) -> list[tuple[int, ...]]:
    if len(told) != count or not all(
        isinstance(one, list | tuple) and all(isinstance(step, int) and step >= 0 for step in one) for one in told
    ):
        raise ProtocolError(f"an operation must say of each new tensor how it lies, got {told!r:.100}")
    return [tuple(one) for one in told]


def _kernel(name: str, kernels: Kernels) -> tuple[str, Kernel | None]:
    """Return a kernel, if it is one, and its name, or that of the operator that it is for."""
    space, _, rest = name.partition("::")
    family = kernels.families.get(space)
    if family is not None:
        return rest, family(rest, _operator(rest))
    return name, kernels.by_name.get(rest) if space == "trimesh" else None


def _operator(name: str) -> Callable[..., Any]:
    """Return an operator of torch; one that this process does not have fails when it is called, as any operation."""
    space, _, rest = name.partition("::")
    operator, _, overload = rest.partition(".")
    try:
        found: Callable[..., Any] = getattr(getattr(getattr(torch.ops, space), operator), overload or "default")
    except (AttributeError, RuntimeError) as error:
        text = f"the process of the rank has no operator {name}: {error}"

        def missing(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(text)

        return missing
    return _WithGradients(found) if name in _ASKING else found


_ASKING: Final = frozenset({"aten::mkldnn_rnn_layer.default", "aten::mkldnn_rnn_layer"})
"""Operators that make what their derivative needs only where gradients are on, as they are not on a rank."""


class _WithGradients:
    """An operator that runs with gradients on; all else of it is its own."""

    def __init__(self, operator: Any) -> None:
        self._operator = operator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operator, name)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        with torch.enable_grad():
            return self._operator(*args, **kwargs)
