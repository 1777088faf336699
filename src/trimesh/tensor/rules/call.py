"""One call of an operator on global tensors, as the rules see it: named arguments, with metadata for tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import attrs
import torch

from trimesh.tensor.rules.cuts import SUM, Cuts, local_part


@attrs.frozen(eq=False)
class GlobalMeta:
    """A global tensor among the arguments of a call, or its results.

    Attributes:
        index: Its place among the tensors of the call.
        size, stride, dtype: As torch's.
        cuts: How it lies; of a result: ().
    """

    index: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    cuts: Cuts

    @property
    def ndim(self) -> int:
        return len(self.size)

    @property
    def numel(self) -> int:
        count = 1
        for length in self.size:
            count *= length
        return count

    @property
    def can_sum(self) -> bool:
        """Whether ranks may have parts of a sum of this dtype: those that a collective can add."""
        return self.dtype in _SUMMED


_SUMMED = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8}
)


class Strategy(NamedTuple):
    """One way to run a call along one dimension of the mesh.

    Attributes:
        args: For each tensor of the call, how it is to lie.
        results: For each tensor among the results, how it lies then.
    """

    args: tuple[int, ...]
    results: tuple[int, ...]


@attrs.frozen(eq=False)
class Chosen:
    """How the tensors of a call lie while it runs, along all dimensions of the mesh.

    Attributes:
        args, results: By tensor.
        mesh: Size of each dimension of the mesh.
        place: This rank's coordinates.
        device_mesh: Torch's.
    """

    args: Sequence[Cuts]
    results: Sequence[Cuts]
    mesh: Sequence[int]
    place: Sequence[int]
    device_mesh: Any

    def part(self, meta: GlobalMeta) -> tuple[list[int], list[int]]:
        """Return where this rank's part of an argument starts, and its size."""
        return local_part(meta.size, self.args[meta.index], self.mesh, self.place)

    def result_size(self, number: int, meta: GlobalMeta) -> list[int]:
        """Return the size of this rank's part of a result."""
        return local_part(meta.size, self.results[number], self.mesh, self.place)[1]


@attrs.define(eq=False)
class OperatorCall:
    """A call, taken apart.

    Attributes:
        operator: An `OpOverload`.
        name: Of it, without overload; of one that writes to its first argument, that of the one that does not.
        arguments: By name; a `GlobalMeta` in the place of each tensor.
        metas: Of the tensors, in order.
        written: Which of them it writes to.
        is_in_place: Whether it is named for writing to its first argument.
        mesh: Size of each dimension of the mesh.
        leaves: What it returns: metadata, and None for what is no tensor.
    """

    operator: Any
    name: str
    arguments: dict[str, Any]
    metas: list[GlobalMeta]
    written: frozenset[int]
    is_in_place: bool
    mesh: Sequence[int]
    leaves: list[GlobalMeta | None]

    def __getitem__(self, name: str) -> Any:
        return self.arguments.get(name)

    @property
    def results(self) -> list[GlobalMeta]:
        return [one for one in self.leaves if one is not None]

    @property
    def result(self) -> GlobalMeta:
        """The first tensor that it returns."""
        return self.results[0]

    def dim(self, name: str, ndim: int, default: int = 0) -> int:
        """Return an argument that numbers a dimension, from the front."""
        dim = self.arguments.get(name)
        dim = default if dim is None else dim
        return dim % ndim if ndim else 0

    def dims(self, name: str, ndim: int) -> list[int]:
        """Return an argument that numbers dimensions, from the front; all if it is None or empty."""
        found = self.arguments.get(name)
        if found is None or (isinstance(found, list | tuple) and not found):
            return list(range(ndim))
        found = [found] if isinstance(found, int) else found
        return sorted({dim % ndim if ndim else 0 for dim in found} if ndim else set())

    def of(self, name: str) -> list[GlobalMeta]:
        """Return the tensors of an argument: none, one or those of a list."""
        return list(metas_in(self.arguments.get(name)))

    def strategy(self, args: dict[int, int], results: Sequence[int], *, default: int = -1) -> Strategy:
        """Return a strategy by the indices of tensors; those that are not named lie whole."""
        return Strategy(tuple(args.get(index, default) for index in range(len(self.metas))), tuple(results))

    def is_sum(self, meta: GlobalMeta, dim: int) -> bool:
        """Whether the ranks have parts of a sum of it along a dimension of the mesh."""
        return meta.cuts[dim] == SUM


def metas_in(tree: Any) -> Iterator[GlobalMeta]:
    """Yield the metadata in an argument, in order."""
    if isinstance(tree, GlobalMeta):
        yield tree
    elif isinstance(tree, list | tuple):
        for one in tree:
            yield from metas_in(one)


def localized(call: OperatorCall, **changes: Any) -> Callable[..., Any]:
    """Return the operator with some of its arguments that are no tensors replaced by those of this rank."""
    names = [one.name for one in call.operator._schema.arguments]
    operator = call.operator

    def run(*args: Any, **kwargs: Any) -> Any:
        values = list(args)
        for name, value in changes.items():
            at = names.index(name)
            if at < len(values):
                values[at] = value
            else:
                kwargs[name] = value
        return operator(*values, **kwargs)

    return run
