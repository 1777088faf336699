"""Meshes of random extents, and how tensors lie on them at random."""

from __future__ import annotations

import random
from typing import Any, Final

import torch
from tests.tensor.judge.program import PARTS, WHOLE, Extent, Input, Place, Program, numbers

import trimesh

EXTENTS: Final[tuple[tuple[Extent, int], ...]] = (
    ((("a", 2),), 10),
    ((("a", 2), ("b", 2)), 6),
    ((("a", 3),), 3),
    ((("a", 4),), 1),
    ((("a", 1),), 1),
    ((("a", 1), ("b", 2)), 1),
    ((("a", 3), ("b", 2)), 1),
)
"""Meshes, with how often each is drawn. Two cores run what larger ones do in turns."""


def draw_extent(drawn: random.Random) -> Extent:
    """Return a mesh."""
    extents, weights = zip(*EXTENTS, strict=True)
    found: Extent = drawn.choices(extents, weights)[0]
    return found


def draw_layout(drawn: random.Random, shape: tuple[int, ...], extent: Extent, dtype: str) -> tuple[Place, ...]:
    """Return how a tensor lies: cut, the same dimension along two labels among it, whole, or in parts of a sum."""
    has_sums = dtype not in {"bool", "uint16"}
    made: list[Place] = []
    for _ in extent:
        way = drawn.random()
        if way < 0.5 and shape:
            made.append(drawn.randrange(len(shape)))
        elif way < 0.65 and has_sums:
            made.append(PARTS)
        else:
            made.append(WHOLE)
    return tuple(made)


def shares(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return terms of a sum, one for each rank, which add up to the values exactly where these are quarters."""
    if values.dtype.is_floating_point:
        first, second = values * 0.25, values * 0.75
    else:
        first = values // 2
        second = values - first
    rest = [torch.zeros_like(values)] * (count - 2)
    return torch.stack([first, second, *rest]) if count > 1 else values[None]


def put(one: Input, program: Program, procs: Any) -> torch.Tensor:
    """Return an input on the mesh."""
    if program.per_rank:
        values = torch.stack([numbers(one, rank) for rank in range(program.ranks)])
        along = [tuple(label for label, _ in program.extent), *[None] * len(one.shape)]
        made = trimesh.distribute(values, procs, along).local(along)[0]
        return made.detach().requires_grad_(one.needs_grad)
    values = numbers(one)
    at = list(zip(program.extent, one.layout, strict=True))
    cuts: list[Any] = [
        tuple(label for (label, _), place in at if place == dim) or None for dim in range(len(one.shape))
    ]
    summed = [(label, size) for (label, size), place in at if place == PARTS and one.dtype != "bool"]
    for label, size in summed:
        values = shares(values, size)
        cuts = [label, *cuts]
    made = trimesh.distribute(values, procs, cuts)
    for _ in summed:
        made = made.sum(0, dtype=made.dtype)  # as it lies along the labels: each rank keeps its term
    return made.detach().requires_grad_(one.needs_grad)
