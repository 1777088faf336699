"""Rule engine of one rank: runs operators on global tensors by the table, or falls back to whole tensors."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from trimesh import limits
from trimesh.tensor.protocol.placement import WHOLE
from trimesh.tensor.protocol.tracing import DATA_DEPENDENT
from trimesh.tensor.rank.rank import Rank
from trimesh.tensor.rules.call import (
    Chosen,
    GlobalMeta,
    OperatorCall,
    Strategy,
    assembled,
    bound,
    globals_in,
    has_out,
    is_global,
    joined,
    key_of,
    made_of,
    makes_views,
    metas_made,
    own_part,
    plain_name,
    replaced,
    sliced_part,
    spec_of,
    tensors_in,
    written_in,
)
from trimesh.tensor.rules.composed import COMPOSED, Compose
from trimesh.tensor.rules.cuts import SUM, Cuts, added_up, cuts_of, dense_strides, has_empty_part, placements_of
from trimesh.tensor.rules.sums import Sums, moved
from trimesh.tensor.rules.table import rows_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from trimesh.tensor.rules.call import Row


_LOG: Final = logging.getLogger("trimesh")

Operator = Callable[..., Any]


class OperatorWay:
    """Cached dispatch decision for one operator signature.

    Attributes:
        targets: Required placements of each tensor.
        function: Function that runs on the parts.
        made: For each leaf of the result: index of an argument, `(spec, size, strides)` of a new tensor, or None. If
            every tensor is replicated, `made` itself is None, and results are wrapped as replicated.
        is_view: Whether results share memory with the first argument.
        summed: Tensors whose partial sums are reduced before the call.
    """

    __slots__ = ("function", "is_view", "made", "summed", "targets")

    def __init__(
        self,
        targets: Sequence[Cuts],
        function: Operator,
        made: Sequence[Any] | None,
        summed: Sequence[int] = (),
        *,
        is_view: bool,
    ) -> None:
        self.targets = targets
        self.summed = summed
        self.function = function
        self.made = made
        self.is_view = is_view


_UNKNOWN: Final = OperatorWay((), print, (), is_view=False)


class _Known:
    """Cached table look-up for an operator.

    Attributes:
        composed: Its decomposition, if it has one.
        rows: Its rows.
        numbers_vary: Whether its rules are independent of numeric arguments.
    """

    __slots__ = ("composed", "numbers_vary", "rows")

    def __init__(self, composed: Compose | None, rows: Sequence[Row]) -> None:
        self.composed = composed
        self.rows = rows
        self.numbers_vary = bool(rows) and rows[0].numbers_vary

    def may_vary(self, cuts: Sequence[Cuts]) -> bool:
        """Return whether the decision for these placements does not depend on numeric arguments."""
        return self.numbers_vary and not any(SUM in each for each in cuts)


class OperatorCounts:
    """Counts of operators that ran on global tensors.

    Attributes:
        all: All operators.
        fallbacks: Count by name of operators that fell back to whole tensors because no rule applied.
    """

    __slots__ = ("all", "fallbacks")

    def __init__(self) -> None:
        self.all = 0
        self.fallbacks: Counter[str] = Counter()

    def add(self, other: OperatorCounts) -> None:
        self.all += other.all
        self.fallbacks.update(other.fallbacks)

    def since(self, before: OperatorCounts) -> OperatorCounts:
        """Return the counts added since the snapshot `before`."""
        made = OperatorCounts()
        made.all, made.fallbacks = self.all - before.all, self.fallbacks - before.fallbacks
        return made


class RuleEngine:
    """Runs the operators of one rank on global tensors.

    Attributes:
        counts: Operators run so far.
        sums: Tensors of which the rank holds partial sums.
    """

    __slots__ = ("_fake", "_known", "_ways", "counts", "sums")

    def __init__(self) -> None:
        self._fake = FakeTensorMode()
        self._known: dict[Any, _Known] = {}
        self._ways: dict[Any, OperatorWay | None] = {}
        self.counts = OperatorCounts()
        self.sums = Sums()

    def run(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        tensors = tensors_in((args, kwargs))
        leaves = [one for one in tensors if hasattr(one, "_local_tensor")]
        if not leaves:
            return operator(*args, **kwargs)
        if len(leaves) < len(tensors):
            args, kwargs = pytree.tree_map_only(torch.Tensor, lambda one: joined(one, leaves[0]), (tuple(args), kwargs))
            leaves = globals_in((args, kwargs))
        return self._run(operator, args, kwargs, leaves, is_taken_apart=True)

    def by_table(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operator by its row of the table, without decomposing it."""
        return self._run(operator, args, kwargs, globals_in((args, kwargs)), is_taken_apart=False)

    def _know(self, operator: Any) -> _Known:
        name = operator._schema.name.partition("::")[2]
        found = self._known[operator] = _Known(COMPOSED.get(name), rows_of(plain_name(operator)))
        return found

    def _run(
        self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any], leaves: list[DTensor], *, is_taken_apart: bool
    ) -> Any:
        self.counts.all += 1
        cuts = [cuts_of(one._spec.placements) for one in leaves]
        if all(cut == WHOLE for each in cuts for cut in each):
            return self._run_whole(operator, args, kwargs, leaves)
        known = self._known.get(operator) or self._know(operator)
        if is_taken_apart and known.composed is not None:
            return known.composed(self, operator, args, kwargs)
        vary = known.may_vary(cuts)
        key = self._key(operator, args, kwargs, leaves, vary=vary)
        way = self._ways.get(key, _UNKNOWN)
        if way is _UNKNOWN:
            way = self._find(operator, args, kwargs, leaves, cuts, known.rows)
            if len(self._ways) >= limits.TENSOR_PLANS:
                self._ways.clear()
            self._ways[key] = way
        if way is None:
            return self.fall_back(operator, args, kwargs)
        return self._go(way, args, kwargs, leaves, cuts)

    def _go(
        self, way: OperatorWay, args: Sequence[Any], kwargs: dict[str, Any], leaves: list[DTensor], cuts: Sequence[Cuts]
    ) -> Any:
        if len(way.summed) > 1:
            self.sums.settle_together([leaves[index] for index in way.summed])
        parts = iter(
            [
                leaf._local_tensor
                if cut == target and SUM not in cut  # reducing one tensor may change the placement of another
                else self.part(leaf, target, is_viewed=way.is_view)
                for leaf, target, cut in zip(leaves, way.targets, cuts, strict=True)
            ]
        )
        result = way.function(*replaced(tuple(args), parts), **(replaced(kwargs, parts) if kwargs else kwargs))
        return self.finish(way, result, leaves)

    def finish(self, way: OperatorWay, result: Any, leaves: Sequence[DTensor]) -> Any:
        """Build the result of a call from the value that the function of its way returned for the local parts."""
        if way.made is None:
            return _of_wholes(result, leaves)
        made = iter(way.made)
        if isinstance(result, list | tuple):
            found = [assembled(one, next(made), leaves) for one in result]
        else:
            found = assembled(result, next(made, None), leaves)
        if way.is_view and SUM in way.targets[0]:
            self.sums.viewed(leaves[0], [found] if is_global(found) else found)
        return type(result)(found) if type(result) in (list, tuple) else found

    def lasting_way(
        self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[OperatorWay, bool] | None:
        """Return the cached way of a call that has run before; None if it reshards a tensor.

        Returns:
            The way, and whether it is independent of numeric arguments.
        """
        tensors = tensors_in((args, kwargs))
        leaves = globals_in(tensors)
        cuts = [cuts_of(one._spec.placements) for one in leaves]
        known = self._known.get(operator)
        if not leaves or len(leaves) < len(tensors):
            return None
        if all(cut == WHOLE for each in cuts for cut in each):
            return OperatorWay(cuts, operator, None, is_view=False), True
        if known is None or known.composed is not None:
            return None
        vary = known.may_vary(cuts)
        way = self._ways.get(self._key(operator, args, kwargs, leaves, vary=vary))
        return None if way is None or way.targets != cuts else (way, vary)

    def _key(
        self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any], leaves: Sequence[DTensor], *, vary: bool
    ) -> Any:
        return operator, tuple([one._spec for one in leaves]), key_of(args, vary=vary), key_of(kwargs, vary=vary)

    def part(self, value: DTensor, target: Cuts, *, is_viewed: bool = False) -> torch.Tensor:
        """Return this rank's part of a tensor under the target placements; reshards if necessary."""
        cuts = cuts_of(value.placements)
        if cuts == target:
            return value._local_tensor
        if any(cut == SUM != want for cut, want in zip(cuts, target, strict=True)):
            self.sums.settle(value, target)
            cuts = cuts_of(value.placements)
            if cuts == target:
                return value._local_tensor
        sliced = None if is_viewed else sliced_part(value, cuts, target)
        return moved(value, target) if sliced is None else sliced

    def settle(self, *values: DTensor) -> None:
        """Reduce the partial sums of tensors, in place."""
        if len(values) > 1:
            self.sums.settle_together(values)
        for value in values:
            cuts = cuts_of(value.placements)
            if SUM in cuts:
                self.sums.settle(value, added_up(cuts))

    def write(self, target: DTensor, whole: torch.Tensor) -> None:
        """Copy a tensor that every rank holds whole into a global tensor."""
        self.settle(target)
        local, part = target._local_tensor, own_part(whole, target, cuts_of(target.placements))
        for dim, (size, stride) in enumerate(zip(local.size(), local.stride(), strict=True)):
            if size > 1 and stride == 0:  # expanded: one place of memory
                local, part = local.narrow(dim, 0, 1), part.narrow(dim, 0, 1)
        local.copy_(part)

    def whole(self, value: DTensor) -> torch.Tensor:
        """Return the whole tensor on every rank; partial sums are reduced in place."""
        return self.part(value, (WHOLE,) * len(value.placements))

    def _run_whole(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any], leaves: list[DTensor]) -> Any:
        """Run an operator on replicated tensors."""
        parts = iter([one._local_tensor for one in leaves])
        result = operator(*replaced(tuple(args), parts), **replaced(kwargs, parts))
        return _of_wholes(result, leaves)

    def fall_back(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any], *, is_counted: bool = True) -> Any:
        """Run an operator on whole tensors on every rank; results as large as the first argument are cut like it."""
        if is_counted:
            name = operator.name()
            if name not in self.counts.fallbacks:
                _LOG.info("%s has no sharding rule: it runs on whole tensors, on every rank", name)
            self.counts.fallbacks[name] += 1
        leaves = globals_in((args, kwargs))
        whole = [self.whole(one) for one in leaves]
        written = written_in(operator, args, kwargs)
        # View operators get copies of replicated tensors: a write to their result must not reach the tensor itself.
        given = [
            one.clone(memory_format=torch.preserve_format)
            if one is leaf._local_tensor and id(leaf) not in written and makes_views(operator)
            else one
            for one, leaf in zip(whole, leaves, strict=True)
        ]
        parts = iter(given)
        result = operator(*replaced(tuple(args), parts), **replaced(kwargs, parts))
        by_id = {id(local): leaf for local, leaf in zip(given, leaves, strict=True)}
        for local, leaf in zip(given, leaves, strict=True):
            if id(leaf) in written and local is not leaf._local_tensor:
                leaf._local_tensor.copy_(own_part(local, leaf, cuts_of(leaf.placements)))
        first = leaves[0]
        goal = added_up(cuts_of(first.placements))

        def keep(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) in by_id:
                return by_id[id(value)]
            cuts = goal if value.size() == first.size() else (WHOLE,) * len(goal)
            return made_of(own_part(value, first, cuts), first.device_mesh, placements_of(cuts), value)

        return pytree.tree_map(keep, result)

    def _find(
        self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any], leaves: list[DTensor], cuts: list[Cuts],
        rows: Sequence[Row],
    ) -> OperatorWay | None:  # fmt: skip
        """Compute the way of a call by the rows; None for fallback to whole tensors."""
        if not rows or has_out(operator):
            return None
        mesh = leaves[0].device_mesh
        sizes = [mesh.size(dim) for dim in range(mesh.ndim)]
        metas = [
            GlobalMeta(index, tuple(one.size()), tuple(one.stride()), one.dtype, cut)
            for index, (one, cut) in enumerate(zip(leaves, cuts, strict=True))
        ]
        try:
            results, aliases = metas_made(operator, args, kwargs, leaves, self._fake)
        except DATA_DEPENDENT:
            return None
        stand_ins = iter(metas)
        named = bound(operator, replaced(tuple(args), stand_ins), replaced(kwargs, stand_ins))
        numbers = {id(one): index for index, one in enumerate(leaves)}
        written = frozenset(numbers[one] for one in written_in(operator, args, kwargs))
        call = OperatorCall(operator, plain_name(operator), named, metas, written, bool(written), sizes, results)
        for row in rows:
            if row.may_run is None or row.may_run(call):
                chosen = choose(row, call, mesh, aliases)
                return None if chosen is None else _way(row, call, chosen, aliases)
        return None


