"""Which of the ways that a rule offers is taken: the one that moves the fewest bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from trimesh.tensor.protocol.placement import WHOLE
from trimesh.tensor.rules.call import Chosen, GlobalMeta, OperatorCall, Strategy
from trimesh.tensor.rules.cuts import SUM, has_empty_part

if TYPE_CHECKING:
    from trimesh.tensor.rules.row import Row

_NEVER: Final = float("inf")
_SLICED: Final = 0.001
"""A part of what is there costs little, and still more than nothing to be done."""


def choose(row: Row, call: OperatorCall, mesh: Any, aliases: Sequence[int | None]) -> Chosen | None:
    """Choose a strategy for each dimension of the mesh; None where what is written to would have to move."""
    picked: list[Strategy] = []
    for dim in range(len(call.mesh)):
        strategy = _cheapest(row, call, dim, aliases)
        if strategy is None:
            return None
        picked.append(strategy)
    args = [tuple(one.args[index] for one in picked) for index in range(len(call.metas))]
    results = [tuple(one.results[index] for one in picked) for index in range(len(call.results))]
    chosen = Chosen(args, results, call.mesh, mesh.get_coordinate() or (), mesh)
    if not row.takes_empty:
        sizes = [(meta.size, cuts) for meta, cuts in zip(call.metas, args, strict=True)]
        for size, cuts in sizes:
            if 0 not in size and has_empty_part(size, cuts, call.mesh):
                whole = [(WHOLE,) * len(call.mesh)] * len(call.metas)
                if call.written:
                    return None
                return Chosen(whole, [(WHOLE,) * len(call.mesh)] * len(call.results), call.mesh, chosen.place, mesh)
    return chosen


def _cheapest(row: Row, call: OperatorCall, dim: int, aliases: Sequence[int | None]) -> Strategy | None:
    whole = Strategy((WHOLE,) * len(call.metas), (WHOLE,) * len(call.results))
    best, least = None, _NEVER
    for strategy in (*row.offer(call, dim), whole):
        cost = _cost(row, call, dim, strategy, aliases)
        if cost < least:
            best, least = strategy, cost
    return best


def _cost(row: Row, call: OperatorCall, dim: int, strategy: Strategy, aliases: Sequence[int | None]) -> float:
    if len(strategy.args) != len(call.metas) or len(strategy.results) != len(call.results):
        raise AssertionError(f"the rule {row.kind!r} does not fit {call.operator}")
    for alias, made in zip(
        (one for one, meta in zip(aliases, call.leaves, strict=True) if meta is not None), strategy.results, strict=True
    ):
        if alias is not None and strategy.args[alias] != made:
            return _NEVER
    return sum(
        _cost_of(meta, dim, want, is_written=meta.index in call.written)
        for meta, want in zip(call.metas, strategy.args, strict=True)
    )


def _cost_of(meta: GlobalMeta, dim: int, want: int, *, is_written: bool) -> float:
    cut = meta.cuts[dim]
    if is_written and want != max(cut, WHOLE):
        return _NEVER
    count = max(1, meta.numel) * meta.dtype.itemsize
    if cut == want:
        return 0
    if want == SUM:
        return _NEVER
    if cut == SUM:
        return 2.0 * count if want == WHOLE else 2.1 * count
    if cut == WHOLE:
        return _SLICED * count
    return count if want == WHOLE else 0.9 * count
