"""`t.reduce(...)`, `broadcast`: collectives of tensors between the ranks of a mesh, along some of its dimensions.

    sum avg product min max band bor bxor    all-reduce; with `scatter`, reduce-scatter: rank i gets entry i of it
    stack                                    all-gather along a new first dimension
    stack, scatter                           all-to-all: rank i gets entry i of the tensor of each rank

The gradient is that of the sum over all ranks of their losses. So it is one of these, too: of a sum the sum, of an
average the average, of a stack the scattered sum and the other way round, of a scattered stack the scattered stack.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeVar

import attrs
import torch
from torch.utils import _pytree as pytree

from trimesh.errors import ShapeError
from trimesh.tensor.controller.shapes import Meta
from trimesh.tensor.controller.team import call_kernel
from trimesh.tensor.controller.tensor import MeshTensor
from trimesh.tensor.issue.fetching import checked
from trimesh.tensor.protocol.placement import contiguous_strides

T = TypeVar("T")

_REDUCTIONS: Final = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "stack")
_DIFFERENTIABLE: Final = frozenset({"sum", "avg", "stack"})
_REAL: Final = frozenset({"max", "min", "product"})
_BITWISE: Final = frozenset({"band", "bor", "bxor"})


@attrs.frozen
class _How:
    """Arguments of a reduction.

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
        """Check the arguments of a caller."""
        names = (dims,) if isinstance(dims, str) else tuple(dims)
        if reduction not in _REDUCTIONS:
            raise ValueError(f"a reduction must be one of {', '.join(_REDUCTIONS)}, got {reduction!r}")
        if len(set(names)) != len(names):
            raise ShapeError(f"a reduction must name each dimension of the mesh once, got {dims!r}")
        if len(names) != 1 and (scatter or reduction == "stack"):
            raise ShapeError(
                f"stack and scatter take one dimension, got {names!r}: "
                "activate `mesh.flatten(...)`, or reduce along one dimension after the other"
            )
        return cls(names, reduction, bool(scatter))

    @property
    def operands(self) -> tuple[Any, ...]:
        """Operands of the kernels."""
        return self.names, self.reduction, self.scatter


