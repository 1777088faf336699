"""What the rules let the ranks along a dimension of the mesh do together."""

from __future__ import annotations

from typing import Any

import torch


def all_reduced(value: torch.Tensor, operation: str, mesh: Any, dim: int) -> torch.Tensor:
    """Return what the ranks have, put together element by element."""
    ops = torch.ops._c10d_functional
    made: torch.Tensor = ops.wait_tensor(ops.all_reduce(value, operation, mesh.get_group(dim).group_name))
    return made


def all_gathered(value: torch.Tensor, mesh: Any, dim: int) -> torch.Tensor:
    """Return what the ranks have, of one size and contiguous, one after another along the first dimension."""
    ops = torch.ops._c10d_functional
    group = mesh.get_group(dim)
    made: torch.Tensor = ops.wait_tensor(ops.all_gather_into_tensor(value, mesh.size(dim), group.group_name))
    return made
