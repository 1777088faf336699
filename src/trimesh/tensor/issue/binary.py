"""Python's binary operators on mesh tensors: torch's, but with the error that says what is wrong.

Torch turns a `TypeError` of `t + other` into `NotImplemented`, of which Python makes "unsupported operand type(s)", and
of `t == other` even False. So an operation that was refused is tried again by its function, which raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from trimesh.tensor.controller.tensor import MeshTensor

_FUNCTIONS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "truediv": torch.true_divide,
    "floordiv": torch.floor_divide,
    "mod": torch.remainder,
    "pow": torch.pow,
    "matmul": torch.matmul,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "lshift": torch.bitwise_left_shift,
    "rshift": torch.bitwise_right_shift,
}
_COMPARISONS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
}
_IN_PLACE: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "add": torch.Tensor.add_,
    "sub": torch.Tensor.sub_,
    "mul": torch.Tensor.mul_,
    "truediv": torch.Tensor.div_,
    "floordiv": torch.Tensor.floor_divide_,
    "mod": torch.Tensor.remainder_,
    "pow": torch.Tensor.pow_,
    "and": torch.Tensor.bitwise_and_,
    "or": torch.Tensor.bitwise_or_,
    "xor": torch.Tensor.bitwise_xor_,
    "lshift": torch.Tensor.bitwise_left_shift_,
    "rshift": torch.Tensor.bitwise_right_shift_,
}


def _operator(name: str, function: Callable[[Any, Any], Any]) -> Callable[[MeshTensor, Any], Any]:
    plain = getattr(torch.Tensor, name)

    def operator(self: MeshTensor, other: Any) -> Any:
        result = plain(self, other)
        if result is NotImplemented and isinstance(other, torch.Tensor):
            return function(self, other)
        return result

    return operator


def _swapped(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda one, other: function(other, one)


def _put() -> None:
    for name, function in {**_FUNCTIONS, **_COMPARISONS}.items():
        setattr(MeshTensor, f"__{name}__", _operator(f"__{name}__", function))
    for name, function in _FUNCTIONS.items():
        setattr(MeshTensor, f"__r{name}__", _operator(f"__r{name}__", _swapped(function)))
    for name, function in _IN_PLACE.items():
        setattr(MeshTensor, f"__i{name}__", _operator(f"__i{name}__", function))


_put()
