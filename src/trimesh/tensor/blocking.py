"""The operators of torch whose result is a value of Python, which must be waited for here (rule N2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from trimesh.tensor.fetching import scalar_now

aten = torch.ops.aten


def _allclose(one: Any, other: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:  # noqa: FBT001, FBT002 - torch's
    close: Any = torch.isclose(one, other, rtol, atol, equal_nan)
    return bool(scalar_now(close.all()))


def _equal(one: Any, other: Any) -> bool:
    if one.size() != other.size():
        return False
    return bool(scalar_now((one == other).all()))


WAITING: Final[dict[Any, Callable[..., Any]]] = {
    aten._local_scalar_dense.default: scalar_now,
    aten.equal.default: _equal,
    aten.allclose.default: _allclose,
}
