"""Movement of tensors to a part of a mesh, another view of it, or another mesh of the same controller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

from trimesh.actor.proc_mesh import ProcMesh
from trimesh.errors import ShapeError
from trimesh.tensor.controller.shapes import Meta
from trimesh.tensor.controller.team import Team, call_kernel
from trimesh.tensor.controller.tensor import MeshTensor
from trimesh.tensor.controller.upload import Sizes
from trimesh.tensor.issue.fetching import checked
from trimesh.tensor.ops.global_tensor import checked_team, global_to_mesh, send_global
from trimesh.tensor.protocol.placement import contiguous_strides
from trimesh.tensor.session.opening import team_of

Pairs = tuple[tuple[int, int], ...]
"""Pairs of source and target indices that a tensor moves between."""


class Routes(tuple[Sizes, ...]):
    """Process ids for each index in a team, as an operand of an operation."""

    __slots__ = ()


def slice_tensor(tensor: torch.Tensor, **selection: int | slice) -> MeshTensor:
    """Return a tensor restricted to a part of its ranks; see `MeshTensor.slice_mesh`."""
    found = _local(tensor, "slice_mesh")
    team = found._held.team
    region = team.region.slice(**selection)
    part = team.engine.team(region)
    if part is team:
        return found
    if torch.is_grad_enabled() and found.requires_grad:
        return _applied(_Slice, found, part)
    return _sliced(found, part)


def tensor_to_mesh(tensor: torch.Tensor, target: ProcMesh) -> MeshTensor:
    """Return a copy of a tensor on other ranks; see `MeshTensor.to_mesh`."""
    found = checked(tensor)
    source = found._held.team
    team = team_of(target, "tensors move to")
    if found._meta.is_global:
        return global_to_mesh(found, team)
    pairs = _pairs(source, team)
    if torch.is_grad_enabled() and found.requires_grad:
        return _applied(_Move, found, team, pairs)
    return _moved(found, team, pairs)


def send_to_mesh(tensor: torch.Tensor, target: ProcMesh, *, waits: bool = True) -> Callable[[], MeshTensor]:
    """Send a tensor to other ranks now, to be received later.

    Args:
        tensor: The tensor to move, without autograd.
        target: The target ranks.
        waits: See `send_global`.

    Returns:
        A function that receives the tensor on the target and returns it. Call it exactly once: the source keeps a copy
        until then.

    Raises:
        ShapeError, TypeError, ProcDied, MeshStopped: See `MeshTensor.to_mesh`.
    """
    found = checked(tensor.detach())
    team = team_of(target, "tensors move to")
    if found._meta.is_global:
        checked_team(team)
        return send_global(found, team, waits=waits)[0]
    return _sent(found, team, _pairs(found._held.team, team), waits=waits)


def _local(tensor: torch.Tensor, name: str) -> MeshTensor:
    found = checked(tensor)
    if found._meta.is_global:
        raise TypeError(
            f"{name} takes a tensor on each rank, got a global one, {found!r}: "
            "write t.local() for the parts, or fetch it and distribute it over the other mesh"
        )
    return found


def _pairs(source: Team, target: Team) -> Pairs:
    """Return the pairs of sender and receiver: rank by rank, or one to all.

    Raises:
        ShapeError: The two do not fit.
    """
    sizes, wanted = (list(team.region.extent.values()) for team in (source, target))
    if len(source.peers) == 1:
        return tuple((0, place) for place in range(len(target.peers)))
    if sizes != wanted or len(source.peers) != len(target.peers):
        raise ShapeError(
            f"to_mesh moves a tensor rank by rank between meshes of the same sizes, or from one rank to all, "
            f"got {source.name} to {target.name}: write t.slice_mesh(...) first, or flatten or split the target"
        )
    return tuple((place, place) for place in range(len(source.peers)))


def _sliced(tensor: MeshTensor, part: Team) -> MeshTensor:
    [made] = call_kernel(part, "same", tensor, outputs=[tensor._meta])
    return made


def _moved(tensor: MeshTensor, target: Team, pairs: Pairs) -> MeshTensor:
    return _sent(tensor, target, pairs)()


def _sent(tensor: MeshTensor, target: Team, pairs: Pairs, *, waits: bool = True) -> Callable[[], MeshTensor]:
    source, meta = tensor._held.team, tensor._meta
    ids = [[peer.proc_id for peer in team.peers] for team in (source, target)]
    engine = source.engine
    if engine.has_values and engine.proc.is_simulated and any(ids[0][one] != ids[1][other] for one, other in pairs):
        raise RuntimeError("tensors of a simulated mesh cannot move to other processes: test this with real processes")
    meta = _contiguous(target, meta)
    move = engine.shapes.new_number()
    call_kernel(source, "send", tensor, move, _routes(pairs, ids[1], len(ids[0])), waits)
    # A later wait for the target flushes nothing of the source, so send now the commands that the target waits for.
    engine.flush_team(source)
    back = tuple((other, one) for one, other in pairs)
    routes = _routes(back, ids[0], len(ids[1]))
    receive = partial(call_kernel, target, "receive", move, routes, meta.dtype, Sizes(meta.size), outputs=[meta])
    return lambda: receive()[0]


def _routes(pairs: Pairs, ids: Sequence[int], places: int) -> Routes:
    return Routes(Sizes(ids[other] for one, other in pairs if one == place) for place in range(places))


def _contiguous(team: Team, meta: Meta) -> Meta:
    return team.engine.shapes.meta(meta.size, contiguous_strides(meta.size), meta.dtype, team.engine.device)


def _applied(function: Any, *args: Any) -> MeshTensor:
    """Apply an autograd function; torch's annotations lack its result type."""
    made: MeshTensor = function.apply(*args)
    return made


