"""Where torch has another formula for mesh tensors than for plain ones, and is to compute the same.

The derivative of `max()`, `min()` and `median()` of a whole tensor gives the one that it is its share. Of plain tensors
torch fills the share in where the mask is; of all others it multiplies by the mask, so that an infinite share is NaN
everywhere else. No operator stands for either formula: what is seen here is a product of a mask and a number, in that
node of the graph.

The derivative of `sgn`, `normal` and some others is zeros that torch makes by no operator on a handle, of this process.
Whoever differentiates through what these were given puts them onto the ranks.

`one_hot` of plain tensors raises where a number is no class. Of all others it compares them with all classes, and says
nothing; what is seen here is that comparison, with a tensor that torch has made on the way.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch.utils.weak import WeakIdKeyDictionary

from trimesh.tensor.controller.tensor import MeshTensor

aten = torch.ops.aten

_SHARING: Final = frozenset({"MaxBackward1", "MedianBackward0", "MinBackward1", "NanmedianBackward0"})
"""Nodes of the graph that give the largest, the smallest, or the middle one its share."""


OF_ZEROS: Final = frozenset(
    (
        "aten::normal.Tensor_float", "aten::normal.float_Tensor", "aten::normal.Tensor_Tensor", "aten::sgn",
        "aten::sgn_", "aten::copysign.Tensor", "aten::copysign_.Tensor", "aten::nextafter", "aten::nextafter_",
        "aten::repeat", "aten::max_pool2d_with_indices_backward",
    )
)  # fmt: skip
"""Operators whose derivative is, now and then, zeros of this process."""

_HOOKED: Final[Any] = WeakIdKeyDictionary()
"""Tensors whose gradients are put onto the ranks, and their versions; of leaves, which keep their hooks, -1."""


class _Walked(threading.local):
    """The node that this thread executes without torch's engine."""

    node: Any = None


_WALKED: Final = _Walked()


@contextmanager
def executing(node: Any) -> Generator[None]:
    """Let the formulas know which node of a graph is executed, where torch's engine does not do it."""
    outer, _WALKED.node = _WALKED.node, node
    try:
        yield
    finally:
        _WALKED.node = outer


def is_product_of_mask(func: Any, args: Sequence[Any]) -> bool:
    """Whether a call may be the last step of such a formula: the metadata of its arguments says no more."""
    return (
        func is aten.mul.Tensor
        and all(type(one) is MeshTensor for one in args)
        and args[0].dtype is torch.bool
        and args[1].dtype.is_floating_point
        and not args[1].ndim
    )


def is_shared_out() -> bool:
    """Whether the node that is executed gives the largest, the smallest, or the middle one its share."""
    node: Any = torch._C._current_autograd_node()
    node = _WALKED.node if node is None else node
    return node is not None and node.name() in _SHARING


def filled(mask: MeshTensor, share: MeshTensor) -> Any:
    """Return the share where a mask is, and 0 elsewhere, as torch makes it of plain tensors."""
    made = torch.zeros_like(mask, dtype=share.dtype, memory_format=torch.contiguous_format)
    return made.masked_fill_(mask, share)


def keep_gradients(tensors: Sequence[MeshTensor]) -> None:
    """Let gradients of what is given to an operator of `OF_ZEROS` be on the ranks."""
    for tensor in tensors:
        if tensor.requires_grad:
            version = -1 if tensor.is_leaf else tensor._version
            if _HOOKED.get(tensor) != version:
                _HOOKED[tensor] = version
                hook = partial(_on_ranks, tensor._held.team, tensor._meta.is_global)
                tensor.register_hook(hook)  # type: ignore[no-untyped-call, unused-ignore]


def _on_ranks(team: Any, is_global: bool, grad: torch.Tensor | None) -> torch.Tensor | None:  # noqa: FBT001 - of `partial`
    if grad is None or isinstance(grad, MeshTensor):
        return None
    with torch._C._DisableTorchDispatch():  # a mesh may be active
        if not grad._is_zerotensor() and grad.any():
            return None  # of code of the user's own
        zero = torch.zeros((), dtype=grad.dtype)
    put = MeshTensor._above.put_global if is_global else MeshTensor._above.upload
    made: torch.Tensor = put(zero, team).new_zeros(grad.size())
    return made


def is_one_hot(func: Any, args: Sequence[Any]) -> bool:
    """Whether a call may be `one_hot`: numbers, each compared with all classes, which are of this process."""
    return (
        func is aten.eq.Tensor
        and type(args[0]) is MeshTensor
        and type(args[1]) is torch.Tensor
        and args[0].dtype is args[1].dtype is torch.int64
        and args[0].shape[-1:] == (1,)
        and args[1].ndim == 1
    )


def one_hot(numbers: MeshTensor, classes: int) -> Any:
    """Return where each number is among the classes; on the ranks one that is none of them is an error."""
    return numbers.new_zeros((*numbers.shape[:-1], classes), dtype=torch.bool).scatter(-1, numbers, 1)
