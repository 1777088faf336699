"""The operators of torch whose result is a value of Python, which must be waited for here (rule N2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from trimesh.tensor.controller.tensor import MeshTensor
from trimesh.tensor.issue.fetching import same_now, scalar_now, values_now

aten = torch.ops.aten


def list_now(tensor: MeshTensor) -> Any:
    """Return a tensor as lists of numbers, as `Tensor.tolist` does.

    Raises:
        ValueError: The ranks have different values.
    """
    return same_now(tensor).tolist()


def _allclose(one: Any, other: Any, *tolerances: Any, **named: Any) -> bool:
    close: Any = torch.isclose(one, other, *tolerances, **named)
    return _on_all(close)


def _equal(one: Any, other: Any) -> bool:
    if one.size() != other.size():
        return False
    return _on_all(torch.eq(one, other))


def _on_all(tensor: Any) -> bool:
    """Return whether a tensor of booleans is true everywhere, on every rank."""
    return all(bool(value) for value in values_now(tensor.all()))


WAITING: Final[dict[Any, Callable[..., Any]]] = {
    aten._local_scalar_dense.default: scalar_now,
    aten.equal.default: _equal,
    aten.allclose.default: _allclose,
}
