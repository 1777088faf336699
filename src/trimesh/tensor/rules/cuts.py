"""Placements as numbers: the tensor dimension that a mesh dimension cuts, `WHOLE`, or `SUM` (partial sums).

A placement is a tuple with one number for each mesh dimension. If several mesh dimensions cut one tensor dimension, the
first cuts the tensor, the next cuts its parts, and so on. Part sizes are those of `torch.chunk`, so the last parts may
be shorter or empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import torch

from trimesh import limits
from trimesh.tensor.protocol.placement import WHOLE

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement


SUM: Final = -2
"""Ranks hold partial sums. Other reductions have no partial form: a maximum of parts would lose a NaN."""

Cuts = tuple[int, ...]
"""For each mesh dimension: the tensor dimension that it cuts, `WHOLE`, or `SUM`."""


def cuts_of(placements: Sequence[Any]) -> Cuts:
    """Convert torch's placements to numbers.

    Raises:
        NotImplementedError: A placement is of a kind that global tensors do not support.
    """
    return _cuts_of(tuple(placements))


@lru_cache(maxsize=1024)
def _cuts_of(placements: tuple[Any, ...]) -> Cuts:
    found: list[int] = []
    for one in placements:
        if one.is_replicate():
            found.append(WHOLE)
        elif type(one).__name__ == "Shard":
            found.append(one.dim)
        elif one.is_partial() and one.reduce_op == "sum":
            found.append(SUM)
        else:
            raise NotImplementedError(f"a global tensor must be sharded, replicated or a partial sum, got {one!r}")
    return tuple(found)


def placements_of(cuts: Cuts) -> tuple[Placement, ...]:
    """Convert numbers to torch's placements."""
    from torch.distributed.tensor import Partial, Replicate, Shard  # noqa: PLC0415 - see `sharding`

    return tuple(Replicate() if cut == WHOLE else Partial() if cut == SUM else Shard(cut) for cut in cuts)


def added_up(cuts: Cuts) -> Cuts:
    """Return the placements with `SUM` replaced by `WHOLE`."""
    return tuple(WHOLE if cut == SUM else cut for cut in cuts)


def part_of(length: int, parts: int, index: int) -> tuple[int, int]:
    """Return the start and the length of part `index` of `parts`, as `torch.chunk` cuts."""
    step = -(-length // parts)
    start = min(index * step, length)
    return start, min(step, length - start)


def local_part(
    size: Sequence[int], cuts: Cuts, mesh: Sequence[int], place: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the start of one rank's part in a tensor, and the size of the part.

    Args:
        size: Size of the whole tensor.
        cuts: Its placements.
        mesh: Size of each dimension of the mesh.
        place: The rank's coordinates in the mesh.
    """
    starts, lengths = [0] * len(size), list(size)
    for cut, parts, index in zip(cuts, mesh, place, strict=True):
        if cut >= 0:
            start, lengths[cut] = part_of(lengths[cut], parts, index)
            starts[cut] += start
    return starts, lengths


def has_empty_part(size: Sequence[int], cuts: Cuts, mesh: Sequence[int]) -> bool:
    """Return whether the part of some rank is empty; the last rank of each dimension has the smallest."""
    _, lengths = local_part(size, cuts, mesh, [parts - 1 for parts in mesh])
    return 0 in lengths


def dense_strides(size: Sequence[int], like_size: Sequence[int], like_stride: Sequence[int]) -> tuple[int, ...] | None:
    """Return the strides of a dense part with the dimension order of its whole; None if the whole is not dense."""
    order = sorted(range(len(size)), key=lambda dim: (like_stride[dim], -dim))
    step, whole_step = 1, 1
    strides = [0] * len(size)
    for dim in order:
        if like_size[dim] > 1 and like_stride[dim] != whole_step:
            return None
        strides[dim] = step
        step *= max(1, size[dim])
        whole_step *= max(1, like_size[dim])
    return tuple(strides)


# ---- collectives of rules, along one dimension of the mesh -----------------------------------------------------------


def all_reduced(value: torch.Tensor, operation: str, mesh: Any, dim: int) -> torch.Tensor:
    """All-reduce a tensor with an operation ("sum", "max", ...) along a mesh dimension."""
    ops = torch.ops._c10d_functional
    made: torch.Tensor = ops.wait_tensor(ops.all_reduce(value, operation, mesh.get_group(dim).group_name))
    return made


def all_summed(values: Sequence[torch.Tensor], mesh: Any, dim: int) -> list[torch.Tensor]:
    """All-reduce tensors of one dtype by sum, in as few collectives as the memory for copies allows."""
    ops, group = torch.ops._c10d_functional, mesh.get_group(dim).group_name
    made: list[torch.Tensor] = []
    for some in _within(values, limits.TENSOR_SUMMED_BYTES):
        if len(some) == 1:
            made.append(all_reduced(some[0], "sum", mesh, dim))
        else:
            made += map(ops.wait_tensor, ops.all_reduce_coalesced(some, "sum", group))
    return made


def _within(values: Sequence[torch.Tensor], nbytes: int) -> Iterator[list[torch.Tensor]]:
    """Yield groups of tensors, in order, of at most `nbytes` each; a larger tensor forms a group of its own."""
    some: list[torch.Tensor] = []
    room = nbytes
    for one in values:
        if some and one.nbytes > room:
            yield some
            some, room = [], nbytes
        some.append(one)
        room -= one.nbytes
    yield some


def all_gathered(value: torch.Tensor, mesh: Any, dim: int) -> torch.Tensor:
    """All-gather contiguous tensors of equal size, concatenated along the first dimension."""
    ops = torch.ops._c10d_functional
    group = mesh.get_group(dim)
    made: torch.Tensor = ops.wait_tensor(ops.all_gather_into_tensor(value, mesh.size(dim), group.group_name))
    return made