class _Slice(torch.autograd.Function):
    """Autograd function of a slice: the gradient of omitted ranks is zero."""

    @staticmethod
    def forward(ctx: Any, tensor: MeshTensor, part: Team) -> MeshTensor:
        ctx.whole = tensor._held.team
        return _sliced(tensor, part)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        [grad] = grads
        whole: Team = ctx.whole
        places = {peer: place for place, peer in enumerate(whole.peers)}
        pairs = tuple((place, places[peer]) for place, peer in enumerate(grad._held.team.peers))
        return _applied(_Move, grad, whole, pairs), None


class _Move(torch.autograd.Function):
    """Autograd function of a move: gradients move back, and are added where one rank has sent to several."""

    @staticmethod
    def forward(ctx: Any, tensor: MeshTensor, target: Team, pairs: Pairs) -> MeshTensor:
        ctx.source, ctx.pairs = tensor._held.team, pairs
        return _moved(tensor, target, pairs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        [grad] = grads
        return _applied(_Move, grad, ctx.source, tuple((other, one) for one, other in ctx.pairs)), None, None


# ---- `to_mesh` and `slice_mesh` of whole trees of tensors ------------------------------------------------------------

T = TypeVar("T")


def to_mesh(tree: T, target: ProcMesh) -> T:
    """Copy all tensors of a tree to other ranks: `t.to_mesh(target)` of each, in order.

    Args:
        tree: A tensor on a mesh, or nested lists, tuples and dicts with such tensors; other values are kept.
        target: The target ranks.

    Raises:
        ShapeError: The ranks do not fit those of a tensor.
        TypeError: A tensor is of this process.

    Blocking: no checkpoint; see `MeshTensor.to_mesh`.
    """
    moved: T = pytree.tree_map_only(torch.Tensor, lambda one: tensor_to_mesh(one, target), tree)
    return moved


def slice_mesh(tree: T, **selection: int | slice) -> T:
    """Restrict all tensors of a tree to a part of their ranks: `t.slice_mesh(...)` of each.

    Args:
        tree: See `to_mesh`; with a tensor on each rank.
        **selection: Index or slice by label.

    Raises:
        ShapeError: The ranks have no such part.
        TypeError: A tensor is of this process, or a global one.

    Blocking: no checkpoint; nothing moves.
    """
    sliced: T = pytree.tree_map_only(torch.Tensor, lambda one: slice_tensor(one, **selection), tree)
    return sliced
