"""What all mesh handles have in common: their shape, and views of a part of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Self

from trimesh.shape.extent import Extent
from trimesh.shape.point import Point
from trimesh.shape.region import Region

if TYPE_CHECKING:
    from builtins import slice as Slice  # noqa: N812 - the method `slice` hides the type below


class Shaped(ABC):
    """A mesh handle, or a view of a part of the mesh. Views are cheap and own nothing."""

    @abstractmethod
    def _region(self) -> Region: ...

    @abstractmethod
    def _seen(self, region: Region) -> Self:
        """Return a view of another part of the same mesh."""

    @abstractmethod
    def alive(self) -> Self:
        """Return the view without the members whose end is known here."""

    @property
    def extent(self) -> Extent:
        """Labels and sizes of this view, missing members included."""
        return self._region().extent

    def size(self, dim: str | None = None) -> int:
        """Return the size along `dim`, or the number of points of the extent.

        Raises:
            ShapeError: `dim` is no dimension of this view.
        """
        return self.extent.nelements if dim is None else self.extent.size(dim)

    def __len__(self) -> int:
        """Return the number of members that are not missing."""
        return len(self._region())

    def points(self) -> Iterator[Point]:
        """Yield the coordinates, in this view, of its members."""
        return self._region().points()

    def slice(self, /, **selection: int | Slice) -> Self:
        """Return a part: an int removes its dimension, a slice keeps it.

        Raises:
            ShapeError: No such dimension, or an index outside of it.
        """
        return self._seen(self._region().slice(**selection))

    def flatten(self, label: str) -> Self:
        """Return the members along one dimension called `label`."""
        return self._seen(self._region().flatten(label))

    def split(self, /, **parts: Sequence[str] | int) -> Self:
        """Return the members with a dimension split in two or more: `split(hosts=("dp", "pp"), pp=2)`.

        Raises:
            ShapeError: The sizes do not divide.
        """
        return self._seen(self._region().split(**parts))

    def rename(self, /, **labels: str) -> Self:
        """Return the members with other labels: `rename(gpus="tp")`."""
        return self._seen(self._region().rename(**labels))

    def exclude(self, points: Iterable[Mapping[str, int]]) -> Self:
        """Return the members without some; the others keep their ranks.

        Args:
            points: Points of the mesh as spawned (`trimesh.coords(error)`), or mappings in the labels of this view.

        Raises:
            ShapeError: A point is not one of this mesh.
        """
        return self._seen(self._region().exclude(points))

    def _repr_html_(self) -> str:
        """Return a table for notebooks: each member, and whether it lives as far as is known here."""
        from trimesh.html_table import table  # noqa: PLC0415 - only notebooks ask

        region = self._region()
        live = frozenset(self.alive()._region().ranks())  # noqa: SLF001 - of its own class
        states = ("live" if rank in live else "ended" for rank in region.ranks())
        rows = ((*point.values(), state) for point, state in zip(region.points(), states, strict=True))
        return table((*region.extent, "state"), rows, len(region), repr(self))
