"""`ValueMesh`: one value for each member of a view."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

import attrs

from trimesh.errors import ShapeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trimesh.shape.extent import Extent
    from trimesh.shape.point import Point
    from trimesh.shape.region import Region

T_co = TypeVar("T_co", covariant=True)
U = TypeVar("U")

_REPR_VALUES_MAX = 8
"""Values that a repr shows; a mesh of a thousand tensors must not fill the terminal."""


@attrs.frozen(repr=False)
class ValueMesh(Generic[T_co]):
    """One value for each member of a view: what a mesh call returns. Immutable.

    Points have the coordinates of the view that was called. Two are equal when they lie over the same view and the
    values are equal; one is hashable when its values are.

    Attributes:
        region: The view.

    Raises:
        ShapeError: There are more or fewer values than members.

    Example:
        >>> from trimesh.shape.region import Region
        >>> totals = ValueMesh(Region({"hosts": 2, "gpus": 2}), [10, 11, 12, 13])
        >>> totals.item(hosts=1, gpus=0), len(totals)
        (12, 4)
        >>> list(totals.slice(gpus=1).map(float).items())
        [({'hosts': 0/2}, 11.0), ({'hosts': 1/2}, 13.0)]
    """

    region: Region
    _values: tuple[T_co, ...] = attrs.field(converter=tuple[T_co, ...])

    def __attrs_post_init__(self) -> None:
        if len(self._values) != len(self.region):
            raise ShapeError(f"{self.region!r} has {len(self.region)} members, got {len(self._values)} values")

    @property
    def extent(self) -> Extent:
        """Labels and sizes of the view, members that are missing included."""
        return self.region.extent

    def __len__(self) -> int:
        """Return the number of values."""
        return len(self._values)

    def item(self, **coords: int) -> T_co:
        """Return the value of one member.

        Args:
            coords: Index along every dimension; none for a mesh without dimensions.

        Raises:
            ShapeError: A label is missing or unknown, an index is outside its dimension, or the member is missing.
        """
        rank = self.extent.rank(coords)
        base_rank = self.region.base_rank(rank)  # raises for a missing member
        position = rank if len(self) == self.extent.nelements else self.region.ranks().index(base_rank)
        return self._values[position]

    def items(self) -> Iterator[tuple[Point, T_co]]:
        """Yield the points and values in the view's order."""
        return zip(self.region.points(), self._values, strict=True)

    def values(self) -> tuple[T_co, ...]:
        """Return the values in the view's order."""
        return self._values

    def slice(self, **selection: int | slice) -> ValueMesh[T_co]:
        """Return the values of a part of the view; see `Region.slice`.

        Raises:
            ShapeError: There is no such dimension, or the index is outside it, or it is neither int nor slice.
        """
        region = self.region.slice(**selection)
        by_rank = dict(zip(self.region.ranks(), self._values, strict=True))
        return ValueMesh(region, [by_rank[rank] for rank in region.ranks()])

    def map(self, function: Callable[[T_co], U]) -> ValueMesh[U]:
        """Return `function` of each value, over the same view."""
        return ValueMesh(self.region, [function(value) for value in self._values])

    def __repr__(self) -> str:
        shown = [
            f"{point!r}: {value!r}"
            for point, value in zip(self.region.points(), self._values[:_REPR_VALUES_MAX], strict=False)
        ]
        if len(self._values) > _REPR_VALUES_MAX:
            shown.append(f"... {len(self._values) - _REPR_VALUES_MAX} more")
        return f"ValueMesh({', '.join(shown)})"
