"""The values of a mesh tensor as a figure of matplotlib: an image for each rank's matrix, a line for its vector."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch

from trimesh import limits
from trimesh.errors import ShapeError
from trimesh.tensor.controller.tensor import MeshTensor

_COLUMNS_MAX = 8
"""Images beside each other: more are too small to read."""

_INCHES = 3.0
"""Width and height of one image with its title."""


def check_plot(tensor: MeshTensor) -> None:
    """Refuse what no figure shows, before values are asked for.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ShapeError: There are other than one or two dimensions, no elements, or too many ranks.
        TypeError: The elements are complex.
    """
    if tensor.ndim not in {1, 2} or not tensor.numel():
        raise ShapeError(f"a plot is of a tensor with one or two dimensions and elements, got {tensor!r}: plot a part")
    if tensor.is_complex():
        raise TypeError(f"a plot is of real numbers, got {tensor!r}: plot `t.abs()` or `t.real`")
    ranks = len(tensor._held.team.peers)
    if not tensor._meta.is_global and ranks > limits.TENSOR_PLOTTED_RANKS:
        raise ShapeError(
            f"a plot is of {limits.TENSOR_PLOTTED_RANKS} ranks at most, got {ranks}: plot `t.slice_mesh(...)`"
        )
    _figures()


def plot(values: Sequence[torch.Tensor], names: Sequence[str], title: str, columns: int) -> Any:
    """Return a figure of the values, which belongs to no window and to the caller alone.

    Args:
        values: Of one size, with one or two dimensions.
        names: One for each.
        title: Of all.
        columns: Images beside each other.
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
    """Return a figure with the images in rows, in the colours of one scale."""
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
    """Return the least and greatest number of all that are finite, if any is: the colours mean the same everywhere."""
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
            "a plot needs matplotlib, which is not installed here: write `pip install matplotlib`, or leave `plot` out",
            name="matplotlib",
        ) from error
    return importlib.import_module("matplotlib.figure")
