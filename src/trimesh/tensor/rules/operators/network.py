"""Losses and convolutions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from trimesh.tensor.protocol.placement import WHOLE
from trimesh.tensor.rules.call import OperatorCall, Strategy
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
