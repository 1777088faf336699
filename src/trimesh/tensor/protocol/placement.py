"""How one global tensor lies on the ranks: which dimension of it is cut along which dimensions of the mesh.

Users say it by dimension of the tensor, `["gpus", None]`; ranks are told by label of the mesh, `[0]`: the number of the
dimension that is cut along it, or `WHOLE`.
"""

from __future__ import annotations

import io
import math
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

import attrs
import msgspec
import torch

from trimesh.errors import ProtocolError, ShapeError
from trimesh.plain_numbers import whole_number
from trimesh.tensor.protocol.arguments import new_tensor

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


# ---- `Box`: a rectangular part of a tensor, and where that lies in memory. Pure --------------------------------------


@attrs.frozen
class Box:
    """Some indices of each dimension of a tensor, which lie side by side.

    Attributes:
        start: The first of each dimension.
        size: How many of each.
    """

    start: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def of_all(cls, size: Sequence[int]) -> Box:
        """Return the whole of a tensor."""
        return cls((0,) * len(size), tuple(size))

    @property
    def count(self) -> int:
        """How many elements it has."""
        return math.prod(self.size)

    def cut(self, dim: int, pieces: int, index: int) -> Box:
        """Return one piece of it: as torch cuts, all but the last ones of a size, and those smaller or empty."""
        length = -(-self.size[dim] // pieces)
        begin = min(index * length, self.size[dim])
        length = min(length, self.size[dim] - begin)
        start = (*self.start[:dim], self.start[dim] + begin, *self.start[dim + 1 :])
        return Box(start, (*self.size[:dim], length, *self.size[dim + 1 :]))

    def overlap(self, other: Box) -> Box | None:
        """Return what both have, or None if that is nothing."""
        start = tuple(map(max, self.start, other.start))
        ends = [min(a + n, b + m) for a, n, b, m in zip(self.start, self.size, other.start, other.size, strict=True)]
        size = tuple(end - begin for end, begin in zip(ends, start, strict=True))
        return Box(start, size) if all(length > 0 for length in size) else None

    def strides(self) -> tuple[int, ...]:
        """Return how far apart, in elements, its indices are in memory of its own, row-major."""
        return contiguous_strides(self.size)

    def slices(self, inner: Box) -> tuple[slice, ...]:
        """Return what a part of it is to a tensor that has all of it."""
        begins = [begin - first for begin, first in zip(inner.start, self.start, strict=True)]
        return tuple(slice(begin, begin + length) for begin, length in zip(begins, inner.size, strict=True))

    def span(self, inner: Box) -> tuple[int, int]:
        """Return where a part of it, which is not empty, begins in its memory, and how many elements on it ends."""
        strides = self.strides()
        begin = sum((a - b) * step for a, b, step in zip(inner.start, self.start, strides, strict=True))
        return begin, 1 + sum((length - 1) * step for length, step in zip(inner.size, strides, strict=True))

    def is_whole_in(self, outer: Box) -> bool:
        """Whether it lies in one piece, without gaps, in the memory of what it is a part of."""
        return outer.span(self)[1] == self.count


def contiguous_strides(size: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a row-major tensor."""
    strides: list[int] = []
    step = 1
    for length in reversed(size):
        strides.append(step)
        step *= max(1, length)
    return tuple(reversed(strides))


# ---- what a rank says, beside the parts of tensors that it publishes, of how they make up the whole ------------------

LAYOUT: Final = "trimesh/layout"
"""Name of what says so, among the published tensors."""


class PartOfState(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One tensor of a state, as one rank has it.

    Attributes:
        name: Its name.
        is_global: Whether the ranks have parts of one.
        dtype: As torch writes it.
        size: Of the whole.
        start, part: Which part of it: first index and length, by dimension.
        is_here: Whether this rank publishes that part; otherwise another one does, or it is empty.
    """

    name: str
    is_global: bool
    dtype: str
    size: tuple[int, ...]
    start: tuple[int, ...]
    part: tuple[int, ...]
    is_here: bool

    @property
    def box(self) -> Box:
        return Box(self.start, self.part)


_DECODER: Final = msgspec.msgpack.Decoder(list[PartOfState])


def read_parts(data: bytearray) -> list[PartOfState]:
    """Return what a rank has said.

    Raises:
        ProtocolError: It is nothing of that kind.
    """
    try:
        parts = _DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"the layout of a published state cannot be read: {error}") from error
    for one in parts:
        whole = zip(one.start, one.part, one.size, strict=False)
        if not len(one.start) == len(one.part) == len(one.size) or any(
            begin < 0 or length < 0 or begin + length > size for begin, length, size in whole
        ):
            raise ProtocolError(f"a published part must lie within its tensor, got {one}")
    return parts


# ---- where the parts of tensors of a checkpoint are: a file of each rank, and places in it ---------------------------

RAW_SUFFIX: Final = ".safetensors"
"""Of files whose parts are their elements."""


class Stored(msgspec.Struct, frozen=True, array_like=True):
    """One part of a tensor in a file, as `torch.save` writes it; in one of safetensors its elements, in order.

    Attributes:
        file: Its name in the directory of the checkpoint.
        offset: Where its bytes begin.
        length: How many they are.
        start: The first index of each dimension of the tensor.
        size: How many of each.
    """

    file: str
    offset: int
    length: int
    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def box(self) -> Box:
        """Which part of the tensor it is."""
        return Box(self.start, self.size)

    def read(self, directory: Path, dtype: torch.dtype) -> torch.Tensor:
        """Return the part; of a file of safetensors, pages of it that are read when they are looked at.

        Raises:
            OSError: The file cannot be read.
            ValueError: There is something else in it.
        """
        with (directory / self.file).open("rb") as file:
            if self.file.endswith(RAW_SUFFIX):
                return self._mapped(file, dtype)
            file.seek(self.offset)
            found = torch.load(io.BytesIO(file.read(self.length)), map_location="cpu", weights_only=True)
        if not isinstance(found, torch.Tensor) or tuple(found.size()) != self.size:
            raise ValueError(f"a part of size {self.size} is to be at {self.offset} of {self.file}, got {found!r:.80}")
        return found

    def _mapped(self, file: IO[bytes], dtype: torch.dtype) -> torch.Tensor:
        count = math.prod(self.size)
        if self.length != count * dtype.itemsize or os.fstat(file.fileno()).st_size < self.offset + self.length:
            raise ValueError(f"{self.file} has not {count} elements of {dtype} at {self.offset}")
        if not count:
            return torch.empty(self.size, dtype=dtype)
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch wants memory that can be written to
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=self.offset).view(self.size)


class Wanted(msgspec.Struct, frozen=True, array_like=True):
    """What the ranks read: a directory, and for each tensor the parts that there are."""

    directory: str
    parts: list[list[Stored]]


def read_box(directory: Path, parts: Sequence[Stored], box: Box, dtype: torch.dtype) -> torch.Tensor:
    """Return a part of a tensor, put together of those that files have.

    Raises:
        OSError: A file cannot be read.
        ValueError: There is something else in it, or the parts are not all of it.
    """
    made = new_tensor(box.size, dtype)
    count = 0
    for part in parts:
        common = box.overlap(part.box)
        if common is None:
            continue
        made[box.slices(common)] = part.read(directory, dtype)[part.box.slices(common)]
        count += math.prod(common.size)
    if count != box.count:
        raise ValueError(f"the parts of a checkpoint must be all of a tensor, got {count} of {box.count} elements")
    return made
