"""`Extent`: the labelled sizes of a mesh, and the row-major numbering of its points.

    Extent(hosts=2, gpus=4)         gpus=0  1  2  3
                           hosts=0       0  1  2  3         rank = hosts * 4 + gpus
                           hosts=1       4  5  6  7

The last label varies fastest. `Extent()` has no dimension and one point, of rank 0.

An extent that users make has sizes of at least 1. A view that selects nothing has a dimension of size 0; only `Region`
makes such extents, and they have no points.

`Point`: one place in an extent.

A point is the mapping of its coordinates and compares equal to a plain one. It also has:

    extent     the sizes that its coordinates belong to, so `{'gpus': 2/4}`
    rank       its row-major number in that extent
    mesh       the key of the mesh that it is a member of; None for a point of no mesh
    base_rank  its rank in that mesh as spawned, in any view; None for a point of no mesh

A view that begins at the third of four members has a point `{'gpus': 0/2}` with rank 0 and base rank 2.
`Region.exclude` finds members by (mesh, base_rank), so it takes points of any view.
"""

from __future__ import annotations

import keyword
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Self

import attrs

from trimesh.errors import ShapeError
from trimesh.plain_numbers import whole_number


def check_label(label: object) -> str:
    """Return `label`, the name of a dimension.

    Raises:
        ShapeError: It is no identifier; labels are written as keyword arguments.
    """
    if not isinstance(label, str) or not label.isidentifier() or keyword.iskeyword(label):
        raise ShapeError(f"a label must be an identifier such as 'gpus', got {label!r}")
    return label


def check_size(label: str, size: object) -> int:
    """Return `size`, the number of places along the dimension `label`.

    Raises:
        ShapeError: It is no whole number of at least 1.
    """
    number = whole_number(size)
    if number is None or number < 1:
        raise ShapeError(f"the size of {label!r} must be a whole number of at least 1, got {size!r}")
    return number


@attrs.frozen(eq=False, repr=False, init=False)
class Extent(Mapping[str, int]):
    """Labelled sizes: an immutable, hashable, ordered mapping of label to size.

    An extent equals a plain mapping with the same labels and sizes. Two extents must also have the same order, because
    ranks depend on it.

    Attributes:
        labels: Names of the dimensions, the slowest first.
        sizes: Their sizes, in the same order.

    Example:
        >>> extent = Extent({"hosts": 2}) + {"gpus": 4}
        >>> extent, extent.nelements
        (Extent(hosts=2, gpus=4), 8)
        >>> extent == {"hosts": 2, "gpus": 4}
        True
        >>> extent.rank({"hosts": 1, "gpus": 2})
        6
        >>> extent.point(6)
        {'hosts': 1/2, 'gpus': 2/4}
    """

    labels: tuple[str, ...]
    sizes: tuple[int, ...]

    def __init__(self, sizes: Mapping[str, int] | None = None, /, **more: int) -> None:
        """Make an extent of a mapping, of keywords, or of both.

        Args:
            sizes: Label to size.
            more: The same, after those of `sizes`.

        Raises:
            ShapeError: A label is no identifier or comes twice, or a size is no whole number of at least 1.
        """
        given: Mapping[str, int] = {} if sizes is None else sizes
        if not isinstance(given, Mapping):
            raise ShapeError(f"an extent is a mapping of label to size such as {{'gpus': 4}}, got {given!r}")
        for label, size in more.items():
            if label in given:
                raise ShapeError(f"the label {label!r} comes twice, with sizes {given[label]!r} and {size!r}")
        both = {**given, **more}
        self._set([check_label(label) for label in both], [check_size(label, size) for label, size in both.items()])

    @classmethod
    def of_view(cls, labels: Sequence[str], sizes: Sequence[int]) -> Self:
        """Make the extent of a view, of which a size may be 0. The caller has checked labels and sizes."""
        self = cls.__new__(cls)
        self._set(labels, sizes)
        return self

    def _set(self, labels: Sequence[str], sizes: Sequence[int]) -> None:
        object.__setattr__(self, "labels", tuple(labels))
        object.__setattr__(self, "sizes", tuple(sizes))

    @property
    def nelements(self) -> int:
        """Number of points: the product of the sizes."""
        return math.prod(self.sizes)

    def size(self, label: str) -> int:
        """Return the size of the dimension `label`.

        Raises:
            ShapeError: There is no such dimension.
        """
        return self.sizes[self.axis(label)]

    def axis(self, label: str) -> int:
        """Return the position of the dimension `label`, from 0, the slowest.

        Raises:
            ShapeError: There is no such dimension.
        """
        if label not in self.labels:
            known = ", ".join(map(repr, self.labels)) or "none"
            from trimesh.plain_numbers import suggestion  # noqa: PLC0415 - only errors need it

            near = suggestion(str(label), self.labels)
            raise ShapeError(f"{self!r} has no dimension {label!r}{near}; its labels are: {known}")
        return self.labels.index(label)

    def index(self, label: str, index: object) -> int:
        """Return `index` along the dimension `label` counted from its start.

        Args:
            label: Name of the dimension.
            index: Whole number; a negative one counts from the end, as Python's do.

        Raises:
            ShapeError: There is no such dimension, or the index is no whole number or outside it.
        """
        size = self.size(label)
        number = whole_number(index)
        if number is None:
            raise ShapeError(f"an index of {label!r} (size {size}) must be a whole number, got {index!r}")
        if not -size <= number < size:
            raise ShapeError(f"{label!r} has size {size}, so {label}={index!r} is outside of it")
        return number % size

    def rank(self, coords: Mapping[str, int]) -> int:
        """Return the row-major rank of the point with these coordinates.

        Args:
            coords: Label to index, every label once, in any order.

        Raises:
            ShapeError: A label is missing or unknown, or an index is outside its dimension.
        """
        for label in coords:
            self.axis(label)
        rank = 0
        for label, size in self.items():
            if label not in coords:
                raise ShapeError(f"a point of {self!r} needs an index of {label!r} (size {size}), got {dict(coords)!r}")
            rank = rank * size + self.index(label, coords[label])
        return rank

    def point(self, rank: int) -> Point:
        """Return the point of rank `rank`, of no mesh.

        Raises:
            ShapeError: `rank` is not in 0 .. nelements - 1.
        """
        number = whole_number(rank)
        if number is None:
            raise ShapeError(f"a rank must be a whole number, got {rank!r}")
        return Point(number, self)

    def points(self) -> Iterator[Point]:
        """Yield all points in order of rank.

        Example:
            >>> [dict(point) for point in Extent(hosts=1, gpus=2).points()]
            [{'hosts': 0, 'gpus': 0}, {'hosts': 0, 'gpus': 1}]
        """
        return (Point(rank, self) for rank in range(self.nelements))

    def __add__(self, other: Mapping[str, int]) -> Extent:
        """Return the extent with the dimensions of both; those of `other` vary faster.

        Raises:
            ShapeError: A label is in both.
        """
        right = other if isinstance(other, Extent) else Extent(other)
        for label, size in right.items():
            if label in self.labels:
                raise ShapeError(f"the label {label!r} (size {self.size(label)}) comes again with size {size}")
        return Extent.of_view(self.labels + right.labels, self.sizes + right.sizes)

    def __getitem__(self, label: str) -> int:
        if label not in self.labels:
            raise KeyError(label)
        return self.sizes[self.labels.index(label)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Extent):
            return self.labels == other.labels and self.sizes == other.sizes
        if isinstance(other, Mapping):
            return dict(self) == dict(other)  # pyright: ignore[reportUnknownArgumentType]
        return NotImplemented

    def __hash__(self) -> int:
        return hash((self.labels, self.sizes))

    def __repr__(self) -> str:
        return f"Extent({', '.join(f'{label}={size}' for label, size in self.items())})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Extent.of_view, (self.labels, self.sizes)


