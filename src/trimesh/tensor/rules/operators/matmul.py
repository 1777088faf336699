"""Products of matrices, by letters for their dimensions: one that the result does not have is summed over."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

from trimesh.tensor.protocol.placement import WHOLE
from trimesh.tensor.rules.call import Chosen, GlobalMeta, OperatorCall, Strategy
from trimesh.tensor.rules.cuts import SUM
from trimesh.tensor.rules.row import Row

_LETTERS: Final = {
    "mm": ("ik", "kj", "ij"),
    "bmm": ("bik", "bkj", "bij"),
    "mv": ("ik", "k", "i"),
    "dot": ("k", "k", ""),
    "vdot": ("k", "k", ""),
    "addmm": ("ik", "kj", "ij"),
    "baddbmm": ("bik", "bkj", "bij"),
    "addmv": ("ik", "k", "i"),
    "addbmm": ("bik", "bkj", "ij"),
    "addr": ("i", "j", "ij"),
}


def _factors(call: OperatorCall) -> list[GlobalMeta]:
    return (
        [one for one in call.metas if one is not call["self"]]
        if call.name.startswith("a") or call.name == "baddbmm"
        else call.metas
    )


def _offer(call: OperatorCall, _dim: int) -> Iterable[Strategy]:
    left, right, made = _LETTERS[call.name]
    one, other = _factors(call)
    added = [meta for meta in call.metas if meta is not one and meta is not other]
    for letter in sorted(set(left + right)):
        args = {one.index: left.find(letter), other.index: right.find(letter)}
        at = made.find(letter)
        if at < 0 and not call.result.can_sum:
            continue
        for meta in added:
            own = at - (len(made) - meta.ndim)
            args[meta.index] = own if at >= 0 and own >= 0 and meta.size[own] == call.result.size[at] else WHOLE
        yield call.strategy(args, [at if at >= 0 else SUM])


def _localize(call: OperatorCall, chosen: Chosen) -> Callable[..., Any] | None:
    """Of a product in parts of a sum only the first rank adds what is to be added."""
    sums = [dim for dim, cut in enumerate(chosen.results[0]) if cut == SUM]
    if not sums or len(call.metas) < 3 or all(chosen.place[dim] == 0 for dim in sums):
        return None

    def product(added: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return call.operator(added, *args, **{**kwargs, "beta": 0})

    return product


def _may_run(call: OperatorCall) -> bool:
    left, right, _ = _LETTERS[call.name]
    factors = _factors(call)
    return len(factors) == 2 and [one.ndim for one in factors] == [len(left), len(right)]


ROWS: Final = (
    Row(
        "product of matrices",
        tuple(_LETTERS),
        _offer,
        "any dimension",
        "factors are added up first; along a dimension that is summed over the result is parts of a sum",
        _localize,
        may_run=_may_run,
    ),
)
