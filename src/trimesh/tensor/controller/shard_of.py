"""`ShardOf`: a part of a tensor that this process has, and which part it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from trimesh.tensor.controller.tensor import MeshTensor
from trimesh.tensor.protocol.box import Box


class ShardOf:
    """A rectangular part of a larger tensor: `ShardOf(weight, size=(4096, 1024), start=(1024, 0))`.

    Args:
        tensor: The part, on this process.
        size: Of the whole.
        start: Where the part begins, in each dimension.
        is_first: Whether this process publishes it; of the replicas of a part exactly one does.

    Raises:
        TypeError: `tensor` is no tensor of this process.
        ValueError: The part does not lie within the whole.

    Attributes:
        tensor: As given.
        size: As given.
        box: Which part it is.
        is_first: As given.
    """

    __slots__ = ("box", "is_first", "size", "tensor")

    def __init__(
        self, tensor: torch.Tensor, *, size: Sequence[int], start: Sequence[int], is_first: bool = True
    ) -> None:
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, MeshTensor):
            raise TypeError(f"a part of a published tensor is a tensor of this process, got {tensor!r:.100}")
        part = tuple(tensor.size())
        fits = len(part) == len(size) == len(start) and all(
            0 <= begin <= begin + length <= most for begin, length, most in zip(start, part, size, strict=True)
        )
        if not fits:
            raise ValueError(f"a part must lie within the whole, {tuple(size)}, got {part} from {tuple(start)} on")
        self.tensor = tensor
        self.size = tuple(size)
        self.box = Box(tuple(start), part)
        self.is_first = is_first

    def __repr__(self) -> str:
        return f"<part of {self.size}: {self.box.size} from {self.box.start} on>"


def shard_of(value: Any) -> ShardOf:
    """Return which part of what a value is: a `ShardOf`, a `DTensor`, or a whole tensor.

    Raises:
        TypeError: It is none of these; or a `DTensor` whose values are not all there (`Partial`), or do not lie in one
            box on each rank.
    """
    if isinstance(value, ShardOf):
        return value
    if hasattr(value, "placements") and hasattr(value, "to_local"):
        return _of_dtensor(value)
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"a tensor, a ShardOf or a DTensor has parts of published tensors, got {value!r:.100}")
    return ShardOf(value, size=value.size(), start=(0,) * value.dim())


def _of_dtensor(value: Any) -> ShardOf:
    mesh = value.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise TypeError("a DTensor is published by the ranks of its device mesh, got one of others")
    box, is_first = Box.of_all(value.size()), True
    for dim, (placement, place) in enumerate(zip(value.placements, coordinate, strict=True)):
        kind = type(placement).__name__
        if kind == "Shard":
            box = box.cut(placement.dim, mesh.size(dim), place)
        elif kind == "Replicate":
            is_first = is_first and place == 0
        else:
            raise TypeError(f"a DTensor of {placement} has no parts that make up the whole: redistribute it first")
    local = value.to_local()
    if tuple(local.size()) != box.size and math.prod(local.size()):
        raise TypeError(f"a DTensor must lie as torch cuts it, {box.size} on this rank, got {tuple(local.size())}")
    return ShardOf(local.reshape(box.size), size=value.size(), start=box.start, is_first=is_first)
