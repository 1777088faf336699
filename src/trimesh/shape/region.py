"""`Region`: a view of a mesh: its members, their order and labels.

A region has two parts:

    extent   labels and sizes of the view
    table    for each point of that extent, in row-major order, its *base rank*: the rank in the mesh as spawned

So all views are alike, whatever made them:

    Region(Extent(hosts=2, gpus=4))     table  0 1 2 3 4 5 6 7     extent  hosts=2, gpus=4
      .slice(gpus=slice(1, 3))          table    1 2     5 6       extent  hosts=2, gpus=2
      .flatten("ranks")                 table    1 2     5 6       extent  ranks=4
      .exclude([{"ranks": 3}])          table    1 2     5 6       extent  ranks=4, without base rank 6

A table in arithmetic progression is a `range`, so common views hash fast and pickle in a few bytes; any other is a
tuple. Strides would not do instead: most compositions (flatten of a slice) have none. Meshes are small
(`limits.LINKS_MAX`).

Invariants:

    RG-1  The table has `extent.nelements` entries, all different; each is a rank of `base`.
    RG-2  The excluded ranks are a subset of the table: equal views are equal values, however they were made.
    RG-3  `exclude` changes neither extent nor table: the others keep their ranks. `slice`, `split`, `flatten` and
          `rename` of a sparse view keep missing members missing.
    RG-4  Views may be empty: a slice that selects nothing leaves a dimension of size 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import cast

import attrs

from trimesh.errors import ShapeError, place_name
from trimesh.plain_numbers import whole_number
from trimesh.shape.extent import Extent, Point, check_label, check_size


def _as_extent(extent: Mapping[str, int]) -> Extent:
    return extent if isinstance(extent, Extent) else Extent(extent)


def _as_table(ranks: Sequence[int]) -> range | tuple[int, ...]:
    """Return `ranks` as a range where they are in arithmetic progression, else as a tuple."""
    if isinstance(ranks, range):
        return ranks
    if len(ranks) < 2:
        return range(ranks[0], ranks[0] + 1) if ranks else range(0)
    step = ranks[1] - ranks[0]
    if all(b - a == step for a, b in itertools.pairwise(ranks)):
        return range(ranks[0], ranks[-1] + step, step)
    return tuple(ranks)


def _whole_extent(region: Region) -> Extent:
    return region.base


def _whole_table(region: Region) -> range:
    return range(region.base.nelements)


@attrs.frozen(repr=False)
class Region:
    """A view of a mesh, as an immutable, hashable value.

    Attributes:
        base: The extent of the mesh as spawned.
        mesh: Key of that mesh, or None for none; its members' points carry it.
        extent: Labels and sizes of this view, members that are missing included.

    Example:
        >>> whole = Region(Extent(hosts=2, gpus=4), mesh="trainers")
        >>> view = whole.slice(gpus=slice(1, 3))
        >>> view, list(view.ranks()), len(view)
        (Region(hosts=2, gpus=2), [1, 2, 5, 6], 4)
        >>> sparse = view.exclude([whole.point(2)])
        >>> sparse.extent, list(sparse.ranks()), list(sparse.points())[1]
        (Extent(hosts=2, gpus=2), [1, 5, 6], {'hosts': 1/2, 'gpus': 0/2})
    """

    base: Extent = attrs.field(converter=_as_extent)
    mesh: Hashable = attrs.field(default=None, kw_only=True)
    extent: Extent = attrs.field(default=attrs.Factory(_whole_extent, takes_self=True), kw_only=True)
    _table: range | tuple[int, ...] = attrs.field(
        default=attrs.Factory(_whole_table, takes_self=True), converter=_as_table, kw_only=True, alias="table"
    )
    _excluded: frozenset[int] = attrs.field(default=frozenset[int](), kw_only=True, alias="excluded")

    def __attrs_post_init__(self) -> None:
        assert len(self._table) == self.extent.nelements  # RG-1
        assert not self._excluded or self._excluded <= set(self._table)  # RG-2

    # ---- reading ---------------------------------------------------------------------------------------------

    @property
    def table(self) -> range | tuple[int, ...]:
        """The base rank of each point of the extent, in row-major order, missing members included."""
        return self._table

    def __len__(self) -> int:
        """Return the number of members: the points of the extent without the missing ones."""
        return len(self._table) - len(self._excluded)

    def __contains__(self, base_rank: object) -> bool:
        """Return whether the member of this base rank is in the view."""
        return base_rank in self._table and base_rank not in self._excluded

    def ranks(self) -> Sequence[int]:
        """Return the base ranks of the members, in the view's order."""
        if self._excluded:
            return tuple(rank for rank in self._table if rank not in self._excluded)
        return self._table

    def missing(self) -> Sequence[int]:
        """Return the base ranks of the excluded members, in the view's order."""
        return tuple(rank for rank in self._table if rank in self._excluded)

    def points(self) -> Iterator[Point]:
        """Yield the members' points in the view's order; coordinates and rank are those in the view's extent."""
        for rank, base_rank in enumerate(self._table):
            if base_rank not in self._excluded:
                yield Point(rank, self.extent, self.mesh, base_rank)

    def point(self, rank: int) -> Point:
        """Return the member of rank `rank` in the view's extent.

        Raises:
            ShapeError: `rank` is not in the extent, or the member there is missing.
        """
        return Point(rank, self.extent, self.mesh, self.base_rank(rank))

    def base_rank(self, rank: int) -> int:
        """Return the base rank of the member of rank `rank` in the view's extent.

        Raises:
            ShapeError: `rank` is not in the extent, or the member there is missing.
        """
        point = self.extent.point(rank)
        found = self._table[point.rank]
        if found in self._excluded:
            raise ShapeError(f"the member {place_name('', point)} (rank {found} of {self.base!r}) is not in this view")
        return found

    def rank_of(self, base_rank: int) -> int:
        """Return the rank, in the view's extent, of the member of base rank `base_rank`.

        Cost: constant where the ranks are in arithmetic progression, else linear.

        Raises:
            ShapeError: It is not in the view.
        """
        if base_rank not in self:
            raise ShapeError(
                f"the member of rank {base_rank!r} of {self.base!r} is not in this view of {self.extent!r}"
            )
        return self._table.index(base_rank)

    def point_of(self, base_rank: int) -> Point:
        """Return the point, in the view's extent, of the member of base rank `base_rank`.

        Raises:
            ShapeError: It is not in the view.
        """
        return Point(self.rank_of(base_rank), self.extent, self.mesh, base_rank)

    # ---- making other views ----------------------------------------------------------------------------------

    def slice(self, **selection: int | slice) -> Region:
        """Select along dimensions: an int removes the dimension, a slice keeps it, other dimensions stay whole.

        Args:
            selection: Label to index or slice. Negative indices count from the end; a slice may have a step, and is
                cut to the size, as Python's are.

        Raises:
            ShapeError: There is no such dimension, or the index is outside it, or it is neither int nor slice.

        Example:
            >>> whole = Region(Extent(hosts=2, gpus=4))
            >>> list(whole.slice(gpus=-1).ranks()), list(whole.slice(hosts=1, gpus=slice(0, None, 2)).ranks())
            ([3, 7], [4, 6])
            >>> whole.slice(gpus=slice(2, 2))
            Region(hosts=2, gpus=0)
        """
        extent, ranks = select(self.extent, selection)
        return self._view(extent, _as_table([self._table[rank] for rank in ranks]))

    def flatten(self, label: str) -> Region:
        """Merge all dimensions into the one `label`; ranks stay.

        Raises:
            ShapeError: The label is no identifier.

        Example:
            >>> Region(Extent(hosts=2, gpus=4)).slice(gpus=slice(0, 3)).flatten("ranks")
            Region(ranks=6)
        """
        return self._view(flatten(self.extent, label), self._table)

    def split(self, **parts: Sequence[str] | int) -> Region:
        """Split dimensions into several; ranks stay.

        Args:
            parts: For each dimension to split, its new labels, the slowest first; and the size of each new label. One
                size of each split may be left out: it follows from the others.

        Raises:
            ShapeError: There is no such dimension, a label clashes, or the sizes do not divide.

        Example:
            >>> Region(Extent(hosts=4, gpus=8)).split(hosts=("dp", "pp"), pp=2)
            Region(dp=2, pp=2, gpus=8)
        """
        return self._view(split(self.extent, parts), self._table)

    def rename(self, **labels: str) -> Region:
        """Give dimensions other labels; ranks stay.

        Raises:
            ShapeError: There is no such dimension, or a new label is no identifier or clashes.

        Example:
            >>> Region(Extent(hosts=2, gpus=4)).rename(gpus="tp")
            Region(hosts=2, tp=4)
        """
        return self._view(rename(self.extent, labels), self._table)

    def exclude(self, points: Iterable[Mapping[str, int]]) -> Region:
        """Take members out; the others keep their ranks, and the extent its sizes.

        Args:
            points: A `Point` of this mesh, from any view, is found by its base rank; any other mapping has the labels
                of this view. Missing members stay missing.

        Raises:
            ShapeError: A point is of another mesh, or is not in this view.

        Example:
            >>> whole = Region(Extent(gpus=4))
            >>> view = whole.slice(gpus=slice(2, 4))
            >>> list(view.exclude([whole.point(3)]).ranks()), list(view.exclude([{"gpus": 1}]).ranks())
            ([2], [2])
        """
        if isinstance(points, Mapping):
            given = dict(cast("Mapping[str, int]", points))
            raise ShapeError(f"exclude takes a list of points, got one: write exclude([{given!r}])")
        return self.exclude_ranks(map(self._base_rank_of, points))

    def exclude_ranks(self, base_ranks: Iterable[int]) -> Region:
        """Take members out by their base ranks; ranks that are not in the view are ignored."""
        return attrs.evolve(self, excluded=self._excluded.union(rank for rank in base_ranks if rank in self._table))

    def spans(self, label: str) -> bool:
        """Return whether the view selects the same members at every place of `label`, the mesh's slowest dimension.

        Example:
            >>> whole = Region(Extent(replica=3, gpus=2))
            >>> whole.spans("replica"), whole.slice(gpus=0).spans("replica"), whole.slice(replica=0).spans("replica")
            (True, True, False)
        """
        labels = self.base.labels[:1], self.extent.labels[:1]
        if labels != ((label,), (label,)) or self.base.sizes[0] != self.extent.sizes[0]:
            return False
        inside, places = self.base.nelements // self.base.sizes[0], len(self._table) // self.base.sizes[0]
        first = self._table[:places]
        return all(
            rank < inside and self._table[places * place + index] == inside * place + rank
            for place in range(self.base.sizes[0])
            for index, rank in enumerate(first)
        )

    def resized(self, label: str, size: int) -> Region:
        """Return the same view of the mesh with another size along its slowest dimension; ranks stay.

        Args:
            label: That dimension, which the view spans (`spans`).
            size: At least 1.

        Example:
            >>> Region(Extent(replica=2, gpus=2)).slice(gpus=1).resized("replica", 4).ranks()
            range(1, 9, 2)
        """
        assert self.spans(label), self
        base = Extent({**self.base, label: size})
        inside, places = base.nelements // size, len(self._table) // self.base.sizes[0]
        table = tuple(inside * place + rank for place in range(size) for rank in self._table[:places])
        extent = Extent.of_view(self.extent.labels, (size, *self.extent.sizes[1:]))
        return attrs.evolve(self, base=base, extent=extent, table=table, excluded=self._excluded.intersection(table))

    def following(self, now: Region) -> Region:
        """Return this view on the current mesh.

        A view that spans the first dimension gets all current places along it; any other view keeps those of its
        members that are still in the mesh.

        Args:
            now: The whole mesh now, whose first dimension may have another size than when this view was made.

        Example:
            >>> before, now = Region(Extent(replica=4)), Region(Extent(replica=2))
            >>> before.following(now), before.slice(replica=slice(1, 3)).following(now).ranks()
            (Region(replica=2), (1,))
        """
        label = next(iter(self.base), "")
        view = self.resized(label, now.base.sizes[0]) if self.spans(label) else self
        return view.exclude_ranks([rank for rank in view.ranks() if rank not in now])

    def _base_rank_of(self, point: Mapping[str, int]) -> int:
        if not isinstance(point, Mapping):
            given: object = point
            raise ShapeError(f"a point is a mapping of label to index such as {{'gpus': 2}}, got {given!r}")
        if isinstance(point, Point) and point.base_rank is not None:
            where = place_name("", point)
            if point.mesh != self.mesh:
                raise ShapeError(f"the member {where} is of the mesh {point.mesh!r}, this view is of {self.mesh!r}")
            if point.base_rank not in self._table:
                rank = f"rank {point.base_rank} of {self.base!r}"
                raise ShapeError(f"the member {where} ({rank}) is not in this view of {self.extent!r}")
            return point.base_rank
        return self._table[self.extent.rank(point)]

    def _view(self, extent: Extent, table: range | tuple[int, ...]) -> Region:
        kept = self._excluded.intersection(table) if self._excluded else self._excluded
        return attrs.evolve(self, extent=extent, table=table, excluded=kept)

    def __repr__(self) -> str:
        inside = [f"{label}={size}" for label, size in self.extent.items()]
        if self._excluded:
            inside.append(f"missing={len(self._excluded)}")
        return f"Region({', '.join(inside)})"


# ---- slice, flatten, split and rename of an extent; `Region` applies them to the ranks -------------------------------

# Each function takes the extent of a view and returns that of the new view. Only `select` changes the set of points: it
# also returns their row-major ranks in the old extent.


def select(extent: Extent, selection: Mapping[str, int | slice]) -> tuple[Extent, list[int]]:
    """Select along dimensions.

    Args:
        extent: Extent to select from.
        selection: Label to index (removes the dimension) or to slice (keeps it).

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
            f"{label!r} (size {extent.size(label)}) must be sliced by an index such as {label}=2 or a slice such as "
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
    """Return the extent with other labels, replaced at the same time, so that two can swap.

    Args:
        extent: Extent to rename.
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
        extent: Extent to split.
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
                raise ShapeError(f"{label!r} (size {extent.size(label)}) cannot be split into no dimension: name two")
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
