"""Losses, attention and convolutions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from trimesh.tensor.protocol.placement import WHOLE
from trimesh.tensor.rules.call import GlobalMeta, OperatorCall, Strategy
from trimesh.tensor.rules.cuts import SUM
from trimesh.tensor.rules.row import Row, words

_NONE, _SUMMED = 0, 2
"""Torch's numbers for reductions of a loss; 1 is the mean."""


def _offer_nll(call: OperatorCall, _dim: int) -> Iterable[Strategy]:
    value, target = call["self"], call["target"]
    if value.ndim < 2:
        return
    for cut in range(target.ndim):
        args = {value.index: cut + (cut > 0), target.index: cut}
        if call["reduction"] == _SUMMED and call.result.can_sum:
            yield call.strategy(args, [SUM, SUM])
        elif call["reduction"] == _NONE:
            yield call.strategy(args, [cut, WHOLE])


def _offer_nll_backward(call: OperatorCall, _dim: int) -> Iterable[Strategy]:
    value, target, grad = call["self"], call["target"], call["grad_output"]
    if value.ndim < 2:
        return
    for cut in range(target.ndim):
        at = cut + (cut > 0)
        yield call.strategy(
            {value.index: at, target.index: cut, grad.index: cut if call["reduction"] == _NONE else WHOLE}, [at]
        )


def _offer_attention(call: OperatorCall, _dim: int) -> Iterable[Strategy]:
    """Batch and heads may be cut; a mask, where it has them."""
    query, mask = call["query"], call["attn_mask"]
    if call["dropout_p"] or query.ndim != 4:
        return
    for cut in (0, 1):
        args = {meta.index: cut for meta in call.metas}
        if any(meta.size[cut] != query.size[cut] for meta in call.metas if meta is not mask):
            continue
        if isinstance(mask, GlobalMeta):
            own = cut - (4 - mask.ndim)
            args[mask.index] = own if own >= 0 and mask.size[own] == query.size[cut] else WHOLE
        at = [one.size.index(query.size[cut]) if cut >= one.ndim else cut for one in call.results]
        if all(one.size[where] == query.size[cut] for one, where in zip(call.results, at, strict=True)):
            yield call.strategy(args, at)


def _offer_convolution(call: OperatorCall, _dim: int) -> Iterable[Strategy]:
    value, weight = call["input"], call["weight"]
    yield call.strategy({value.index: 0}, [0])
    if call["groups"] == 1 and not call["transposed"]:
        args = {weight.index: 0, **{meta.index: 0 for meta in call.of("bias")}}
        yield call.strategy(args, [1])


def _offer_convolution_backward(call: OperatorCall, _dim: int) -> Iterable[Strategy]:
    grad, value = call["grad_output"], call["input"]
    mask = call["output_mask"]
    made = [0] * bool(mask[0]) + [SUM] * bool(mask[1]) + [SUM] * bool(mask[2])
    if all(one.can_sum for one in call.results):
        yield call.strategy({grad.index: 0, value.index: 0}, made)


_FIRST: Final = "added up first"

ROWS: Final = (
    Row(
        "negative log likelihood",
        words("nll_loss_forward nll_loss2d_forward"),
        _offer_nll,
        "all but classes",
        "without a mean the sum and the weights are parts of a sum",
        takes_empty=False,
    ),
    Row(
        "derivative of it",
        words("nll_loss_backward nll_loss2d_backward"),
        _offer_nll_backward,
        "all but classes",
        _FIRST,
        takes_empty=False,
    ),
    Row(
        "attention",
        words("_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward"),
        _offer_attention,
        "batch and heads, without dropout",
        _FIRST,
        takes_empty=False,
    ),
    Row(
        "convolution",
        words("convolution"),
        _offer_convolution,
        "the batch; filters, without groups",
        _FIRST,
        takes_empty=False,
    ),
    Row(
        "derivative of a convolution",
        words("convolution_backward"),
        _offer_convolution_backward,
        "the batch",
        "gradients of filters are parts of a sum",
        takes_empty=False,
    ),
)
