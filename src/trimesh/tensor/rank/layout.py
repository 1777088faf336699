"""What an operator makes lies in memory as the controller believes.

The controller finds strides without data, where torch's kernels now and then choose others: which kernel runs depends
on the device and the build. Torch asks for a contiguous copy only where it sees that one is needed; a kernel that is
given what is not contiguous after all reads it in a wrong order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def laid_out(made: Any, strides: Sequence[int]) -> Any:
    """Return a tensor with these strides: itself, if it has them.

    Args:
        made: A tensor, or a global one, which no other shares memory with; anything else is returned as it is.
        strides: Of the whole; none for what need not be looked at.
    """
    if not strides or not isinstance(made, torch.Tensor):
        return made
    found = made.stride()
    if found == strides or len(found) != len(strides):
        return made
    pairs = zip(made.size(), found, strides, strict=True)
    if all(size <= 1 or one == other for size, one, other in pairs) or not made.numel():
        return made
    local = getattr(made, "_local_tensor", None)
    if local is None:
        return torch.empty_strided(made.size(), strides, dtype=made.dtype, device=made.device).copy_(made)
    return _global_laid_out(made, local, strides)


def _global_laid_out(made: Any, local: torch.Tensor, strides: Sequence[int]) -> Any:
    """Return a global tensor, with its parts in the order of the whole."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta  # noqa: PLC0415

    order = sorted(range(len(strides)), key=lambda dim: (-strides[dim], dim))
    back = [order.index(dim) for dim in range(len(order))]
    part = local.permute(order).contiguous().permute(back)
    spec = made._spec
    known = TensorMeta(made.size(), tuple(strides), made.dtype)
    laid = DTensorSpec(spec.mesh, spec.placements, tensor_meta=known)
    return global_tensor(part, laid)


def global_tensor(part: torch.Tensor, spec: Any) -> DTensor:
    """Return the global tensor that torch knows so, of which this rank has a part."""
    kind = _dtensor()
    made: DTensor = kind.__new__(kind, part, spec, requires_grad=False)  # its `__init__` does nothing, in 6 us
    return made


@cache
def _dtensor() -> Any:
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - takes a while

    return DTensor
