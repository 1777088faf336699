"""`Point`: one place in an extent.

A point is the mapping of its coordinates and compares equal to the plain one. It also knows where it lies:

    extent     the sizes its coordinates are read in, so `{'gpus': 2/4}`
    rank       its row-major number in that extent
    mesh       the key of the mesh it is a member of, or None for mere coordinates
    base_rank  its rank in that mesh as spawned, whatever view it was seen through; None for mere coordinates

A view that begins at the third of four members has a point `{'gpus': 0/2}` with rank 0 and base rank 2. It is
by (mesh, base_rank) that `Region.exclude` takes a member on any view.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from trimesh.errors import ShapeError, place_name

__all__ = ["Point", "place_name"]

if TYPE_CHECKING:
    from trimesh.shape.extent import Extent


@attrs.frozen(eq=False, repr=False)
class Point(Mapping[str, int]):
    """One place in an extent: an immutable, hashable mapping of label to index.

    Beside a plain mapping, a point is equal when the coordinates are. Two points are equal when they have the same
    coordinates in the same extent and are the same member of the same mesh, or both of none.

    Attributes:
        rank: Row-major number in `extent`.
        extent: Sizes that the coordinates are read in.
        mesh: Key of the mesh that this is a member of, or None.
        base_rank: Rank in the mesh as spawned, or None for mere coordinates.

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
