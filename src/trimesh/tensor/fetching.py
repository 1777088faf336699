"""Values of mesh tensors at the controller: with `await`, or, where torch leaves no choice, without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trimesh._runtime.foreign import in_trio
from trimesh.shape.value_mesh import ValueMesh
from trimesh.tensor.answers import answers, answers_now
from trimesh.tensor.call import call_kernel
from trimesh.tensor.engine import Request
from trimesh.tensor.team import Team
from trimesh.tensor.tensor import MeshTensor


async def fetch(tensor: torch.Tensor) -> Any:
    """Return the whole value of a mesh tensor.

    Returns:
        Of a global tensor, the tensor; of one with a tensor on each rank, a `ValueMesh` of them. Copies, on the CPU.

    Raises:
        MeshErrorGroup: An operation that it depends on has failed, with the line that issued it; or a process has
            ended.
        TypeError: It is no mesh tensor.

    Blocking: a checkpoint, cancellable; the ranks go on.
    """
    mesh_tensor = checked(tensor)
    team = mesh_tensor._held.team
    places = [0] if mesh_tensor._meta.is_global else range(len(team.peers))
    found = await in_trio(_answered)(mesh_tensor, places)
    if mesh_tensor._meta.is_global:
        return found[0]
    return ValueMesh(team.region, [found[place] for place in places])


async def fetch_shard(tensor: torch.Tensor, coordinates: Mapping[str, int] | None = None, /, **coords: int) -> Any:
    """Return what one rank has of a mesh tensor.

    Args:
        tensor: The tensor.
        coordinates: Of the rank, in the labels of the view that the tensor is on.
        **coords: The same, by keyword. A view of one rank needs none.

    Returns:
        The rank's own tensor; of a global one, its shard. A copy, on the CPU.

    Raises:
        MeshErrorGroup: See `fetch`.
        ShapeError: The coordinates are of no rank.
    """
    mesh_tensor = checked(tensor)
    team = mesh_tensor._held.team
    place = place_of(team, {**(coordinates or {}), **coords})
    found = await in_trio(_answered)(mesh_tensor, [place], is_shard=True)
    return found[place]


def place_of(team: Team, coordinates: Mapping[str, int]) -> int:
    """Return the place in a team of the rank with these coordinates; without any, of the only one.

    Raises:
        ShapeError: There is none.
    """
    if not coordinates and len(team.peers) == 1:
        return 0
    rank = team.region.extent.rank(coordinates)
    return list(team.region.ranks()).index(team.region.base_rank(rank))


def checked(tensor: Any) -> MeshTensor:
    """Return a mesh tensor.

    Raises:
        TypeError: It is none.
    """
    if not isinstance(tensor, MeshTensor):
        raise TypeError(f"this takes a tensor on a mesh, got {type(tensor).__qualname__}: its value is here already")
    return tensor


def scalar_now(tensor: MeshTensor) -> Any:
    """Return the one number that a tensor is on every rank; see `answers_now`.

    Raises:
        ValueError: The ranks have different ones.
    """
    values = [value.item() for value in values_now(tensor)]
    first = values[0]
    if any(value != first and not (value != value and first != first) for value in values):  # noqa: PLR0124 - nan
        raise ValueError(
            f"a number of a mesh tensor must be the same on every rank, got {values[:8]}: "
            "write `await trimesh.fetch(t)` for all of them, or `await trimesh.fetch_shard(t, ...)` for one"
        )
    return first


def same_now(tensor: MeshTensor) -> torch.Tensor:
    """Return the value that a tensor has on every rank; see `answers_now`.

    Raises:
        ValueError: The ranks have different ones.
    """
    values = values_now(tensor)
    if not all(torch.equal(value, values[0]) or _equal_with_nan(value, values[0]) for value in values[1:]):
        raise ValueError(
            f"the values of {tensor!r} differ between the ranks: write `await trimesh.fetch(t)` for all of them, "
            "or `await trimesh.fetch_shard(t, ...)` for those of one rank"
        )
    return values[0]


def _equal_with_nan(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.is_floating_point() and one.shape == other.shape and torch.allclose(one, other, 0, 0, equal_nan=True)


def values_now(tensor: MeshTensor) -> list[torch.Tensor]:
    """Return the tensor of each rank, or a list of the one global tensor; see `answers_now`."""
    team = tensor._held.team
    places = [0] if tensor._meta.is_global else range(len(team.peers))
    found = answers_now(_ask(tensor, places))
    return [found[place] for place in places]


async def _answered(tensor: MeshTensor, places: Sequence[int], *, is_shard: bool = False) -> Mapping[int, Any]:
    return await answers(_ask(tensor, places, is_shard=is_shard))


def _ask(tensor: MeshTensor, places: Sequence[int], *, is_shard: bool = False) -> Request:
    team = tensor._held.team
    name = "fetch_full" if tensor._meta.is_global and not is_shard else "fetch"
    return team.engine.ask(team, places, lambda number: call_kernel(team, name, tensor, number, list(places)))
