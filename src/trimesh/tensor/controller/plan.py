"""`Meta`, what is known at the controller of a tensor on the ranks; `Plan`, an operation with tensors of some metas."""

from __future__ import annotations

from collections.abc import Sequence
from types import CodeType
from typing import Any, Final

import attrs
import torch
from torch.utils import _pytree as pytree

from trimesh.tensor.protocol.messages import kinds_of

Line = tuple[CodeType, int]
"""Where a command was issued: the code and the line in it."""

FRESH: Final = -1
"""A leaf of a result that is a new tensor; others are a tensor among the arguments, or a value."""


@attrs.frozen(eq=False)
class Meta:
    """The metadata of a tensor; equal metadata is the same object, so they are compared by identity.

    Attributes:
        size, stride, dtype, device: As torch's.
        is_global: Whether the ranks hold parts of one tensor, rather than a tensor each.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    is_global: bool = False


@attrs.frozen(eq=False)
class Plan:
    """One operation with arguments of a certain signature.

    Attributes:
        number: The code of its commands.
        name: Of the operator.
        description: What ranks are told of it.
        metas: Of the new tensors.
        leaves: For each leaf of the result: `FRESH`, or the place among the tensors of the arguments, or a value.
        tree: How leaves become the result.
        has_alias: By leaf, whether it is a place.
        is_single: Whether the result is just one new tensor.
        counted: Places among the tensors of what it writes to and torch does not count as written.
        kinds: "r", "n" or "b" for each operand of its commands.
    """

    number: int
    name: str
    description: list[Any]
    metas: Sequence[Meta]
    leaves: Sequence[Any]
    has_alias: Sequence[bool]
    tree: pytree.TreeSpec
    is_single: bool = False
    counted: Sequence[int] = ()
    kinds: str = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        _, args, kwargs, *_ = self.description
        object.__setattr__(self, "kinds", kinds_of(args) + kinds_of(kwargs))
