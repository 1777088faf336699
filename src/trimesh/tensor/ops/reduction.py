"""`t.reduce(...)`: what the ranks of a mesh make of their tensors together, along some of its dimensions.

    sum avg product min max band bor bxor    each rank gets the same; with `scatter`, the part of it that is its own
    stack                                    each gets all, along a new first dimension
    stack, scatter                           rank i gets entry i of each: what was sent to it

The derivative of each is another of these: of a sum the sum, of an average the average, of a stack the scattered sum
and the other way around, of an exchange the exchange. That is the gradient of the sum over ranks of what they compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeVar

import attrs
import torch
from torch.utils import _pytree as pytree

from trimesh.errors import ShapeError
from trimesh.tensor.controller.call import call_kernel
from trimesh.tensor.controller.plan import Meta
from trimesh.tensor.controller.tensor import MeshTensor
from trimesh.tensor.issue.fetching import checked
from trimesh.tensor.protocol.box import contiguous_strides

T = TypeVar("T")

_REDUCTIONS: Final = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "stack")
_DIFFERENTIABLE: Final = frozenset({"sum", "avg", "stack"})
_BITWISE: Final = frozenset({"band", "bor", "bxor"})


@attrs.frozen
class _How:
    """What is to be done.

    Attributes:
        names: The dimensions.
        reduction: One of `_REDUCTIONS`.
        scatter: See `reduce`.
    """

    names: tuple[str, ...]
    reduction: str
    scatter: bool

    @classmethod
    def checked(cls, dims: str | Sequence[str], reduction: str, *, scatter: bool) -> _How:
        """Return what a caller has asked for."""
        names = (dims,) if isinstance(dims, str) else tuple(dims)
        if reduction not in _REDUCTIONS:
            raise ValueError(f"a reduction is one of {', '.join(_REDUCTIONS)}, got {reduction!r}")
        if not names or len(set(names)) != len(names):
            raise ShapeError(f"a reduction needs the dimensions of the mesh that it is along, got {dims!r}")
        if len(names) > 1 and (scatter or reduction == "stack"):
            raise ShapeError(
                f"stack and scatter are along one dimension, got {names!r}: "
                "activate `mesh.flatten(...)`, or do one dimension after the other"
            )
        return cls(names, reduction, bool(scatter))

    @property
    def operands(self) -> tuple[Any, ...]:
        """As the kernels take it."""
        return self.names, self.reduction, self.scatter


def reduce(tree: T, dims: str | Sequence[str], reduction: str = "sum", *, scatter: bool = False) -> T:
    """Return what the ranks make of their tensors together.

    Args:
        tree: A tensor on a mesh, or any nesting of lists, tuples and dicts of them.
        dims: A dimension of the mesh, or several: ranks that differ in these only do it together.
        reduction: "sum", "avg", "product", "min", "max", "band", "bor", "bxor", or "stack" for all tensors along a
            new first dimension.
        scatter: Each rank gets its entry along the first dimension of the result only. For one dimension; the first
            size of the tensor is that of the dimension. With "stack" it gets what the others have at its index.

    Returns:
        The same nesting of new tensors. Sums, averages and stacks have a derivative.

    Raises:
        ShapeError: The mesh has no such dimension, or the tensor not the size for `scatter`.
        TypeError: It is no mesh tensor with a tensor on each rank, or of a dtype that cannot be reduced so.
        ValueError: There is no such reduction.

    Blocking: no; errors of the ranks are raised where the value is fetched.
    """
    how = _How.checked(dims, reduction, scatter=scatter)

    def one(tensor: Any) -> Any:
        needs_grad = isinstance(tensor, torch.Tensor) and tensor.requires_grad and torch.is_grad_enabled()
        if not needs_grad:
            return _reduced(tensor, how)
        if reduction not in _DIFFERENTIABLE:
            raise TypeError(
                f"only {', '.join(sorted(_DIFFERENTIABLE))} have a derivative, got {reduction!r} of a tensor that "
                "requires a gradient: write `t.detach().reduce(...)`"
            )
        return _Reduce.apply(tensor, how)  # type: ignore[no-untyped-call, unused-ignore]

    result: T = pytree.tree_map(one, tree)
    return result


def reduce_(tree: T, dims: str | Sequence[str], reduction: str = "sum", *, scatter: bool = False) -> T:
    """As `reduce`, in the memory of the tensors; return `tree`.

    Args:
        tree: See `reduce`; no tensor of it requires a gradient, or gradients are off.
        dims: See `reduce`.
        reduction: See `reduce`.
        scatter: See `reduce`; the shape must stay what it is.

    Raises:
        ShapeError: The result has another shape.
        RuntimeError: A tensor requires a gradient.
    """
    how = _How.checked(dims, reduction, scatter=scatter)
    for leaf in pytree.tree_leaves(tree):
        tensor = checked(leaf)
        if tensor.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                "a tensor that requires a gradient cannot be reduced in place: "
                "write `t.reduce(...)`, or `with torch.no_grad():` around it"
            )
        meta = _meta(tensor, how)
        if meta.size != tensor._meta.size:
            raise ShapeError(
                f"a reduction in place must keep the shape, got {tensor._meta.size} to {meta.size}: write t.reduce(...)"
            )
        call_kernel(tensor._held.team, "reduce_", tensor, *how.operands, writes=[0])
        torch.autograd.graph.increment_version(tensor)
    return tree


def _reduced(tensor: Any, how: _How) -> MeshTensor:
    mesh_tensor = checked(tensor)
    meta = _meta(mesh_tensor, how)
    [made] = call_kernel(mesh_tensor._held.team, "reduce", mesh_tensor, *how.operands, outputs=[meta])
    return made


def _meta(tensor: MeshTensor, how: _How) -> Meta:
    """Return the metadata of the result; refuse what has none."""
    meta, team = tensor._meta, tensor._held.team
    names, reduction, scatter = how.operands
    extent = team.region.extent
    for name in names:
        if name not in extent:
            raise ShapeError(f"a reduction is along dimensions of {team.name}, got {name!r}")
    if meta.is_global:
        raise TypeError(f"a reduction takes a tensor on each rank, got {tensor!r}: write t.local() for its parts")
    is_float = meta.dtype.is_floating_point or meta.dtype.is_complex
    if (reduction in _BITWISE and is_float) or (reduction == "avg" and not is_float):
        kind = "numbers with a fraction" if reduction == "avg" else "whole numbers, or truth values"
        raise TypeError(f"{reduction} takes {kind}, got {tensor!r}")
    if team.region.missing() and (scatter or reduction == "stack"):
        raise ShapeError(f"stack and scatter need every member of the view, got {team.name} with some excluded")
    size = meta.size
    if scatter:
        length = extent[names[0]]
        if not size or size[0] != length:
            raise ShapeError(
                f"scatter gives each rank its entry along the first dimension, whose size must be that of "
                f"{names[0]!r}, {length}, got a tensor of {list(size)}: write t.reshape({length}, ...)"
            )
        if reduction != "stack":
            size = size[1:]
    elif reduction == "stack":
        size = (extent[names[0]], *size)
    return team.engine.shapes.meta(size, contiguous_strides(size), meta.dtype, meta.device)


class _Reduce(torch.autograd.Function):
    """A reduction in a program that is differentiated."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, how: _How) -> Any:
        ctx.how, ctx.divisor = how, 1
        extent = tensor._held.team.region.extent
        if how.reduction == "avg":
            for name in how.names:
                ctx.divisor *= extent[name]
        return _reduced(tensor, how)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        [grad] = grads
        how = ctx.how
        names = how.names
        if how.reduction == "stack":
            found = reduce(grad, names, "stack" if how.scatter else "sum", scatter=True)
        elif how.scatter:
            found = reduce(grad, names, "stack")
            found = found if ctx.divisor == 1 else found / ctx.divisor
        else:
            found = reduce(grad, names, how.reduction)
        return found, None
