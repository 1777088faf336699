"""Matrix products, written as einsum letters: a dimension that the result lacks is summed over."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

from trimesh.tensor.protocol import tracing
from trimesh.tensor.protocol.placement import WHOLE
from trimesh.tensor.rules.call import Chosen, GlobalMeta, OperatorCall, Row, Strategy
from trimesh.tensor.rules.cuts import SUM

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
    """For a product in partial sums, let only the first rank add `self`."""
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
        "matrix product",
        tuple(_LETTERS),
        _offer,
        "any dimension",
        "factors are reduced first; if a dimension that is summed over is cut, the result is a partial sum",
        _localize,
        may_run=_may_run,
    ),
)


# ---- linear layers on tensors of any number of dimensions ------------------------------------------------------------


def _offer_linear(call: OperatorCall, _dim: int) -> Iterable[Strategy]:
    value, weight, bias = call["input"], call["weight"], call["bias"]
    last = value.ndim - 1
    for cut in range(last):
        yield call.strategy({value.index: cut}, [cut])
    outputs = {weight.index: 0}
    if isinstance(bias, GlobalMeta):
        outputs[bias.index] = 0
    yield call.strategy(outputs, [last])
    if call.result.can_sum:
        yield call.strategy({value.index: last, weight.index: 1}, [SUM])


def _localize_linear(call: OperatorCall, chosen: Chosen) -> Callable[..., Any] | None:
    """For a product in partial sums, let only the first rank add the bias."""
    sums = [dim for dim, cut in enumerate(chosen.results[0]) if cut == SUM]
    if not sums or all(chosen.place[dim] == 0 for dim in sums):
        return None

    def product(value: torch.Tensor, weight: torch.Tensor, _bias: Any) -> Any:
        return call.operator(value, weight, None)

    return product


def _offer_gradient(call: OperatorCall, _dim: int) -> Iterable[Strategy]:
    grad, value = call["grad"], call["input"]
    last = value.ndim - 1
    if call.result.can_sum:
        for cut in range(last):
            yield call.strategy({grad.index: cut, value.index: cut}, [SUM])
    yield call.strategy({grad.index: last, value.index: WHOLE}, [0])
    yield call.strategy({grad.index: WHOLE, value.index: last}, [1])


def _name(operator: Any) -> str:
    name: str = operator._schema.name.partition("::")[2]
    return name


ROWS_LINEAR: Final = (
    Row(
        "linear layer",
        (_name(tracing.linear),),
        _offer_linear,
        "any dimension",
        "factors are reduced first; if input features are cut, the result is a partial sum",
        _localize_linear,
    ),
    Row(
        "weight gradient of a linear layer",
        (_name(tracing.linear_weight_gradient),),
        _offer_gradient,
        "any dimension",
        "factors are reduced first; if a dimension that is summed over is cut, the result is a partial sum",
    ),
)
