"""Linear layers on tensors of any number of dimensions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

from trimesh.tensor.protocol import layers
from trimesh.tensor.protocol.placement import WHOLE
from trimesh.tensor.rules.call import Chosen, GlobalMeta, OperatorCall, Strategy
from trimesh.tensor.rules.cuts import SUM
from trimesh.tensor.rules.row import Row


def _offer(call: OperatorCall, _dim: int) -> Iterable[Strategy]:
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


def _localize(call: OperatorCall, chosen: Chosen) -> Callable[..., Any] | None:
    """Of a product in parts of a sum only the first rank adds the bias."""
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


ROWS: Final = (
    Row(
        "linear layer",
        (_name(layers.linear),),
        _offer,
        "any dimension",
        "factors are added up first; of inputs that are cut the result is parts of a sum",
        _localize,
    ),
    Row(
        "gradient of its weight",
        (_name(layers.linear_weight_gradient),),
        _offer_gradient,
        "any dimension",
        "factors are added up first; along a dimension that is summed over the result is parts of a sum",
    ),
)
