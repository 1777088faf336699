"""The operators of torch that are not issued as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from trimesh.tensor.issue.blocking import WAITING
from trimesh.tensor.issue.inplace_views import INPLACE_VIEWS

aten = torch.ops.aten

REPLACED: Final[dict[Any, Callable[..., Any]]] = {
    **WAITING,
    **INPLACE_VIEWS,
    # Views that a bit of the tensor tells from what they view: handles do not have that bit, and are copies instead.
    aten._conj.default: aten._conj_physical.default,
    aten._neg_view.default: aten.neg.default,
}
"""What is called in place of an operator. Composite ones join when they are met."""


def is_composite(func: Any) -> bool:
    """Return whether an operator is defined by others, on every device."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
