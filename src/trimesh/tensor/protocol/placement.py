"""How one global tensor lies on the ranks: which dimension of it is cut along which dimensions of the mesh.

Users say it by dimension of the tensor, `["gpus", None]`; ranks are told by label of the mesh, `[0]`: the number of the
dimension that is cut along it, or `WHOLE`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from trimesh.errors import ShapeError

WHOLE: Final = -1
"""All ranks along a label have the same."""

Cut = str | tuple[str, ...] | None
"""The labels that one dimension of a tensor is cut along."""


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


def placements_of(cuts: Sequence[int], partial: Sequence[str], ndim: int, labels: Sequence[str]) -> Placements:
    """Return what `cuts_by_label` was given; `partial` has an operation, or "", for each label."""
    by_dim: list[Cut] = []
    for dim in range(ndim):
        along = tuple(label for label, cut in zip(labels, cuts, strict=True) if cut == dim)
        by_dim.append(along if len(along) > 1 else along[0] if along else None)
    return Placements(by_dim, {label: kind for label, kind in zip(labels, partial, strict=True) if kind})
