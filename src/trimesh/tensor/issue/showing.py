"""The values of mesh tensors as text, for people."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, overload

import torch
from torch.utils import _pytree as pytree

from trimesh._runtime.tasks import in_trio
from trimesh.shape.point import place_name
from trimesh.tensor.controller.tensor import MeshTensor
from trimesh.tensor.issue.fetching import checked, fetch, fetch_shard, values_now
from trimesh.tensor.issue.plot import check_plot
from trimesh.tensor.issue.plot import plot as draw

T = TypeVar("T")


def text_now(tensor: MeshTensor) -> str:
    """Return the values as text; it waits for them, as rule N2 says: see `answers_now`."""
    return _text(tensor, values_now(tensor))


def formatted_now(tensor: MeshTensor, spec: str) -> str:
    """Return one number as it is formatted, if every rank has the same, and anything else as `text_now`."""
    values = values_now(tensor)
    if not tensor.ndim and all(value.equal(values[0]) for value in values[1:]):
        return format(values[0].item(), spec)
    return format(_text(tensor, values), spec)


@overload
async def show(tensor: torch.Tensor) -> str: ...


@overload
async def show(tensor: torch.Tensor, *, plot: Literal[False]) -> str: ...


@overload
async def show(tensor: torch.Tensor, *, plot: Literal[True] | str | os.PathLike[str]) -> Any: ...


async def show(tensor: torch.Tensor, *, plot: bool | str | os.PathLike[str] = False) -> Any:
    """Print the values of a mesh tensor, those of each rank under its coordinates; or draw them.

    Args:
        tensor: The tensor.
        plot: `True` draws rather than prints: an image of each rank's matrix, or a line of each one's vector. A path
            (`plot="weights.png"`) does so and writes the figure there, in the format that the path ends with. This
            needs matplotlib, which is imported when it is asked for; no window opens.

    Returns:
        What was printed; or, with `plot`, the `matplotlib.figure.Figure`.

    Raises:
        ModuleNotFoundError: It is to be drawn, and matplotlib is not installed.
        MeshErrorGroup: They could not be computed; see `trimesh.fetch`.
        ShapeError: It is to be drawn, and has other than one or two dimensions, no elements, or more than 64 ranks.
        TypeError: It is to be drawn, and has complex elements.

    Blocking: a checkpoint, cancellable; the ranks go on. Drawing and writing a figure takes the thread, for about a
    second.
    """
    mesh_tensor = checked(tensor)
    if plot is not False:
        check_plot(mesh_tensor)
    found = await fetch(tensor)
    values = [found] if mesh_tensor._meta.is_global else list(found.values())
    if plot is not False:
        figure = _figure(mesh_tensor, values)
        if plot is not True:
            figure.savefig(plot)
        return figure
    text = _text(mesh_tensor, values)
    print(text)  # noqa: T201 - what it is for
    return text


async def inspect(tree: T, coordinates: Mapping[str, int] | None = None, /, **coords: int) -> T:
    """Return what one rank has of a mesh tensor, of the first one unless it is told; for a look while debugging.

    Args:
        tree: The tensor, or any nesting of lists, tuples and dicts with some; anything else in it stays.
        coordinates: Of the rank; 0 along the dimensions that are left out.
        **coords: The same, by keyword.

    Raises:
        MeshErrorGroup: It could not be computed; see `trimesh.fetch`.
        ShapeError: The coordinates are of no rank.

    Blocking: a checkpoint, cancellable; the ranks go on.
    """
    leaves, shape = pytree.tree_flatten(tree)
    if not any(isinstance(leaf, MeshTensor) for leaf in leaves):
        checked(tree)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, MeshTensor):
            where = {**dict.fromkeys(leaf._held.team.region.extent, 0), **(coordinates or {}), **coords}
            leaves[index] = await in_trio(fetch_shard)(leaf, where)
    found: T = pytree.tree_unflatten(leaves, shape)
    return found


def _text(tensor: MeshTensor, values: Sequence[torch.Tensor]) -> str:
    if _are_same(values):
        return f"{_title(tensor, values)}\n{values[0]}"
    parts = [f"{name}\n{value}" for name, value in zip(_names(tensor), values, strict=True)]
    return "\n".join([_title(tensor, values), *parts])


def _figure(tensor: MeshTensor, values: Sequence[torch.Tensor]) -> Any:
    if _are_same(values):
        return draw(values[:1], [""], _title(tensor, values), columns=1)
    sizes = list(tensor._held.team.region.extent.values())
    return draw(values, _names(tensor), _title(tensor, values), columns=sizes[-1])


def _are_same(values: Sequence[torch.Tensor]) -> bool:
    return all(value.equal(values[0]) for value in values[1:])


def _title(tensor: MeshTensor, values: Sequence[torch.Tensor]) -> str:
    return f"{tensor!r}, the same on every rank" if len(values) > 1 and _are_same(values) else repr(tensor)


def _names(tensor: MeshTensor) -> list[str]:
    """Return the coordinates of each rank."""
    points = tensor._held.team.region.points()
    return [place_name("", point) for point in points]
