"""Kernels of `t.reduce(...)` and of broadcasts, and moves of global tensors along one label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from trimesh.tensor.dtensor.sharding import assemble
from trimesh.tensor.groups.group import Group
from trimesh.tensor.groups.groups import group_of
from trimesh.tensor.kernels.global_tensors import detached, refreshed
from trimesh.tensor.protocol.placement import WHOLE
from trimesh.tensor.rank.kernel import Kernel, Poison
from trimesh.tensor.rank.rank import Rank, TeamOnRank

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


_c10d: Any = distributed_c10d  # its stub lacks the options

_OPS: Final = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}

_WIDER: Final = {
    torch.bool: torch.uint8, torch.complex32: torch.complex64, torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
}  # fmt: skip
"""Dtypes that are summed in a wider dtype."""


def reduce(
    rank: Rank,
    team: TeamOnRank,
    value: Any,
    labels: Sequence[str],
    reduction: str,
    is_scattered: bool,  # noqa: FBT001 - as it is sent
) -> Any:
    """Return the reduction of the tensors of a group; with `is_scattered`, this rank's slice of it."""
    if not labels:
        return value if isinstance(value, Poison) else value.clone(memory_format=torch.contiguous_format)
    group = group_of(rank, team, labels)
    if isinstance(value, Poison):
        group.leave(value.error)
        return value
    if reduction == "stack":
        return _exchange(group, value) if is_scattered else _stack(group, value)
    return _scatter(group, value, reduction) if is_scattered else _reduce(group, value, reduction)


def reduce_in_place(
    rank: Rank,
    team: TeamOnRank,
    value: Any,
    labels: Sequence[str],
    reduction: str,
    is_scattered: bool,  # noqa: FBT001 - as it is sent
) -> None:
    """Reduce as `reduce`, into the memory of the tensor."""
    result = reduce(rank, team, value, labels, reduction, is_scattered)
    if result is not value:
        value.copy_(result)


def reduce_into(
    rank: Rank,
    team: TeamOnRank,
    value: Any,
    labels: Sequence[str],
    reduction: str,
    is_scattered: bool,  # noqa: FBT001 - as it is sent
    out: torch.Tensor,
) -> None:
    """Reduce as `reduce`, and write the result to `out`."""
    out.copy_(reduce(rank, team, value, labels, reduction, is_scattered))


def broadcast(rank: Rank, team: TeamOnRank, value: Any, labels: Sequence[str], source: int) -> Any:
    """Return, on every rank of a group, the tensor of the rank at index `source`."""
    group = group_of(rank, team, labels)
    if isinstance(value, Poison):
        group.leave(value.error)
        return value
    result = value.clone(memory_format=torch.contiguous_format)
    wide = result.to(torch.uint8) if result.dtype is torch.bool else result
    options = _c10d.BroadcastOptions()
    options.rootRank = source
    group.broadcast([wide], options)
    return wide.to(result.dtype)


def broadcast_back(rank: Rank, team: TeamOnRank, value: Any, labels: Sequence[str], source: int) -> Any:
    """Return the gradient of `broadcast`: the sum over the group on the rank at index `source`, zeros on the others."""
    total = reduce(rank, team, value, labels, "sum", is_scattered=False)
    if isinstance(value, Poison) or group_of(rank, team, labels).rank() == source:
        return total
    return torch.zeros_like(total)


def _reduce(group: Group, value: torch.Tensor, reduction: str) -> torch.Tensor:
    result = value.to(_WIDER.get(value.dtype, value.dtype), copy=True, memory_format=torch.contiguous_format)
    options = _c10d.AllreduceOptions()
    options.reduceOp = _OPS[reduction]
    group.allreduce([result], options)
    if reduction in ("max", "min") and value.is_floating_point():
        _carry_nan(group, result, value)
    return _finish(group, result, value, reduction)


def _carry_nan(group: Group, result: torch.Tensor, value: torch.Tensor) -> None:
    """Set maxima and minima of inputs with NaN to NaN, as torch does; gloo drops NaN."""
    found = value.isnan().to(torch.uint8, memory_format=torch.contiguous_format)
    options = _c10d.AllreduceOptions()
    options.reduceOp = _OPS["max"]
    group.allreduce([found], options)
    result.masked_fill_(found.bool(), torch.nan)