def reduce(
    tree: T, dims: str | Sequence[str], reduction: str = "sum", *, scatter: bool = False, out: T | None = None
) -> T:
    """Reduce or exchange tensors between ranks.

    Args:
        tree: A tensor on a mesh, or any nesting of lists, tuples and dicts of them.
        dims: A dimension of the mesh, or several: a group is the ranks that differ only in these. With `()` each rank
            is a group, and the result is a copy.
        reduction: "sum", "avg", "product", "min", "max", "band", "bor", "bxor", or "stack" for all tensors along a
            new first dimension.
        scatter: Whether each rank gets only the entry at its index along the first dimension of the result; with
            "stack", the entries at its index of the tensors of all. Takes one dimension of the mesh, whose size must be
            the first size of the tensor.
        out: The same nesting of tensors on the same ranks, of the size and dtype of the results, to write to and
            return. No tensor of it or of `tree` may require a gradient, unless gradients are off.

    Returns:
        The same nesting of new tensors. Sums, averages and stacks have a derivative.

    Raises:
        RuntimeError: With `out`, a tensor requires a gradient.
        ShapeError: The mesh has no such dimension, or the size of a tensor or of `out` does not fit.
        TypeError: A tensor is not on a mesh, is global, or has a dtype without this reduction; or `out` has another
            dtype or is on other ranks.
        ValueError: There is no such reduction, or `out` has another nesting.

    Blocking: no; errors of the ranks are raised when the value is fetched.
    """
    how = _How.checked(dims, reduction, scatter=scatter)
    if out is not None:
        leaves, tree_of_leaves = pytree.tree_flatten(tree)
        outs, tree_of_outs = pytree.tree_flatten(out)
        if tree_of_leaves != tree_of_outs:
            raise ValueError(f"out must have the same nesting as the tensors, got {tree_of_outs} for {tree_of_leaves}")
        metas = [_meta_of_out(tensor, target, how) for tensor, target in zip(leaves, outs, strict=True)]
        for tensor, target, _ in zip(leaves, outs, metas, strict=True):  # checked before the first is written
            call_kernel(tensor._held.team, "reduce_into", tensor, *how.operands, target, writes=[1])
            torch.autograd.graph.increment_version(target)
        return out

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
    """Reduce in place, as `reduce`; return `tree`.

    Args:
        tree: See `reduce`; no tensor of it may require a gradient, unless gradients are off.
        dims: See `reduce`.
        reduction: See `reduce`.
        scatter: See `reduce`; the result must have the shape of the tensor.

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


def _meta_of_out(leaf: Any, target: Any, how: _How) -> Meta:
    """Return the metadata of a result; refuse an `out` that does not fit it."""
    tensor, out = checked(leaf), checked(target)
    if torch.is_grad_enabled() and (tensor.requires_grad or out.requires_grad):
        raise RuntimeError(
            "a reduction with out= has no gradient, got a tensor that requires one: write `with torch.no_grad():` "
            "around it, or t.reduce(...) without out="
        )
    meta, team = _meta(tensor, how), tensor._held.team
    if out._held.team is not team or out._meta.is_global or out.dtype is not tensor.dtype:
        raise TypeError(f"out must be a tensor on each rank of {team.name}, of dtype {tensor.dtype}, got {out!r}")
    if out._meta.size != meta.size:
        raise ShapeError(f"out must have the size of the result, {list(meta.size)}, got {list(out._meta.size)}")
    return meta


def broadcast(tree: T, dim: str, source: int = 0) -> T:
    """Return, on every rank, the tensors of the rank at index `source` along one dimension of the mesh.

    Args:
        tree: A tensor on a mesh, or any nesting of lists, tuples and dicts of them.
        dim: The dimension: ranks that differ only in it get the same tensors.
        source: Index of the source along it; negative ones count from the end.

    Returns:
        The same nesting of new tensors. The source gets the sum of their gradients, the other ranks zeros.

    Raises:
        ShapeError: The mesh has no such dimension or index, or the view excludes some ranks.
        TypeError: A tensor is not on a mesh, or is global.

    Blocking: no; errors of the ranks are raised when the value is fetched.
    """

    def one(tensor: Any) -> Any:
        return _Broadcast.apply(checked(tensor), dim, source)  # type: ignore[no-untyped-call, unused-ignore]

    result: T = pytree.tree_map(one, tree)
    return result


def _broadcast(tensor: Any, dim: str, source: int, *, is_back: bool) -> MeshTensor:
    team, meta = tensor._held.team, tensor._meta
    extent = team.region.extent
    if dim not in extent:
        raise ShapeError(f"a broadcast must be along a dimension of {team.name}, got {dim!r}")
    if not -extent[dim] <= source < extent[dim]:
        raise ShapeError(f"a broadcast along {dim!r} must be from one of {extent[dim]} indices, got {source}")
    if team.region.missing():
        raise ShapeError(f"a broadcast needs every member of the view, got {team.name} with some excluded")
    if meta.is_global:
        raise TypeError(f"a broadcast takes a tensor on each rank, got {tensor!r}: write t.local() for its parts")
    made = team.engine.shapes.meta(meta.size, contiguous_strides(meta.size), meta.dtype, meta.device)
    name = "broadcast_back" if is_back else "broadcast"
    [found] = call_kernel(team, name, tensor, (dim,), source % extent[dim], outputs=[made])
    return found


class _Broadcast(torch.autograd.Function):
    """Autograd function of a broadcast."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, dim: str, source: int) -> Any:
        ctx.dim, ctx.source = dim, source
        return _broadcast(tensor, dim, source, is_back=False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        [grad] = grads
        return _Gathered.apply(grad, ctx.dim, ctx.source), None, None  # type: ignore[no-untyped-call, unused-ignore]


class _Gathered(torch.autograd.Function):
    """Autograd function of the gradient of a broadcast: a sum at the source, whose own gradient is a broadcast."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, dim: str, source: int) -> Any:
        ctx.dim, ctx.source = dim, source
        return _broadcast(tensor, dim, source, is_back=True)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        [grad] = grads
        return broadcast(grad, ctx.dim, ctx.source), None, None


def _reduced(tensor: Any, how: _How) -> MeshTensor:
    mesh_tensor = checked(tensor)
    meta = _meta(mesh_tensor, how)
    [made] = call_kernel(mesh_tensor._held.team, "reduce", mesh_tensor, *how.operands, outputs=[meta])
    return made


def _meta(tensor: MeshTensor, how: _How) -> Meta:
    """Return the metadata of the result; refuse arguments that do not fit."""
    meta, team = tensor._meta, tensor._held.team
    names, reduction, scatter = how.operands
    extent = team.region.extent
    for name in names:
        if name not in extent:
            raise ShapeError(f"a reduction must be along dimensions of {team.name}, got {name!r}")
    if meta.is_global:
        raise TypeError(f"a reduction takes a tensor on each rank, got {tensor!r}: write t.local() for its parts")
    is_float = meta.dtype.is_floating_point or meta.dtype.is_complex
    if (reduction in _BITWISE and is_float) or (reduction == "avg" and not is_float):
        kind = "floating-point or complex numbers" if reduction == "avg" else "integers or booleans"
        raise TypeError(f"{reduction} takes {kind}, got {tensor!r}")
    if reduction in _REAL and meta.dtype.is_complex:
        raise TypeError(f"{reduction} takes real numbers, got {tensor!r}: write t.reduce(..., 'stack') and reduce that")
    if team.region.missing() and (scatter or reduction == "stack"):
        raise ShapeError(f"stack and scatter need every member of the view, got {team.name} with some excluded")
    size = meta.size
    if scatter:
        length = extent[names[0]]
        if not size or size[0] != length:
            raise ShapeError(
                f"scatter needs a first dimension with an entry for each rank along {names[0]!r}, {length}, got a "
                f"tensor of {list(size)}: write t.reshape({length}, ...)"
            )
        if reduction != "stack":
            size = size[1:]
    elif reduction == "stack":
        size = (extent[names[0]], *size)
    return team.engine.shapes.meta(size, contiguous_strides(size), meta.dtype, meta.device)


class _Reduce(torch.autograd.Function):
    """Autograd function of a reduction."""

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
