"""`ValueMesh`, the result of a mesh call; `Shaped`, the base of mesh handles; `OutputLine`; names of mesh views."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar, cast

import attrs
import msgspec

from trimesh.errors import ShapeError, error_in_words, place_name
from trimesh.plain_numbers import whole_number
from trimesh.shape.extent import Extent, Point
from trimesh.shape.region import Region

if TYPE_CHECKING:
    from builtins import slice as Slice  # noqa: N812 - the method `slice` hides the type below
    from collections.abc import Callable


T_co = TypeVar("T_co", covariant=True)
U = TypeVar("U")

_REPR_VALUES_MAX = 8
"""Maximum values in a repr: a mesh of a thousand tensors must not fill the terminal."""


@attrs.frozen(repr=False)
class ValueMesh(Generic[T_co]):
    """Result of a mesh call: one value for each member of the called view. Immutable.

    Values are addressed by coordinates in the called view. Two value meshes are equal if they have the same view and
    equal values; a value mesh is hashable if its values are.

    Attributes:
        region: The called view: its members and their coordinates.

    Raises:
        ShapeError: There are more or fewer values than members.

    Example:
        >>> from trimesh.shape.region import Region
        >>> totals = ValueMesh(Region({"hosts": 2, "gpus": 2}), [10, 11, 12, 13])
        >>> totals.item(hosts=1, gpus=0), len(totals)
        (12, 4)
        >>> list(totals.slice(gpus=1).map(float).items())
        [({'hosts': 0/2}, 11.0), ({'hosts': 1/2}, 13.0)]
        >>> sum(totals), totals[3], totals.flatten("rank").item(rank=2)
        (46, 13, 12)
        >>> totals.to_table("total")[3]
        {'hosts': 1, 'gpus': 1, 'total': 13}
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

    def __iter__(self) -> Iterator[T_co]:
        """Yield the values in row-major order of the view; `items()` also yields the points."""
        return iter(self._values)

    def __getitem__(self, rank: int) -> T_co:
        """Return the value of the member at a row-major rank of the view.

        Raises:
            TypeError: The rank is no integer.
            ShapeError: The view has no such rank, or the member is missing.
        """
        found = whole_number(rank)
        if found is None:
            raise TypeError(
                f"values[...] takes the rank of one member, got {rank!r}: write .item({self._example()}) for a member "
                "by its coordinates, .slice(...) for several"
            )
        return self._values[self._position(found)]

    def item(self, *ranks: int, **coords: int) -> T_co:
        """Return the value of one member.

        Args:
            ranks: Must be empty: name a member by its coordinates, or write `values[rank]`.
            coords: Index along every dimension; may be left out if there is only one value.

        Raises:
            ShapeError: A label is missing or unknown, an index is outside its dimension, or the member is missing.
            TypeError: A rank was given.
        """
        if ranks:
            raise TypeError(
                f"item() takes the coordinates of a member by name, got {ranks[0]!r}: write .item({self._example()}), "
                f"or values[{ranks[0]!r}] for a rank"
            )
        if not coords and len(self) == 1:
            return self._values[0]
        return self._values[self._position(self.extent.rank(coords))]

    def _position(self, rank: int) -> int:
        base_rank = self.region.base_rank(rank)  # raises for a missing member
        return rank if len(self) == self.extent.nelements else self.region.ranks().index(base_rank)

    def _example(self) -> str:
        return ", ".join(f"{label}=0" for label in self.extent)

    def items(self) -> Iterator[tuple[Point, T_co]]:
        """Yield (point, value) for each member, in row-major order of the view."""
        return zip(self.region.points(), self._values, strict=True)

    def values(self) -> tuple[T_co, ...]:
        """Return the values in row-major order of the view."""
        return self._values

    def slice(self, **selection: int | slice) -> ValueMesh[T_co]:
        """Return the values of a part of the view; see `Region.slice`.

        Raises:
            ShapeError: There is no such dimension, or the index is outside it, or it is neither int nor slice.
        """
        region = self.region.slice(**selection)
        by_rank = dict(zip(self.region.ranks(), self._values, strict=True))
        return ValueMesh(region, [by_rank[rank] for rank in region.ranks()])

    def flatten(self, label: str) -> ValueMesh[T_co]:
        """Return the values over one dimension, in the view's order; see `Region.flatten`."""
        return ValueMesh(self.region.flatten(label), self._values)

    def to_table(self, value: str = "value") -> list[dict[str, int | T_co]]:
        """Return a list for `pandas.DataFrame`: a dict for each member, with its coordinates by label and its value.

        Args:
            value: Key of the value.

        Raises:
            ShapeError: A dimension has that name.
        """
        if value in self.extent:
            raise ShapeError(f"to_table needs a column for the value, and {value!r} is a dimension: give another name")
        return [{**point, value: one} for point, one in self.items()]

    def map(self, function: Callable[[T_co], U]) -> ValueMesh[U]:
        """Apply `function` to each value; return the results over the same view."""
        return ValueMesh(self.region, [function(value) for value in self._values])

    def __repr__(self) -> str:
        shown = [
            f"{place_name('', point)}: {value!r}"
            for point, value in zip(self.region.points(), self._values[:_REPR_VALUES_MAX], strict=False)
        ]
        if len(self._values) > _REPR_VALUES_MAX:
            shown.append(f"... {len(self._values) - _REPR_VALUES_MAX} more")
        return f"ValueMesh({', '.join(shown)})"

    def _repr_html_(self) -> str:
        """Return a table for notebooks: coordinates and value of each member; where rows are left out, errors first.

        A drawing above it shows where several members have errors.
        """
        from trimesh.html_table import ROWS_MAX, ErrorCell, table  # noqa: PLC0415 - only notebooks ask

        cells = [(point, _cell_of(value)) for point, value in self.items()]
        rows = [(*point.values(), cell) for point, cell in cells]
        failed = sum(isinstance(row[-1], ErrorCell) for row in rows)
        if len(rows) > ROWS_MAX:
            rows.sort(key=lambda row: not isinstance(row[-1], ErrorCell))
        drawn = ""
        if failed > 1:
            words = [f"failed: {cell}" if isinstance(cell, ErrorCell) else "returned" for _, cell in cells]
            drawn = drawing_of("", "", self.region, words)
        values = len(rows) - failed
        caption = f"{values} value{'s' * (values != 1)}, {failed} error{'s' * (failed != 1)}" if failed else ""
        return drawn + table((*self.extent, "value"), rows, len(rows), caption)


