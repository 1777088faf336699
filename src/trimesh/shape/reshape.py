"""What slice, flatten, split and rename do to an extent. `Region` applies it to the ranks.

Each function takes the extent of a view and returns the one of the new view; only `select` also changes which points
there are, and says so as row-major ranks in the old extent.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trimesh.errors import ShapeError
from trimesh.plain_numbers import whole_number
from trimesh.shape.extent import Extent, check_label, check_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def select(extent: Extent, selection: Mapping[str, int | slice]) -> tuple[Extent, list[int]]:
    """Select along dimensions.

    Args:
        extent: What to select from.
        selection: Label to index (the dimension goes) or to slice (it stays).

    Returns:
        The new extent, and for each of its points the rank in the old one.

    Raises:
        ShapeError: There is no such dimension, or the index is outside it, or it is neither int nor slice.
    """
    for label in selection:
        extent.axis(label)
    kept: dict[str, int] = {}
    ranks = [0]
    for label, size in extent.items():
        chosen = selection.get(label, slice(None))
        if isinstance(chosen, slice):
            indices: Sequence[int] = _slice_range(label, size, chosen)
            kept[label] = len(indices)
        else:
            indices = (_slice_index(extent, label, chosen),)
        ranks = [rank * size + index for rank in ranks for index in indices]
    return Extent.of_view(tuple(kept), tuple(kept.values())), ranks


def _slice_index(extent: Extent, label: str, chosen: object) -> int:
    if whole_number(chosen) is None:
        raise ShapeError(
            f"{label!r} (size {extent.size(label)}) is sliced by an index such as {label}=2 or a slice such as "
            f"{label}=slice(0, 2), got {chosen!r}"
        )
    return extent.index(label, chosen)


def _slice_range(label: str, size: int, chosen: slice) -> range:
    try:
        return range(*chosen.indices(size))
    except (TypeError, ValueError) as error:
        raise ShapeError(f"{label!r} (size {size}) cannot be sliced by {chosen!r}: {error}") from error


def flatten(extent: Extent, label: str) -> Extent:
    """Return the extent of one dimension `label` with as many points.

    Raises:
        ShapeError: The label is no identifier.
    """
    return Extent.of_view((check_label(label),), (extent.nelements,))


def rename(extent: Extent, labels: Mapping[str, str]) -> Extent:
    """Return the extent with other labels, exchanged at once, so that two can swap.

    Args:
        extent: What to rename.
        labels: Old label to new label.

    Raises:
        ShapeError: There is no such dimension, or a new label is no identifier or clashes.
    """
    for old, new in labels.items():
        extent.axis(old)
        check_label(new)
    renamed = [labels.get(label, label) for label in extent]
    _check_distinct(extent, renamed)
    return Extent.of_view(renamed, extent.sizes)


def split(extent: Extent, parts: Mapping[str, Sequence[str] | int]) -> Extent:
    """Return the extent with some dimensions split into several.

    Args:
        extent: What to split.
        parts: Label to its new labels, and new label to its size. One size for each split may be left out.

    Raises:
        ShapeError: There is no such dimension, a label clashes, or the sizes do not divide.
    """
    splits: dict[str, Sequence[str]] = {}
    factors: dict[str, int] = {}
    for label, part in parts.items():
        if isinstance(part, tuple | list):
            splits[label] = [check_label(name) for name in part]
            if not part:
                raise ShapeError(f"{label!r} (size {extent.size(label)}) cannot be split into no dimension")
        elif whole_number(part) is None:
            raise ShapeError(
                f"split takes new labels such as hosts=('dp', 'pp') and their sizes such as pp=2, got {label}={part!r}"
            )
        else:
            factors[label] = check_size(label, part)
    for label in splits:
        extent.axis(label)
    for label, factor in factors.items():
        if not any(label in names for names in splits.values()):
            raise ShapeError(f"{label}={factor} is the size of no new label; new labels are: {_new_labels(splits)}")

    labels = [name for label in extent for name in splits.get(label, (label,))]
    _check_distinct(extent, labels)
    sizes: list[int] = []
    for label, size in extent.items():
        sizes += _factored(label, size, splits[label], factors) if label in splits else (size,)
    return Extent.of_view(labels, sizes)


def _factored(label: str, size: int, names: Sequence[str], factors: Mapping[str, int]) -> list[int]:
    """Return the sizes of the new labels, after finding the one that was left out."""
    open_names = [name for name in names if name not in factors]
    given = {name: factors[name] for name in names if name in factors}
    product = math.prod(given.values())
    if len(open_names) > 1:
        raise ShapeError(
            f"splitting {label!r} (size {size}) into {tuple(names)!r} leaves more than one size open: give all but "
            f"one of {', '.join(map(repr, open_names))}"
        )
    if (size % product != 0) if open_names else (size != product):
        raise ShapeError(f"{label!r} has size {size}, which cannot be split into {tuple(names)!r} with {given!r}")
    return [given[name] if name in given else size // product for name in names]


def _check_distinct(extent: Extent, labels: Sequence[str]) -> None:
    for label in labels:
        if labels.count(label) > 1:
            raise ShapeError(f"the label {label!r} would come twice: {extent!r} would become {', '.join(labels)}")


def _new_labels(splits: Mapping[str, Sequence[str]]) -> str:
    return ", ".join(repr(name) for names in splits.values() for name in names) or "none"
