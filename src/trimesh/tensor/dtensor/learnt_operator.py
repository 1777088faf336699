"""`LearntOperator`: the commands of one signature, which run on the parts of this rank as they did when they lay so.

LW-1 The rules alone find how an operator runs. Here is remembered which function that was, for global tensors with
     the same specs and, where they matter, the same numbers; and only if nothing is moved or added up for it.
LW-2 What a function has made is looked at each time: if it lies otherwise than it did, the rules put it together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import torch

from trimesh import limits
from trimesh.tensor.dtensor.copied_view import has_copied_views
from trimesh.tensor.rank.layout import global_tensor
from trimesh.tensor.rank.rank import Rank, TeamOnRank
from trimesh.tensor.rank.signature import Signature
from trimesh.tensor.rules.arguments import is_global
from trimesh.tensor.rules.cuts import SUM
from trimesh.tensor.rules.engine import OperatorWay, engine_of

_is_alias_of: Final[Callable[[torch.Tensor, torch.Tensor], bool]] = torch._C._is_alias_of  # type: ignore[attr-defined]


@attrs.frozen(eq=False)
class _Again:
    """How an operator runs on tensors that lie in one way.

    Attributes:
        specs: Of the tensors: kept, so that no other has the identity of one.
        way: By the rules; None if it has to move tensors, or is put together of other operators.
        numbers: Those among the operands, as text; None if any will do.
        spec: Of the result, if that is one new tensor.
        size, stride, dtype: Of this rank's part of it.
        is_summed_view: Whether parts of a sum have views of their memory.
        is_whole: Whether each rank has all of each tensor.
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
    """Runs the commands of one signature by what it has learnt from those before.

    Attributes:
        operator: Of torch.
        by_rules: What runs it on global tensors of any layout.
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
            if spec is None:  # of this rank alone
                return described.call(self.by_rules, operands, rank, team)
            key.append(id(spec))
            parts[place] = value._local_tensor
        known = self._known.get(tuple(key))
        if known is None or (known.numbers is not None and known.numbers != self._text(operands)):
            return self._learn(tuple(key), described, operands, rank, team)
        if known.way is None or has_copied_views(rank):
            return described.call(self.by_rules, operands, rank, team)
        result = described.call(known.way.function, parts)
        if self.makes_views and not _shares(result, parts[tensors[0]]):
            return described.call(self.by_rules, operands, rank, team)  # which take note of that
        engine = engine_of(rank)
        engine.counts.all += 1
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
        """Find out which operands are tensors: the same for all commands of a signature."""
        self._tensors = [place for place, one in enumerate(operands) if isinstance(one, torch.Tensor)]
        self._numbers = [place for place, one in enumerate(operands) if type(one) in (int, float)]
        return self._tensors

    def _text(self, operands: Sequence[Any]) -> Sequence[str]:
        """Return the numbers among operands as text: -0.0 equals 0.0, and nan nothing."""
        return [repr(operands[place]) for place in self._numbers]

    def _learn(
        self, key: tuple[int, ...], described: Signature, operands: Sequence[Any], rank: Rank, team: TeamOnRank
    ) -> Any:
        """Run one command by the rules, and remember how it ran."""
        leaves = [operands[place] for place in self._tensors or ()]
        specs = [one._spec for one in leaves]
        given: list[Any] = []

        def noting(*args: Any, **kwargs: Any) -> Any:
            given.extend((args, kwargs))
            return self.by_rules(rank, team, *args, **kwargs)

        result = described.call(noting, operands)
        if has_copied_views(rank) or any(one._spec is not spec for one, spec in zip(leaves, specs, strict=True)):
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
    """Whether all that an operator has made shares memory with a tensor."""
    return all(_is_alias_of(one, base) for one in ([result] if isinstance(result, torch.Tensor) else result))
