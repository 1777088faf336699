"""Display of mesh tensors: values as text and as figures."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, overload

import torch
from torch.utils import _pytree as pytree

from trimesh import limits
from trimesh._runtime.tasks import in_trio
from trimesh.errors import ShapeError, place_name
from trimesh.tensor.controller.tensor import MeshTensor
from trimesh.tensor.issue.fetching import checked, fetch, fetch_shard, values_now

T = TypeVar("T")


def text_now(tensor: MeshTensor) -> str:
    """Return the values as text; blocks until they arrive (rule N2): see `answers_now`."""
    return _text(tensor, values_now(tensor))


def formatted_now(tensor: MeshTensor, spec: str) -> str:
    """Format a single number that is the same on every rank by the spec; return other tensors as `text_now` does."""
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
    """Print the values of a mesh tensor, each rank's under its coordinates; or plot them.

    Args:
        tensor: The tensor.
        plot: `True` plots instead of printing: an image of each rank's matrix, or a line for each rank's vector. A path
            (`plot="weights.png"`) also writes the figure there, in the format of the path's suffix. Plotting imports
            matplotlib; no window opens.

    Returns:
        The printed text; or, with `plot`, the `matplotlib.figure.Figure`.

    Raises:
        ModuleNotFoundError: `plot` is given, and matplotlib is not installed.
        MeshErrorGroup: The values could not be computed; see `trimesh.fetch`.
        ShapeError: `plot` is given, and the tensor does not have one or two dimensions, has no elements, or has more
            than 64 ranks.
        TypeError: `plot` is given, and the elements are complex.

    Blocking: a checkpoint, cancellable; the ranks go on. Plotting blocks the thread for about a second.
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
    print(text)  # noqa: T201 - printing is its purpose
    return text


async def inspect(tree: T, coordinates: Mapping[str, int] | None = None, /, **coords: int) -> T:
    """Return one rank's values of a mesh tensor, for debugging; by default the first rank's.

    Args:
        tree: The tensor, or lists, tuples and dicts, nested, that contain some; other leaves are returned unchanged.
        coordinates: Coordinates of the rank; 0 along dimensions that are left out.
        **coords: The same, by keyword.

    Raises:
        MeshErrorGroup: The tensor could not be computed; see `trimesh.fetch`.
        ShapeError: No rank has these coordinates.

    Blocking: a checkpoint, cancellable; the ranks go on.
    """
    leaves, shape = pytree.tree_flatten(tree)
    if not any(isinstance(leaf, MeshTensor) for leaf in leaves):
        checked(tree)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, MeshTensor):
            given = {**(coordinates or {}), **coords}
            where = {**dict.fromkeys(leaf._held.team.region.extent, 0), **given} if given else None
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
        return plot(values[:1], [""], _title(tensor, values), columns=1)
    sizes = list(tensor._held.team.region.extent.values())
    return plot(values, _names(tensor), _title(tensor, values), columns=sizes[-1])


def _are_same(values: Sequence[torch.Tensor]) -> bool:
    return all(value.equal(values[0]) for value in values[1:])


def _title(tensor: MeshTensor, values: Sequence[torch.Tensor]) -> str:
    return f"{tensor!r}, the same on every rank" if len(values) > 1 and _are_same(values) else repr(tensor)


def _names(tensor: MeshTensor) -> list[str]:
    """Return the coordinates of each rank."""
    points = tensor._held.team.region.points()
    return [place_name("", point) for point in points]


# ---- plot ------------------------------------------------------------------------------------------------------------

# Values of a mesh tensor as a matplotlib figure: an image for each rank's matrix, a line for its vector.

_COLUMNS_MAX = 8
"""Images in a row; with more they are too small to read."""

_INCHES = 3.0
"""Width and height in inches of one image with its title."""


def check_plot(tensor: MeshTensor) -> None:
    """Refuse tensors that cannot be plotted, before values are requested.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ShapeError: The tensor does not have one or two dimensions, has no elements, or has too many ranks.
        TypeError: The elements are complex.
    """
    if tensor.ndim not in {1, 2} or not tensor.numel():
        raise ShapeError(f"a plot needs a tensor of one or two dimensions, with elements, got {tensor!r}: plot a part")
    if tensor.is_complex():
        raise TypeError(f"a plot needs real numbers, got {tensor!r}: plot `t.abs()` or `t.real`")
    ranks = len(tensor._held.team.peers)
    if not tensor._meta.is_global and ranks > limits.TENSOR_PLOTTED_RANKS:
        raise ShapeError(
            f"a plot can show at most {limits.TENSOR_PLOTTED_RANKS} ranks, got {ranks}: plot `t.slice_mesh(...)`"
        )
    _figures()


def plot(values: Sequence[torch.Tensor], names: Sequence[str], title: str, columns: int) -> Any:
    """Return a figure of the values, without a window; the caller owns it.

    Args:
        values: Tensors of one size, with one or two dimensions.
        names: Name of each tensor.
        title: Title of the figure.
        columns: Images in a row.
    """
    arrays = [value.double().numpy() for value in values]
    if values[0].ndim == 1:
        figure = _figures().Figure(layout="constrained")
        axes = figure.subplots()
        for array, name in zip(arrays, names, strict=True):
            axes.plot(array, label=name, marker="." if len(array) == 1 else None)
        axes.set_xlabel("index")
        if len(names) > 1:
            axes.legend()
    else:
        figure = _images(arrays, names, min(columns, len(names), _COLUMNS_MAX), _range(values))
    figure.suptitle(title)
    return figure


def _images(arrays: Sequence[Any], names: Sequence[str], columns: int, limits_of_color: dict[str, float]) -> Any:
    """Return a figure with the images in rows, on one colour scale."""
    rows = -(-len(arrays) // columns)
    figure = _figures().Figure(figsize=(_INCHES * columns + 1, _INCHES * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    images: list[Any] = []
    for place, array, name in zip(axes, arrays, names, strict=False):
        images.append(place.imshow(array, aspect="auto", **limits_of_color))
        place.set_title(name)
    for place in axes[len(arrays) :]:
        place.set_axis_off()
    figure.colorbar(images[0], ax=axes)
    return figure


def _range(values: Sequence[torch.Tensor]) -> dict[str, float]:
    """Return the minimum and maximum of all finite numbers, if any, as one colour scale for all images."""
    finite = torch.cat([value.double().flatten() for value in values])
    finite = finite[finite.isfinite()]
    return {"vmin": finite.min().item(), "vmax": finite.max().item()} if len(finite) else {"vmin": 0.0, "vmax": 1.0}


def _figures() -> Any:
    try:
        importlib.import_module("matplotlib")
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise ModuleNotFoundError(
            "a plot needs matplotlib, which is not installed here: write `pip install matplotlib`, or omit `plot`",
            name="matplotlib",
        ) from error
    return importlib.import_module("matplotlib.figure")
