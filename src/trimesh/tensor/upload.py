"""Tensors of the controller on the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trimesh.tensor.call import call_kernel
from trimesh.tensor.shapes import Meta
from trimesh.tensor.team import Team
from trimesh.tensor.tensor import MeshTensor


def upload(tensor: torch.Tensor, team: Team) -> MeshTensor:
    """Return a copy of a tensor of this process on every rank of a team."""
    data = bytes_of(tensor)
    shapes = team.engine.shapes
    size = tuple(tensor.size())
    meta = shapes.meta(size, contiguous_strides(size), tensor.dtype, team.engine.device)
    return put(team, data, meta)


def put(team: Team, data: memoryview, meta: Meta) -> MeshTensor:
    """Return a tensor of the same bytes on every rank of a team."""
    [made] = call_kernel(team, "put", data, meta.dtype, Sizes(meta.size), Sizes(meta.stride), outputs=[meta])
    return made


class Sizes(tuple[int, ...]):
    """Whole numbers that are part of an operation, rather than vary."""

    __slots__ = ()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a copy of a tensor of this process, row-major."""
    with torch._C._DisableTorchDispatch():  # a mesh may be active
        # By strides of its own: one that has a single element counts as contiguous whatever its strides are.
        copy = torch.empty(tensor.size(), dtype=tensor.dtype).copy_(tensor.detach())
        flat = copy.reshape(-1).view(torch.uint8) if copy.numel() else torch.empty(0, dtype=torch.uint8)
        bytes_: Any = flat.numpy()
        return memoryview(bytes_)


def contiguous_strides(size: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a row-major tensor."""
    strides: list[int] = []
    step = 1
    for length in reversed(size):
        strides.append(step)
        step *= max(1, length)
    return tuple(reversed(strides))
