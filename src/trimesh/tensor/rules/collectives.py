"""What the rules let the ranks along a dimension of the mesh do together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from trimesh import limits


def all_reduced(value: torch.Tensor, operation: str, mesh: Any, dim: int) -> torch.Tensor:
    """Return what the ranks have, put together element by element."""
    ops = torch.ops._c10d_functional
    made: torch.Tensor = ops.wait_tensor(ops.all_reduce(value, operation, mesh.get_group(dim).group_name))
    return made


def all_summed(values: Sequence[torch.Tensor], mesh: Any, dim: int) -> list[torch.Tensor]:
    """Return the sums of what the ranks have, of one dtype: as few collectives as their memory for copies allows."""
    ops, group = torch.ops._c10d_functional, mesh.get_group(dim).group_name
    made: list[torch.Tensor] = []
    for some in _within(values, limits.TENSOR_SUMMED_BYTES):
        if len(some) == 1:
            made.append(all_reduced(some[0], "sum", mesh, dim))
        else:
            made += map(ops.wait_tensor, ops.all_reduce_coalesced(some, "sum", group))
    return made


def _within(values: Sequence[torch.Tensor], nbytes: int) -> Iterator[list[torch.Tensor]]:
    """Yield them in order, as many at once as have so many bytes together; one that has more alone."""
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
    """Return what the ranks have, of one size and contiguous, one after another along the first dimension."""
    ops = torch.ops._c10d_functional
    group = mesh.get_group(dim)
    made: torch.Tensor = ops.wait_tensor(ops.all_gather_into_tensor(value, mesh.size(dim), group.group_name))
    return made
