"""The kernels of `reduction`: what each rank does of `t.reduce(...)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from trimesh.tensor.groups.group import Group
from trimesh.tensor.groups.groups import group_of
from trimesh.tensor.rank.kernel import Kernel
from trimesh.tensor.rank.poison import Poison
from trimesh.tensor.rank.rank import Rank, TeamOnRank

_c10d: Any = distributed_c10d  # whose stub leaves out the options

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
"""What is added up as another dtype."""


def reduce(
    rank: Rank,
    team: TeamOnRank,
    value: Any,
    labels: Sequence[str],
    reduction: str,
    is_scattered: bool,  # noqa: FBT001 - as it is sent
) -> Any:
    """Return what the ranks of a group make of their tensors together."""
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
    """Do it in the memory of the tensor."""
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
    """Do it, and write the result to another tensor."""
    out.copy_(reduce(rank, team, value, labels, reduction, is_scattered))


def broadcast(rank: Rank, team: TeamOnRank, value: Any, labels: Sequence[str], source: int) -> Any:
    """Return the tensor of the rank at an index of a group."""
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
    """Return the sum of what all have at the rank at an index of a group, and zeros at the others."""
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
    """Let the largest, or smallest, of numbers among which some are none be none, as torch has it; gloo loses them."""
    found = value.isnan().to(torch.uint8, memory_format=torch.contiguous_format)
    options = _c10d.AllreduceOptions()
    options.reduceOp = _OPS["max"]
    group.allreduce([found], options)
    result.masked_fill_(found.bool(), torch.nan)


def _scatter(group: Group, value: torch.Tensor, reduction: str) -> torch.Tensor:
    if reduction in ("max", "min") and value.is_floating_point():
        return _reduce(group, value, reduction)[group.rank()].clone()  # gloo would lose what is no number
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
