"""Operators on lists of tensors, as optimizers use them: each place of the lists by itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from trimesh.tensor.protocol.placement import WHOLE
from trimesh.tensor.rules.call import GlobalMeta, OperatorCall, Strategy
from trimesh.tensor.rules.row import Row, words

_FOREACH: Final = tuple(
    f"_foreach_{name}"
    for name in words("""
        abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min copy cos cosh div erf erfc exp expm1 floor frac
        lerp lgamma log log10 log1p log2 maximum minimum mul neg pow reciprocal round rsqrt sigmoid sign sin sinh sqrt
        sub tan tanh trunc zero
    """)
)


def _lists(call: OperatorCall) -> list[Sequence[object]]:
    return [
        value
        for value in call.arguments.values()
        if isinstance(value, list | tuple) and any(isinstance(one, GlobalMeta) for one in value)
    ]


def _offer(call: OperatorCall, dim: int) -> Iterable[Strategy]:
    """The tensors of one place lie alike: as the first, which is what is written to if anything is."""
    lists = _lists(call)
    if not lists:
        return
    args: dict[int, int] = {}
    made: list[int] = []
    for place in range(len(lists[0])):
        metas = [one for each in lists if place < len(each) and isinstance(one := each[place], GlobalMeta)]
        first = metas[0]
        cut = max(first.cuts[dim], WHOLE)
        if cut == WHOLE and not call.written:
            cut = max(WHOLE, *(one.cuts[dim] for one in metas if one.size == first.size))
        for meta in metas:
            args[meta.index] = cut if meta.size == first.size else WHOLE
        if any(meta.size != first.size and meta.ndim for meta in metas) and cut != WHOLE:
            return  # broadcast
        made.append(cut)
    yield call.strategy(args, made if call.results else [])


ROWS: Final = (
    Row(
        "list of tensors",
        _FOREACH,
        _offer,
        "each place of the lists as it likes",
        "added up first",
        numbers_vary=True,
    ),
    Row(
        "optimizer",
        words("_fused_adam _fused_adamw _fused_sgd _fused_adagrad"),
        _offer,
        "each parameter as it likes, its gradient and state as it",
        "added up first",
        numbers_vary=True,
    ),
)
