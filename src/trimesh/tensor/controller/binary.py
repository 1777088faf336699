"""Python's binary operators on mesh tensors: torch's, but with the error that says what is wrong.

Torch turns a `TypeError` of `t + other` into `NotImplemented`, of which Python makes "unsupported operand type(s)", and
of `t == other` even False. So an operation that was refused is tried again by its function, which raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trimesh.tensor.controller.compiling import is_traced


def _operator(name: str, function: Callable[[Any, Any], Any]) -> Any:
    plain = getattr(torch.Tensor, name)

    def operator(self: torch.Tensor, other: Any) -> Any:
        if is_traced():  # the compiler takes `plain` for this very function, and calls it for ever
            return function(self, other)
        result = plain(self, other)
        if result is NotImplemented and isinstance(other, torch.Tensor):
            return function(self, other)
        return result

    return operator


def _swapped(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda one, other: function(other, one)


class WithOperators(torch.Tensor):
    """A tensor whose binary operators raise what their functions do."""

    __slots__ = ()

    __add__ = _operator("__add__", torch.add)
    __sub__ = _operator("__sub__", torch.sub)
    __mul__ = _operator("__mul__", torch.mul)
    __truediv__ = _operator("__truediv__", torch.true_divide)
    __floordiv__ = _operator("__floordiv__", torch.floor_divide)
    __mod__ = _operator("__mod__", torch.remainder)
    __pow__ = _operator("__pow__", torch.pow)
    __matmul__ = _operator("__matmul__", torch.matmul)
    __and__ = _operator("__and__", torch.bitwise_and)
    __or__ = _operator("__or__", torch.bitwise_or)
    __xor__ = _operator("__xor__", torch.bitwise_xor)
    __lshift__ = _operator("__lshift__", torch.bitwise_left_shift)
    __rshift__ = _operator("__rshift__", torch.bitwise_right_shift)
    __eq__ = _operator("__eq__", torch.eq)
    __ne__ = _operator("__ne__", torch.ne)
    __lt__ = _operator("__lt__", torch.lt)
    __le__ = _operator("__le__", torch.le)
    __gt__ = _operator("__gt__", torch.gt)
    __ge__ = _operator("__ge__", torch.ge)
    __hash__ = torch.Tensor.__hash__  # a class that says what is equal has none of its own

    __radd__ = _operator("__radd__", _swapped(torch.add))
    __rsub__ = _operator("__rsub__", _swapped(torch.sub))
    __rmul__ = _operator("__rmul__", _swapped(torch.mul))
    __rtruediv__ = _operator("__rtruediv__", _swapped(torch.true_divide))
    __rfloordiv__ = _operator("__rfloordiv__", _swapped(torch.floor_divide))
    __rmod__ = _operator("__rmod__", _swapped(torch.remainder))
    __rpow__ = _operator("__rpow__", _swapped(torch.pow))
    __rmatmul__ = _operator("__rmatmul__", _swapped(torch.matmul))
    __rand__ = _operator("__rand__", _swapped(torch.bitwise_and))
    __ror__ = _operator("__ror__", _swapped(torch.bitwise_or))
    __rxor__ = _operator("__rxor__", _swapped(torch.bitwise_xor))
    __rlshift__ = _operator("__rlshift__", _swapped(torch.bitwise_left_shift))
    __rrshift__ = _operator("__rrshift__", _swapped(torch.bitwise_right_shift))

    __iadd__ = _operator("__iadd__", torch.Tensor.add_)
    __isub__ = _operator("__isub__", torch.Tensor.sub_)
    __imul__ = _operator("__imul__", torch.Tensor.mul_)
    __itruediv__ = _operator("__itruediv__", torch.Tensor.div_)
    __ifloordiv__ = _operator("__ifloordiv__", torch.Tensor.floor_divide_)
    __imod__ = _operator("__imod__", torch.Tensor.remainder_)
    __ipow__ = _operator("__ipow__", torch.Tensor.pow_)
    __iand__ = _operator("__iand__", torch.Tensor.bitwise_and_)
    __ior__ = _operator("__ior__", torch.Tensor.bitwise_or_)
    __ixor__ = _operator("__ixor__", torch.Tensor.bitwise_xor_)
    __ilshift__ = _operator("__ilshift__", torch.Tensor.bitwise_left_shift_)
    __irshift__ = _operator("__irshift__", torch.Tensor.bitwise_right_shift_)