# ---- `Point`: one place in an extent ---------------------------------------------------------------------------------


@attrs.frozen(eq=False, repr=False)
class Point(Mapping[str, int]):
    """One place in an extent: an immutable, hashable mapping of label to index.

    A point equals a plain mapping with the same coordinates. Two points are equal when they have the same coordinates
    in the same extent and are the same member of the same mesh, or both of none.

    Attributes:
        rank: Row-major number in `extent`.
        extent: Sizes that the coordinates belong to.
        mesh: Key of the mesh that this is a member of, or None.
        base_rank: Rank in the mesh as spawned, or None for a point of no mesh.

    Raises:
        ShapeError: `rank` is not in the extent.

    Example:
        >>> from trimesh.shape.extent import Extent
        >>> point = Extent(hosts=2, gpus=4).point(6)
        >>> point
        {'hosts': 1/2, 'gpus': 2/4}
        >>> point == {"hosts": 1, "gpus": 2}, point["gpus"], point.rank, point.size("gpus")
        (True, 2, 6, 4)
    """

    rank: int
    extent: Extent
    mesh: Hashable = None
    base_rank: int | None = None

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.rank < self.extent.nelements:
            raise ShapeError(
                f"{self.extent!r} has {self.extent.nelements} points, ranks start at 0; got rank {self.rank!r}"
            )

    def size(self, label: str) -> int:
        """Return the size of the dimension `label` of the extent.

        Raises:
            ShapeError: There is no such dimension.
        """
        return self.extent.size(label)

    def __getitem__(self, label: str) -> int:
        stride = 1
        for name, size in zip(reversed(self.extent.labels), reversed(self.extent.sizes), strict=True):
            if name == label:
                return self.rank // stride % size
            stride *= size
        raise KeyError(label)

    def __iter__(self) -> Iterator[str]:
        return iter(self.extent.labels)

    def __len__(self) -> int:
        return len(self.extent.labels)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Point):
            return (
                self.rank == other.rank
                and self.base_rank == other.base_rank
                and self.mesh == other.mesh
                and self.extent == other.extent
            )
        if isinstance(other, Mapping):
            return dict(self) == dict(other)  # pyright: ignore[reportUnknownArgumentType]
        return NotImplemented

    def __hash__(self) -> int:
        return hash((self.rank, self.extent))

    def __repr__(self) -> str:
        inside = ", ".join(f"{label!r}: {self[label]}/{size}" for label, size in self.extent.items())
        return f"{{{inside}}}"

    def __reduce__(self) -> tuple[Any, ...]:
        return Point, (self.rank, self.extent, self.mesh, self.base_rank)