def _cell_of(value: object) -> str:
    """Return a value as a cell of a table: an error, or one inside of an `Outcome`, in words."""
    if hasattr(type(value), "_notebook_cell_"):
        value = cast("Any", value)._notebook_cell_()
    return error_in_words(value) if isinstance(value, BaseException) else repr(value)


# ---- base of mesh handles: their shape, and views of a part of them --------------------------------------------------


class Shaped(ABC):
    """A mesh handle, or a view of a part of the mesh. Views are cheap and own nothing."""

    @abstractmethod
    def _region(self) -> Region: ...

    @abstractmethod
    def _seen(self, region: Region) -> Self:
        """Return a view of another part of the same mesh: the members in `region`."""

    @abstractmethod
    def alive(self) -> Self:
        """Return the view without the members that this process knows to have ended."""

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
        """Return all members along a single dimension called `label`."""
        return self._seen(self._region().flatten(label))

    def split(self, /, **parts: Sequence[str] | int) -> Self:
        """Return the same members with a dimension split in two or more: `split(hosts=("dp", "pp"), pp=2)`.

        Raises:
            ShapeError: The sizes do not divide.
        """
        return self._seen(self._region().split(**parts))

    def rename(self, /, **labels: str) -> Self:
        """Return the same members with dimensions renamed: `rename(gpus="tp")`."""
        return self._seen(self._region().rename(**labels))

    def exclude(self, points: Iterable[Mapping[str, int]]) -> Self:
        """Return the view without the members at `points`; the others keep their coordinates.

        Args:
            points: Points of the mesh as spawned (`trimesh.coords(error)`), or mappings in the labels of this view.

        Raises:
            ShapeError: A point is not one of this mesh.
        """
        return self._seen(self._region().exclude(points))

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the mesh."""

    def _states(self) -> Sequence[str]:
        """Return what this process knows of each member: "live", "stalled for 3 s", "restarting" or "ended"."""
        live = frozenset(self.alive()._region().ranks())  # noqa: SLF001 - of its own class
        return ["live" if rank in live else "ended" for rank in self._region().ranks()]

    def _repr_html_(self) -> str:
        """Return a drawing for notebooks: the members by their coordinates, in the colours of their states."""
        return drawing_of(repr(self).strip("<>"), self.name, self._region(), self._states())


def drawing_of(caption: str, name: str, region: Region, texts: Sequence[str]) -> str:
    """Return a drawing of a view, as HTML.

    Args:
        caption: Text above it.
        name: Name of the mesh.
        region: The view.
        texts: State of each member in view order: a word of `trimesh.mesh_drawing`, and more for a pointer.
    """
    from trimesh.mesh_drawing import mesh_card  # noqa: PLC0415 - only notebooks draw

    text_of = dict(zip(region.ranks(), texts, strict=True))
    states = [text_of.get(rank, "").partition(" ")[0].rstrip(":") for rank in region.table]
    titles = [
        f"{place_name(name, region.base.point(rank))}: {text_of[rank]}" if rank in text_of else ""
        for rank in region.table
    ]
    return mesh_card(caption, region.extent, states, titles)


# ---- output of commands on hosts -------------------------------------------------------------------------------------


class OutputLine(msgspec.Struct, frozen=True):
    """Line of output of a command on a host; `print` puts the host and its coordinates in front.

    Attributes:
        point: Coordinates of the host, in the mesh of hosts that the command runs on.
        host: Name of the host.
        stream: Stream that the command wrote it to.
        text: The line without its newline. Bytes that are not UTF-8 are replaced. A line of more than
            `limits.OUTPUT_LINE_BYTES_MAX` bytes arrives as several.
    """

    point: Point
    host: str
    stream: Literal["stdout", "stderr"]
    text: str

    def __str__(self) -> str:
        """Format the line like forwarded output of processes: `host[...] | text`."""
        return f"{place_name(self.host, self.point)} | {self.text}"


# ---- names of mesh views in messages ---------------------------------------------------------------------------------


def view_name(mesh: str, whole: Region, seen: Region) -> str:
    """Return the display name of a view: the mesh, the coordinates that the view fixes, then its remaining dimensions.

    Args:
        mesh: Name of the mesh.
        whole: The whole mesh.
        seen: The view.

    Example:
        >>> from trimesh.shape.extent import Extent
        >>> whole = Region(Extent(hosts=2, gpus=4))
        >>> view_name("procs", whole, whole.slice(hosts=1)), view_name("procs", whole, whole.slice(hosts=1, gpus=3))
        ("procs[hosts=1]{'gpus': 4}", 'procs[hosts=1,gpus=3]')
    """
    left = dict(seen.extent)
    fixed = dict[str, int]()
    ranks, stride = seen.ranks(), 1
    for index, (label, size) in reversed(list(enumerate(whole.extent.items()))):
        # The first dimension may have grown since, so the known size does not bound its coordinates.
        places = {rank // stride if index == 0 else rank // stride % max(size, 1) for rank in ranks}
        stride *= max(size, 1)
        if label not in left and len(places) == 1:
            fixed[label] = places.pop()
    name = place_name(mesh, dict(reversed(fixed.items())))
    return f"{name}{left!r}" if left else name