def _way(row: Row, call: OperatorCall, chosen: Chosen, aliases: Sequence[int | None]) -> OperatorWay:
    function = row.localize(call, chosen) if row.localize is not None else None
    made: list[Any] = []
    number = 0
    for meta, alias in zip(call.leaves, aliases, strict=True):
        if meta is None:
            made.append(None)
            continue
        if alias is not None:
            made.append(alias)
        else:
            size = chosen.result_size(number, meta)
            strides = None if row.is_view else dense_strides(size, meta.size, meta.stride)
            made.append((spec_of(chosen.device_mesh, chosen.results[number], meta), torch.Size(size), strides))
        number += 1
    summed = [meta.index for meta in call.metas if added_up(meta.cuts) == chosen.args[meta.index] != meta.cuts]
    return OperatorWay(chosen.args, function or call.operator, made, summed, is_view=row.is_view)


def _of_wholes(result: Any, leaves: Sequence[DTensor]) -> Any:
    """Wrap the results of an operator that ran on replicated tensors."""
    by_id = {id(one._local_tensor): one for one in leaves}

    def keep(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        found = by_id.get(id(value))
        return made_of(value, leaves[0].device_mesh, leaves[0]._spec.placements, value) if found is None else found

    if isinstance(result, list | tuple):
        return type(result)([keep(one) for one in result]) if type(result) in (list, tuple) else [*map(keep, result)]
    return keep(result)


def engine_of(rank: Rank) -> RuleEngine:
    found = engine_in(rank)
    if found is None:
        found = rank.above[RuleEngine] = RuleEngine()
    return found


def engine_in(rank: Rank) -> RuleEngine | None:
    """Return the engine of a rank; None if the rank has had no global tensor."""
    found = rank.above.get(RuleEngine)
    assert found is None or isinstance(found, RuleEngine)
    return found


# ---- choice among the strategies of a rule: the one that moves the fewest bytes --------------------------------------

_NEVER: Final = float("inf")
_SLICED: Final = 0.001
"""Cost of slicing a local tensor, relative to its bytes: small, but more than no change."""


def choose(row: Row, call: OperatorCall, mesh: Any, aliases: Sequence[int | None]) -> Chosen | None:
    """Choose the cheapest strategy along each mesh dimension; None if a written tensor would have to move."""
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
        raise AssertionError(f"a strategy must have a cut for each tensor, got another of {row.kind!r} {call.operator}")
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
