"""Torch operators on global tensors, on the ranks: by the table of `rules`, or on whole tensors.

LW-1 Only the rules decide how an operator runs. This module caches their decision for global tensors with the same
     specs and, where they matter, the same numbers. It caches no call that moves or reduces anything.
LW-2 Results of a cached function are checked each time: if their layout differs, the rules assemble them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch

from trimesh import limits
from trimesh.tensor.dtensor.copied_view import CopiedViews, copied_views, has_copied_views, is_dense
from trimesh.tensor.rank.kernel import Kernel, Signature, global_tensor, span_of
from trimesh.tensor.rank.rank import Rank, TeamOnRank
from trimesh.tensor.rules.call import globals_in, is_global, replaced, written_in
from trimesh.tensor.rules.composed import draw_of
from trimesh.tensor.rules.cuts import SUM
from trimesh.tensor.rules.engine import OperatorWay, engine_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


Operator = Callable[..., Any]


def operator_on_globals(name: str, operator: Operator) -> Kernel:
    schema = getattr(operator, "_schema", None)
    if schema is None:  # unknown in this process: a call reports it
        return Kernel(name, lambda _rank, _team, *args, **kwargs: operator(*args, **kwargs), takes_poison=False)
    draw = draw_of(operator)
    shares = [one.alias_info is not None for one in schema.arguments]
    writes = any(one.alias_info is not None and one.alias_info.is_write for one in schema.arguments)
    makes_views = any(shares) and not writes
    overlaps = schema.name == "aten::unfold"

    def compute(rank: Rank, team: TeamOnRank, *args: Any, **kwargs: Any) -> Any:
        engine = engine_of(rank)
        if draw is not None:
            return draw(engine, rank, team, args, kwargs)
        return engine.run(operator, args, kwargs)

    def run(rank: Rank, team: TeamOnRank, *args: Any, **kwargs: Any) -> Any:
        views = copied_views(rank)
        if views:
            for one in globals_in((args, kwargs)):
                views.refresh(one)
        if writes:
            written = list(written_in(operator, args, kwargs).values()) if views else []
            if len(written) > 1 and isinstance(args[0], list | tuple) and views.has(globals_in((args, kwargs))):
                for at_place, named in _places(args, kwargs):
                    run(rank, team, *at_place, **named)
                return None
            check_overlap(views, operator, args, kwargs, written)
            result = compute(rank, team, *args, **kwargs)
            for one in written:
                views.written(one)
            return result
        result = compute(rank, team, *args, **kwargs)
        if makes_views and is_global(args[0]):
            view = partial(_again, rank, team, compute, args[1:], kwargs)
            views.made(args[0], list(_parts(result)), view, overlaps=overlaps)
        return result

    learnt = None if draw is not None or overlaps else LearntOperator(operator, run, makes_views)
    return Kernel(name, run, takes_poison=False, operator=operator, learnt=learnt)


def _places(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """Yield the arguments of an operator on lists for each index of these.

    One index at a time, so that a write at one index is visible at the next if that is a view of it.
    """

    def at(place: int, value: Any) -> Any:
        return value[place : place + 1] if isinstance(value, list | tuple) else value

    for place in range(len(args[0])):
        yield [at(place, one) for one in args], {name: at(place, one) for name, one in kwargs.items()}


def _again(
    rank: Rank, team: TeamOnRank, compute: Operator, rest: Sequence[Any], kwargs: dict[str, Any], base: Any
) -> list[Any]:
    """Repeat a view operator on a tensor that was written to, or on a whole one."""
    return list(_parts(compute(rank, team, base, *rest, **kwargs)))


def _parts(value: Any) -> Sequence[torch.Tensor]:
    return value if isinstance(value, list | tuple) else [value]


# ---- learnt operator -------------------------------------------------------------------------------------------------

# `LearntOperator`: commands of one signature, run on this rank's parts by cached dispatch for each layout.

_is_alias_of: Final[Callable[[torch.Tensor, torch.Tensor], bool]] = torch._C._is_alias_of  # type: ignore[attr-defined]


@attrs.frozen(eq=False)
class _Again:
    """Cached dispatch of an operator for tensors with given specs.

    Attributes:
        specs: Specs of the tensors; kept alive, because they are compared by identity.
        way: Decision of the rules; None if the call moves tensors, or is composed of other operators.
        numbers: Numeric operands as text; None if they do not matter.
        spec: Spec of the result, if that is one new tensor.
        size, stride, dtype: Those of this rank's part of the result.
        is_summed_view: Whether the call makes views of partial tensors.
        is_whole: Whether all tensors are replicated.
    """

    specs: Sequence[Any]
    way: OperatorWay | None
    numbers: Sequence[str] | None
    spec: Any = None
    size: Any = None
    stride: Any = None
    dtype: Any = None
    is_summed_view: bool = False
    is_whole: bool = False


@attrs.define(eq=False)
class LearntOperator:
    """Runs the commands of one signature by dispatch cached from earlier ones.

    Attributes:
        operator: The torch operator.
        by_rules: Runs it on global tensors with any placements.
        makes_views: Whether its results share memory with its first argument.
    """

    operator: Any
    by_rules: Callable[..., Any]
    makes_views: bool
    _tensors: Sequence[int] | None = None
    _numbers: Sequence[int] = ()
    _known: dict[tuple[int, ...], _Again] = attrs.field(factory=dict[tuple[int, ...], "_Again"])

    def run(self, described: Signature, operands: Sequence[Any], rank: Rank, team: TeamOnRank) -> Any:
        """Run one command, as the function of its kernel would; return what that returns."""
        tensors = self._tensors
        if tensors is None:
            tensors = self._places(operands)
        if len(tensors) > limits.TENSOR_OPERANDS_LEARNT:
            return described.call(self.by_rules, operands, rank, team)
        parts = list(operands)
        key: list[int] = []
        for place in tensors:
            value = operands[place]
            spec = getattr(value, "_spec", None)
            if spec is None:  # a tensor per rank
                return described.call(self.by_rules, operands, rank, team)
            key.append(id(spec))
            parts[place] = value._local_tensor
        known = self._known.get(tuple(key))
        if known is None or (known.numbers is not None and known.numbers != self._text(operands)):
            return self._learn(tuple(key), described, operands, rank, team)
        if known.way is None or has_copied_views(rank):
            return described.call(self.by_rules, operands, rank, team)
        engine = engine_of(rank)
        engine.counts.all += 1
        result = described.call(known.way.function, parts)
        if self.makes_views and not _shares(result, parts[tensors[0]]):
            engine.counts.all -= 1
            return described.call(self.by_rules, operands, rank, team)  # the rules track partial sums
        if (
            known.spec is None
            or result.stride() != known.stride
            or result.size() != known.size
            or result.dtype is not known.dtype
            or (known.is_whole and any(result is one for one in parts))
        ):
            return engine.finish(known.way, result, [operands[place] for place in tensors])
        made = global_tensor(result, known.spec)
        if known.is_summed_view:
            engine.sums.viewed(operands[tensors[0]], [made])
        return made

    def _places(self, operands: Sequence[Any]) -> Sequence[int]:
        """Find the positions of tensor operands, which are the same for all commands of a signature."""
        self._tensors = [place for place, one in enumerate(operands) if isinstance(one, torch.Tensor)]
        self._numbers = [place for place, one in enumerate(operands) if type(one) in (int, float)]
        return self._tensors

    def _text(self, operands: Sequence[Any]) -> Sequence[str]:
        """Return numeric operands as text: as numbers, -0.0 equals 0.0, and nan does not equal itself."""
        return [repr(operands[place]) for place in self._numbers]

    def _learn(
        self, key: tuple[int, ...], described: Signature, operands: Sequence[Any], rank: Rank, team: TeamOnRank
    ) -> Any:
        """Run one command by the rules, and cache its dispatch."""
        assert self._tensors is not None, "they were found before"
        leaves = [operands[place] for place in self._tensors]
        specs = [one._spec for one in leaves]
        given: list[Any] = []

        def noting(*args: Any, **kwargs: Any) -> Any:
            given.extend((args, kwargs))
            return self.by_rules(rank, team, *args, **kwargs)

        result = described.call(noting, operands)
        if any(one._spec is not spec for one, spec in zip(leaves, specs, strict=True)):
            return result
        if len(self._known) >= limits.TENSOR_LAYOUTS_LEARNT:
            self._known.clear()
        self._known[key] = self._again(specs, result, operands, engine_of(rank).lasting_way(self.operator, *given))
        return result

    def _again(
        self, specs: Sequence[Any], result: Any, operands: Sequence[Any], found: tuple[OperatorWay, bool] | None
    ) -> _Again:
        if found is None:
            return _Again(specs, None, None)
        way, vary = found
        numbers = None if vary or not self._numbers else self._text(operands)
        if not is_global(result) or any(result is one for one in operands):
            return _Again(specs, way, numbers)
        part, is_summed, is_whole = result._local_tensor, way.is_view and SUM in way.targets[0], way.made is None
        return _Again(specs, way, numbers, result._spec, part.size(), part.stride(), part.dtype, is_summed, is_whole)


def _shares(result: Any, base: torch.Tensor) -> bool:
    """Return whether all results of an operator share memory with a tensor."""
    return all(_is_alias_of(one, base) for one in ([result] if isinstance(result, torch.Tensor) else result))


# ---- overlaps --------------------------------------------------------------------------------------------------------

# Detection of operators that write to memory that they also read in part, as torch's kernels do.
#
# Torch refuses `t.sub_(t[0])`. With global tensors the view may be a copy on the ranks, which hides the overlap from
# their kernels. So torch is given tensors with the strides and memory sharing of the whole ones in one process.


def check_overlap(
    views: CopiedViews, operator: Any, args: Sequence[Any], kwargs: dict[str, Any], written: Sequence[DTensor]
) -> None:
    """Refuse an operator that torch would refuse because its input and output overlap in part.

    Only if an argument is a copied view of a written tensor, or the other way round, and both overlap in part, does the
    operator run, on zeros in this process of at most `limits.TENSOR_TRIED_BYTES_MAX`.

    Raises:
        RuntimeError: The error of torch.
    """
    if not written:
        return
    tensors = globals_in((args, kwargs))
    if not any(
        views.share(one, other) and overlap_in_part(*views.laid_out_as((one, other), torch.device("meta")))
        for one in written
        for other in tensors
        if views.has((one, other))
    ):
        return
    if sum(one.numel() * one.dtype.itemsize for one in tensors) > limits.TENSOR_TRIED_BYTES_MAX:
        return
    plain = iter(views.laid_out_as(tensors, torch.device("cpu")))
    with torch.no_grad():
        operator(*replaced(tuple(args), plain), **replaced(kwargs, plain))


def overlap_in_part(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one memory overlap in part, by torch's criteria.

    As in torch, tensors with gaps between their elements do not count.
    """
    if not (one.numel() and other.numel() and is_dense(one) and is_dense(other)):
        return False
    begin, end = span_of(one)
    first, last = span_of(other)
    if (begin, end) == (first, last):
        return one.stride() != other.stride()
    return begin < last and first < end
