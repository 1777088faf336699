"""How one global tensor lies on the ranks: which dimension of it is cut along which dimensions of the mesh.

Users say it by dimension of the tensor, `["gpus", None]`; ranks are told by label of the mesh, `[0]`: the number of the
dimension that is cut along it, or `WHOLE`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from trimesh.errors import ShapeError
from trimesh.plain_numbers import whole_number

WHOLE: Final = -1
"""All ranks along a label have the same."""

Cut = str | tuple[str, ...] | None
"""The labels that one dimension of a tensor is cut along."""

Where = Sequence[Cut] | Mapping[str, Any] | None
"""How a tensor lies: by dimension of the tensor (`["tp", None]`), by dimension of the mesh (`{"tp": 0}`), or None for
the whole on every rank."""


class Placements(list[Cut]):
    """How a global tensor lies: for each of its dimensions a label, several labels, or None, as `distribute` takes it.

    Attributes:
        partial: Labels along which the ranks have parts of a sum ("sum", "avg", "max" ...) that no operation has
            needed the whole of yet; torch adds them up when one does.
    """

    def __init__(self, cuts: Iterable[Cut], partial: Mapping[str, str] | None = None) -> None:
        super().__init__(cuts)
        self.partial = dict(partial or {})

    def __eq__(self, other: object) -> bool:
        """Compare; a plain list has nothing partial."""
        return super().__eq__(other) is True and self.partial == getattr(other, "partial", {})

    def __ne__(self, other: object) -> bool:
        """Compare; a list has this one of its own."""
        return not self == other

    __hash__ = None

    def __repr__(self) -> str:
        """Show it as a list, and what is partial."""
        partial = f", partial={self.partial!r}" if self.partial else ""
        return f"Placements({list(self)!r}{partial})"


def cuts_by_label(placements: Sequence[Any] | None, ndim: int, extent: Mapping[str, int]) -> tuple[int, ...]:
    """Return, for each label of a mesh, the dimension of a tensor that is cut along it, or `WHOLE`.

    Args:
        placements: What the user wrote; None cuts nothing.
        ndim: Dimensions of the tensor.
        extent: Of the mesh.

    Raises:
        ShapeError: It fits neither the tensor nor the mesh.
    """
    if placements is None:
        return (WHOLE,) * len(extent)
    if isinstance(placements, str) or not isinstance(placements, Sequence) or len(placements) != ndim:
        raise ShapeError(
            f"placements name the labels that each dimension of the tensor is cut along, here {ndim} of them, "
            f'like ["gpus", None]; got {placements!r}'
        )
    labels = list(extent)
    found = dict.fromkeys(labels, WHOLE)
    for dim, cut in enumerate(placements):
        before = -1
        for label in () if cut is None else (cut,) if isinstance(cut, str) else tuple(cut):
            if label not in found:
                raise ShapeError(f"a tensor is cut along labels of its mesh, {labels}, got {label!r}")
            if found[label] != WHOLE:
                raise ShapeError(f"a label cuts one dimension, got {label!r} for {found[label]} and {dim}")
            if labels.index(label) < before:
                raise ShapeError(
                    f"the labels of one dimension come in the order of the mesh, {labels}, got {cut!r}: "
                    "write them in that order"
                )
            before = labels.index(label)
            found[label] = dim
    return tuple(found.values())


def placements_by_name(where: Where, ndim: int, extent: Mapping[str, int]) -> Sequence[Cut] | None:
    """Return, by dimension of the tensor, what was written by dimension of the mesh; all else as it is.

    Raises:
        ShapeError: It fits neither the tensor nor the mesh.
    """
    if not isinstance(where, Mapping):
        return where
    said = {label: dim_cut_along(label, one, ndim, extent) for label, one in where.items()}
    return placements_of([said.get(label, WHOLE) for label in extent], [""] * len(extent), ndim, list(extent))


def dim_cut_along(label: str, where: Any, ndim: int, extent: Mapping[str, int]) -> int:
    """Return the dimension that is cut along a label, or `WHOLE`.

    Args:
        label: A dimension of the mesh.
        where: The number of a dimension, None, or torch's `Shard(0)`, `Replicate()`: these are known by what they can
            be asked, as to import them would take most of a second.
        ndim: Dimensions of the tensor.
        extent: Of the mesh.

    Raises:
        ShapeError: It fits neither the tensor nor the mesh.
    """
    if label not in extent:
        raise ShapeError(f"a tensor is cut along labels of its mesh, {list(extent)}, got {label!r}")
    is_shard, is_replicate = getattr(where, "is_shard", None), getattr(where, "is_replicate", None)
    if where is None or (callable(is_replicate) and is_replicate()):
        return WHOLE
    dim = where.dim if callable(is_shard) and is_shard() else where
    number = whole_number(dim)
    if number is None or not -ndim <= number < ndim:
        raise ShapeError(f"along {label!r} one of {ndim} dimensions is cut, or None, got {where!r}")
    return number % ndim


def placements_of(cuts: Sequence[int], partial: Sequence[str], ndim: int, labels: Sequence[str]) -> Placements:
    """Return what `cuts_by_label` was given; `partial` has an operation, or "", for each label."""
    by_dim: list[Cut] = []
    for dim in range(ndim):
        along = tuple(label for label, cut in zip(labels, cuts, strict=True) if cut == dim)
        by_dim.append(along if len(along) > 1 else along[0] if along else None)
    return Placements(by_dim, {label: kind for label, kind in zip(labels, partial, strict=True) if kind})
