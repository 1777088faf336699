"""Temporaries: tensors that torch itself makes in this process for an operation on mesh tensors.

The 0.0 of `where(mask, t, 0.0)`, the indices of `t[[0, 2]]`, the zeros in the derivative of `clamp`: torch makes them
on the device that a handle names, not knowing that it means the ranks. They are moved to the ranks.

A tensor that the user has made is an error instead, so the two must be distinguished. Only the arguments refer to a
temporary, so its object has fewer references than a tensor that Python code has passed to an operation. The number
is measured once, because it differs between releases of torch and of Python.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from trimesh.tensor.controller.tensor import MeshTensor
from trimesh.tensor.controller.upload import upload

if TYPE_CHECKING:
    from trimesh.tensor.controller.team import Team


class LocalTensor(Exception):
    """An argument is a tensor that the user has made in this process, or a local tensor that would be written to."""


def adopted(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], team: Team, *, is_global: bool
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of an operator, with temporaries moved to the ranks.

    Args:
        func: The operator.
        args: Its arguments.
        kwargs: The others.
        team: The ranks of the other tensors.
        is_global: Whether the other tensors are global. If so, tensors that torch has made on each rank, because a mesh
            is active, are temporaries, too.

    Raises:
        LocalTensor: A local tensor is not a temporary, or would be written to.
    """
    adopt = partial(_adopt, team, is_global=is_global)
    written = _written(func)
    # Neither this function nor its callers may bind an argument to a name or a list: that would add a reference.
    new_args = [_adopted(args, place, adopt, is_written=place in written) for place in range(len(args))]
    return new_args, {name: _adopted(kwargs, name, adopt, is_written=name in written) for name in kwargs}


def _adopt(team: Team, tensor: torch.Tensor, *, is_global: bool) -> MeshTensor:
    if not is_global:
        return upload(tensor, team)
    above = MeshTensor._above
    adopted: MeshTensor = above.whole(tensor, team) if type(tensor) is MeshTensor else above.put_global(tensor, team)
    return adopted


def _adopted(holder: Any, key: Any, adopt: partial[MeshTensor], *, is_written: bool) -> Any:
    kind = type(holder[key])
    if kind is list or kind is tuple:
        inner = holder[key]
        return kind([_adopted(inner, place, adopt, is_written=is_written) for place in range(len(inner))])
    if not issubclass(kind, torch.Tensor) or (
        kind is MeshTensor and (holder[key]._meta.is_global or not adopt.keywords["is_global"])
    ):
        return holder[key]
    if holder[key].is_meta and not is_written:  # torch infers a derivative's zero without data
        with no_dispatch():
            zeros = torch.zeros(holder[key].size(), dtype=holder[key].dtype)
        return adopt(zeros).to("meta")
    limit = _references_of_temporaries()
    if is_written or sys.getrefcount(holder[key]) > limit:
        raise LocalTensor
    # A temporary may be a view of a user's tensor: `linear` takes the transpose of the user's weight.
    if holder[key]._is_view() and sys.getrefcount(holder[key]._base) > limit - 1:  # no argument refers to it
        raise LocalTensor
    return adopt(holder[key])


@cache
def _written(func: Any) -> frozenset[int | str]:
    """Return the indices and names of the parameters that an operator changes in place."""
    parameters = enumerate(func._schema.arguments)
    written = [(place, one.name) for place, one in parameters if one.alias_info and one.alias_info.is_write]
    return frozenset(key for pair in written for key in pair)


class _Probe(torch.Tensor):
    """Counts the references to the 0.0 of `where(mask, probe, 0.0)`."""

    references: int

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types, kwargs
        if func is not torch.ops.aten.where.self:  # torch decomposes it itself only with autograd on
            return func.decompose(*args)
        cls.references = sys.getrefcount(args[2])
        return args[1]


@cache
def _references_of_temporaries() -> int:
    with _disable_current_modes():
        probe = torch.Tensor._make_wrapper_subclass(_Probe, (1,))
        torch.where(torch.ones(1, dtype=torch.bool), probe, 0.0)
    return _Probe.references


