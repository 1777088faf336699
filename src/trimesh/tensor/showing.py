"""The values of mesh tensors as text, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from trimesh._runtime.foreign import in_trio
from trimesh.tensor.fetching import checked, fetch, fetch_shard, values_now
from trimesh.tensor.tensor import MeshTensor


def text_now(tensor: MeshTensor) -> str:
    """Return the values as text; it waits for them, as rule N2 says: see `answers_now`."""
    return _text(tensor, values_now(tensor))


def formatted_now(tensor: MeshTensor, spec: str) -> str:
    """Return one number as it is formatted, if every rank has the same, and anything else as `text_now`."""
    values = values_now(tensor)
    if not tensor.ndim and all(value.equal(values[0]) for value in values[1:]):
        return format(values[0].item(), spec)
    return format(_text(tensor, values), spec)


async def show(tensor: torch.Tensor) -> str:
    """Print the values of a mesh tensor, those of each rank under its coordinates; return what was printed.

    Raises:
        MeshErrorGroup: They could not be computed; see `trimesh.fetch`.

    Blocking: a checkpoint, cancellable; the ranks go on.
    """
    found = await fetch(tensor)
    mesh_tensor = checked(tensor)
    text = _text(mesh_tensor, [found] if mesh_tensor._meta.is_global else list(found.values()))
    print(text)  # noqa: T201 - what it is for
    return text


async def inspect(tensor: torch.Tensor, coordinates: Mapping[str, int] | None = None, /, **coords: int) -> torch.Tensor:
    """Return what one rank has of a mesh tensor, of the first one unless it is told; for a look while debugging.

    Args:
        tensor: The tensor.
        coordinates: Of the rank; 0 along the dimensions that are left out.
        **coords: The same, by keyword.

    Raises:
        MeshErrorGroup: It could not be computed; see `trimesh.fetch`.
        ShapeError: The coordinates are of no rank.

    Blocking: a checkpoint, cancellable; the ranks go on.
    """
    extent = checked(tensor)._held.team.region.extent
    where = {**dict.fromkeys(extent, 0), **(coordinates or {}), **coords}
    found: torch.Tensor = await in_trio(fetch_shard)(tensor, where)
    return found


def _text(tensor: MeshTensor, values: Sequence[torch.Tensor]) -> str:
    if len(values) == 1 or all(value.equal(values[0]) for value in values[1:]):
        on = "" if len(values) == 1 else ", the same on every rank"
        return f"{tensor!r}{on}\n{values[0]}"
    points = [dict(point) for point in tensor._held.team.region.points()]
    parts = [
        f"{', '.join(f'{label}={index}' for label, index in point.items())}\n{value}"
        for point, value in zip(points, values, strict=True)
    ]
    return "\n".join([repr(tensor), *parts])
