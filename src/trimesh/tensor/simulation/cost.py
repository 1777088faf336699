"""What an operator computes, reads and writes, by the sizes of its arguments and results."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Final

import torch
from torch.utils.flop_counter import flop_registry

from trimesh.tensor.rules.arguments import tensors_in

aten = torch.ops.aten


def operations_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> float:
    """Return how many operations of arithmetic an operator takes: those of products by torch's own table.

    Of anything else it is one for each element that it makes, which never counts beside the bytes of that.
    """
    counted = flop_registry.get(func.overloadpacket)
    if counted is not None:
        return float(counted(*args, **kwargs, out_val=result))
    own = _OWN.get(func.overloadpacket)
    if own is not None:
        return float(own(*args))
    return float(sum(one.numel() for one in tensors_in(result)))


def moved_bytes(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """Return how many bytes an operator reads and writes: each argument once, what it makes or changes once."""
    if func.overloadpacket in _WRITE_ONLY:
        return sum(map(_nbytes, tensors_in(result)))
    seen: dict[int, int] = {}
    for one in tensors_in((args, kwargs)):
        seen[id(one)] = _nbytes(one)
    moved = sum(seen.values())
    for one in tensors_in(result):
        moved += _nbytes(one)
    return moved


def dtype_of(args: Any, result: Any) -> str:
    """Return the dtype that an operator computes in: that of its first argument with numbers of floating point."""
    found = ""
    for one in tensors_in((args, result)):
        found = found or str(one.dtype).removeprefix("torch.")
        if one.is_floating_point():
            return str(one.dtype).removeprefix("torch.")
    return found


def _nbytes(one: torch.Tensor) -> int:
    """Return the bytes of memory that an element of a tensor is in: what was expanded is there once."""
    sizes = (size for size, stride in zip(one.size(), one.stride(), strict=True) if stride or not size)
    return prod(sizes) * one.element_size()


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> float:
    batch, heads, length, width = query.shape
    return 2.0 * batch * heads * length * key.shape[-2] * (width + value.shape[-1])


def _attention_backward(
    _grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> float:
    return 2.5 * _attention(query, key, value)


def _layer(given: torch.Tensor, weight: torch.Tensor, *_: Any) -> float:
    return 2.0 * given.numel() * weight.shape[0]


_OWN: Final[dict[Any, Any]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten.linear: _layer,
    aten.mv: lambda matrix, _: 2.0 * matrix.numel(),
    aten.dot: lambda one, _: 2.0 * one.numel(),
}

_WRITE_ONLY: Final = frozenset(
    (
        aten.fill_,
        aten.zero_,
        aten.empty,
        aten.empty_like,
        aten.zeros_like,
        aten.ones_like,
        aten.full_like,
        aten.new_zeros,
    )
)
"""Those that do not read the values of their arguments."""