def _scatter(group: Group, value: torch.Tensor, reduction: str) -> torch.Tensor:
    if reduction in ("max", "min") and value.is_floating_point():
        return _reduce(group, value, reduction)[group.rank()].clone()  # gloo's reduce-scatter drops NaN
    value = value.contiguous()
    wide = value.to(_WIDER.get(value.dtype, value.dtype))
    result = torch.empty_like(wide[0])
    options = _c10d.ReduceScatterOptions()
    options.reduceOp = _OPS[reduction]
    group._reduce_scatter_base(result.view(-1), wide.view(-1), options)
    return _finish(group, result, value, reduction)


def _finish(group: Group, result: torch.Tensor, value: torch.Tensor, reduction: str) -> torch.Tensor:
    if reduction == "avg":
        result /= group.size()
    return result.to(value.dtype)


def _stack(group: Group, value: torch.Tensor) -> torch.Tensor:
    value = value.contiguous()
    result = value.new_empty((group.size(), *value.size()))
    group._allgather_base(result.view(-1), value.view(-1), _c10d.AllgatherOptions())
    return result


def _exchange(group: Group, value: torch.Tensor) -> torch.Tensor:
    value = value.contiguous()
    result = torch.empty_like(value)
    group.alltoall_base(result, value, [], [], _c10d.AllToAllOptions())
    return result


KERNELS: Final = (
    Kernel("reduce", reduce, takes_poison=True),
    Kernel("reduce_", reduce_in_place, takes_poison=True),
    Kernel("reduce_into", reduce_into),
    Kernel("broadcast", broadcast, takes_poison=True),
    Kernel("broadcast_back", broadcast_back, takes_poison=True),
)


# ---- redistribution of global tensors along one dimension of the mesh, for plans -------------------------------------


@attrs.frozen
class KeptAlong:
    """Placement of a tensor along a label before a move, kept for its gradient."""

    along: int
    dim: int


def move_along(rank: Rank, team: TeamOnRank, value: DTensor, where: tuple[int, ...]) -> tuple[Any, KeptAlong]:
    """Redistribute a tensor along one label; return it and its former placement there."""
    along, dim = where
    placement = value.placements[along]
    kept = KeptAlong(along, getattr(placement, "dim", WHOLE) if placement.is_shard() else WHOLE)
    return _moved(refreshed(rank, value), along, dim), kept


def move_along_back(rank: Rank, team: TeamOnRank, value: DTensor, layout: KeptAlong) -> DTensor:
    """Give a gradient the former placement of its tensor along a label."""
    return _moved(refreshed(rank, value), layout.along, layout.dim)


def _moved(value: DTensor, along: int, dim: int) -> DTensor:
    from torch.distributed.tensor import Replicate, Shard  # noqa: PLC0415 - see `placements_by_label`

    target = Replicate() if dim == WHOLE else Shard(dim)
    before = value.placements[along]
    placements = [*value.placements[:along], target, *value.placements[along + 1 :]]
    if isinstance(before, Shard) and isinstance(target, Shard) and before.dim != dim:
        turned = _turned(value, along, before.dim, dim)
        if turned is not None:
            return assemble(turned, value.device_mesh, placements, torch.empty(value.size(), device="meta"))
    return detached(value, value.redistribute(placements=placements))


def _turned(value: DTensor, along: int, gathered: int, cut: int) -> torch.Tensor | None:
    """Return this rank's part after an all-to-all; None if the parts are not equal.

    On the host, torch itself would gather the whole tensor on every rank.
    """
    mesh, local = value.device_mesh, value._local_tensor
    ranks = mesh.size(along)
    pieces = {gathered: ranks, cut: ranks}
    for dim, one in enumerate(value.placements):
        if dim != along and one.is_shard():
            at = one.dim  # type: ignore[attr-defined]
            if at in pieces:
                if dim > along:  # a later label cuts the parts of this one again
                    return None
                pieces[at] *= mesh.size(dim)
    if any(value.size(dim) % count for dim, count in pieces.items()):
        return None
    sent = torch.stack(local.chunk(ranks, cut))
    sizes = [1] * ranks
    ops = torch.ops._c10d_functional
    group = mesh.get_group(along).group_name
    come: torch.Tensor = ops.wait_tensor(ops.all_to_all_single(sent, sizes, sizes, group))
    return torch.cat(come.unbind(), gathered)


KERNELS_EXCHANGES: Final = (Kernel("move_along", move_along), Kernel("move_along_back", move_along_back))