# ---- formulas that differ between mesh tensors and plain ones in torch, and are made to agree ------------------------

# The derivative of `max()`, `min()` and `median()` of a whole tensor assigns the gradient's share to the selected
# element. For plain tensors torch fills the share in at the mask. For others it multiplies by the mask, so that an
# infinite share gives NaN everywhere else. Neither formula is an operator: `issue` sees a product of a mask and a
# number in that node of the graph.
#
# The derivative of `sgn`, `normal` and some others is zeros that torch makes in this process, by no operator on a
# handle. Gradient hooks on the inputs of these operators put them onto the ranks.
#
# `one_hot` of plain tensors raises if a number is not a class. For others it compares them with all classes and does
# not raise; `issue` sees that comparison, with a temporary.

aten = torch.ops.aten

_SHARING: Final = frozenset({"MaxBackward1", "MedianBackward0", "MinBackward1", "NanmedianBackward0"})
"""Nodes of the graph that assign the share of the maximum, minimum or median."""


OF_ZEROS: Final = frozenset(
    (
        "aten::normal.Tensor_float", "aten::normal.float_Tensor", "aten::normal.Tensor_Tensor", "aten::sgn",
        "aten::sgn_", "aten::copysign.Tensor", "aten::copysign_.Tensor", "aten::nextafter", "aten::nextafter_",
        "aten::repeat", "aten::max_pool2d_with_indices_backward",
    )
)  # fmt: skip
"""Operators whose derivative may be zeros in this process."""

_HOOKED: Final[Any] = WeakIdKeyDictionary()
"""Versions of tensors with a hook that puts gradients onto the ranks; -1 for leaves, which keep their hooks."""


class _Walked(threading.local):
    """Node that this thread executes without torch's engine."""

    node: Any = None


_WALKED: Final = _Walked()


@contextmanager
def executing(node: Any) -> Generator[None]:
    """Set the node of the graph that is executed, when torch's engine does not execute it."""
    outer, _WALKED.node = _WALKED.node, node
    try:
        yield
    finally:
        _WALKED.node = outer


def is_product_of_mask(func: Any, args: Sequence[Any]) -> bool:
    """Return whether a call may be the last step of such a formula, judging by the metadata of its arguments."""
    return (
        func is aten.mul.Tensor
        and all(type(one) is MeshTensor for one in args)
        and args[0].dtype is torch.bool
        and args[1].dtype.is_floating_point
        and not args[1].ndim
    )


def is_shared_out() -> bool:
    """Return whether the executing node assigns the share of a maximum, minimum or median."""
    node: Any = torch._C._current_autograd_node()
    node = _WALKED.node if node is None else node
    return node is not None and node.name() in _SHARING


def filled(mask: MeshTensor, share: MeshTensor) -> Any:
    """Return the share where the mask is true and 0 elsewhere, as torch does for plain tensors."""
    made = torch.zeros_like(mask, dtype=share.dtype, memory_format=torch.contiguous_format)
    return made.masked_fill_(mask, share)


def keep_gradients(tensors: Sequence[MeshTensor]) -> None:
    """Add hooks that put gradients of the inputs of an `OF_ZEROS` operator onto the ranks."""
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
            return None  # made by the user's code
        zero = torch.zeros((), dtype=grad.dtype)
    put = MeshTensor._above.put_global if is_global else MeshTensor._above.upload
    made: torch.Tensor = put(zero, team).new_zeros(grad.size())
    return made


def is_one_hot(func: Any, args: Sequence[Any]) -> bool:
    """Return whether a call may be `one_hot`: numbers compared with all classes, which are in this process."""
    return (
        func is aten.eq.Tensor
        and type(args[0]) is MeshTensor
        and type(args[1]) is torch.Tensor
        and args[0].dtype is args[1].dtype is torch.int64
        and args[0].shape[-1:] == (1,)
        and args[1].ndim == 1
    )


def one_hot(numbers: MeshTensor, classes: int) -> Any:
    """Return the one-hot encoding of the numbers; a number that is not a class is an error on the ranks."""
    return numbers.new_zeros((*numbers.shape[:-1], classes), dtype=torch.bool).scatter(-1, numbers, 1)
