"""Placement of a global tensor on the ranks: which tensor dimension is cut along which dimensions of the mesh.

Users write it by tensor dimension, `["gpus", None]`. Messages to ranks have it by label of the mesh, `[0]`: the number
of the tensor dimension that is cut along the label, or `WHOLE`.
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
"""Not cut: all ranks along the label have the same values."""

Cut = str | tuple[str, ...] | None
"""Labels that one tensor dimension is cut along."""

Where = Sequence[Cut] | Mapping[str, Any] | None
"""Placement as users write it: by tensor dimension (`["tp", None]`), by mesh dimension (`{"tp": 0}`), or None for the
whole tensor on every rank."""


class Placements(list[Cut]):
    """Placement of a global tensor: a label, several labels, or None for each tensor dimension, as for `distribute`.

    Attributes:
        partial: By label along which ranks hold partial results: their reduction ("sum", "avg", "max" ...). Torch
            reduces them when an operation needs the full value.
    """

    def __init__(self, cuts: Iterable[Cut], partial: Mapping[str, str] | None = None) -> None:
        super().__init__(cuts)
        self.partial = dict(partial or {})

    def __eq__(self, other: object) -> bool:
        """Compare; a plain list equals only placements without `partial`."""
        return super().__eq__(other) is True and self.partial == getattr(other, "partial", {})

    def __ne__(self, other: object) -> bool:
        """Negate `__eq__`; `list` defines its own `__ne__`."""
        return not self == other

    __hash__ = None

    def __repr__(self) -> str:
        """Show the list, then `partial` if it is not empty."""
        partial = f", partial={self.partial!r}" if self.partial else ""
        return f"Placements({list(self)!r}{partial})"


def cuts_by_label(placements: Sequence[Any] | None, ndim: int, extent: Mapping[str, int]) -> tuple[int, ...]:
    """Return, for each label of a mesh, the dimension of a tensor that is cut along it, or `WHOLE`.

    Args:
        placements: By tensor dimension, as the user wrote them; None cuts nothing.
        ndim: Number of tensor dimensions.
        extent: Extent of the mesh.

    Raises:
        ShapeError: The placements do not fit the tensor or the mesh.
    """
    if placements is None:
        return (WHOLE,) * len(extent)
    if isinstance(placements, str) or not isinstance(placements, Sequence) or len(placements) != ndim:
        raise ShapeError(
            f"placements must have an entry for each of the {ndim} dimensions of the tensor, labels or None, "
            f'like ["gpus", None], got {placements!r}'
        )
    labels = list(extent)
    found = dict.fromkeys(labels, WHOLE)
    for dim, cut in enumerate(placements):
        before = -1
        for label in () if cut is None else (cut,) if isinstance(cut, str) else tuple(cut):
            if label not in found:
                raise ShapeError(f"a tensor must be cut along labels of its mesh, {labels}, got {label!r}")
            if found[label] != WHOLE:
                raise ShapeError(f"a label must cut one dimension only, got {label!r} for {found[label]} and {dim}")
            if labels.index(label) < before:
                raise ShapeError(f"the labels of one dimension must be in the order of the mesh, {labels}, got {cut!r}")
            before = labels.index(label)
            found[label] = dim
    return tuple(found.values())


def placements_by_name(where: Where, ndim: int, extent: Mapping[str, int]) -> Sequence[Cut] | None:
    """Convert a placement by mesh dimension to one by tensor dimension; return any other unchanged.

    Raises:
        ShapeError: The placement does not fit the tensor or the mesh.
    """
    if not isinstance(where, Mapping):
        return where
    said = {label: dim_cut_along(label, one, ndim, extent) for label, one in where.items()}
    return placements_of([said.get(label, WHOLE) for label in extent], [""] * len(extent), ndim, list(extent))


def dim_cut_along(label: str, where: Any, ndim: int, extent: Mapping[str, int]) -> int:
    """Return the dimension that is cut along a label, or `WHOLE`.

    Args:
        label: A dimension of the mesh.
        where: The number of a dimension, None, or torch's `Shard(0)`, `Replicate()`. The latter are recognised by their
            methods, as importing their classes takes most of a second.
        ndim: Number of tensor dimensions.
        extent: Extent of the mesh.

    Raises:
        ShapeError: The placement does not fit the tensor or the mesh.
    """
    if label not in extent:
        raise ShapeError(f"a tensor must be cut along labels of its mesh, {list(extent)}, got {label!r}")
    is_shard, is_replicate = getattr(where, "is_shard", None), getattr(where, "is_replicate", None)
    if where is None or (callable(is_replicate) and is_replicate()):
        return WHOLE
    dim = where.dim if callable(is_shard) and is_shard() else where
    number = whole_number(dim)
    if number is None or not -ndim <= number < ndim:
        raise ShapeError(f"the dimension to cut along {label!r} must be one of {ndim}, or None, got {where!r}")
    return number % ndim


def placements_of(cuts: Sequence[int], partial: Sequence[str], ndim: int, labels: Sequence[str]) -> Placements:
    """Invert `cuts_by_label`; `partial` has a reduction, or "", for each label."""
    by_dim: list[Cut] = []
    for dim in range(ndim):
        along = tuple(label for label, cut in zip(labels, cuts, strict=True) if cut == dim)
        by_dim.append(along if len(along) > 1 else along[0] if along else None)
    return Placements(by_dim, {label: kind for label, kind in zip(labels, partial, strict=True) if kind})


# ---- `Box`: a rectangular part of a tensor, and its place in memory. Pure --------------------------------------------


@attrs.frozen
class Box:
    """Rectangular part of a tensor: a contiguous range of indices in each dimension.

    Attributes:
        start: First index in each dimension.
        size: Number of indices in each dimension.
    """

    start: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def of_all(cls, size: Sequence[int]) -> Box:
        """Return the box of a whole tensor."""
        return cls((0,) * len(size), tuple(size))

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.size)

    def cut(self, dim: int, pieces: int, index: int) -> Box:
        """Return one piece of the box, cut as by `torch.chunk`: equal pieces, the last ones smaller or empty."""
        length = -(-self.size[dim] // pieces)
        begin = min(index * length, self.size[dim])
        length = min(length, self.size[dim] - begin)
        start = (*self.start[:dim], self.start[dim] + begin, *self.start[dim + 1 :])
        return Box(start, (*self.size[:dim], length, *self.size[dim + 1 :]))

    def overlap(self, other: Box) -> Box | None:
        """Return the intersection with another box; None if it is empty."""
        start = tuple(map(max, self.start, other.start))
        ends = [min(a + n, b + m) for a, n, b, m in zip(self.start, self.size, other.start, other.size, strict=True)]
        size = tuple(end - begin for end, begin in zip(ends, start, strict=True))
        return Box(start, size) if all(length > 0 for length in size) else None

    def strides(self) -> tuple[int, ...]:
        """Strides, in elements, of a row-major tensor that holds just this box."""
        return contiguous_strides(self.size)

    def slices(self, inner: Box) -> tuple[slice, ...]:
        """Return the slices that select `inner` from a tensor that holds this box."""
        begins = [begin - first for begin, first in zip(inner.start, self.start, strict=True)]
        return tuple(slice(begin, begin + length) for begin, length in zip(begins, inner.size, strict=True))

    def span(self, inner: Box) -> tuple[int, int]:
        """Return offset and length, in elements, of the memory of this box that spans `inner`, which is not empty."""
        strides = self.strides()
        begin = sum((a - b) * step for a, b, step in zip(inner.start, self.start, strides, strict=True))
        return begin, 1 + sum((length - 1) * step for length, step in zip(inner.size, strides, strict=True))

    def is_whole_in(self, outer: Box) -> bool:
        """Return whether the box is one contiguous range in the row-major memory of `outer`."""
        return outer.span(self)[1] == self.count


def contiguous_strides(size: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a row-major tensor."""
    strides: list[int] = []
    step = 1
    for length in reversed(size):
        strides.append(step)
        step *= max(1, length)
    return tuple(reversed(strides))


# ---- metadata that a rank publishes with its parts, to assemble whole tensors ----------------------------------------

LAYOUT: Final = "trimesh/layout"
"""Name of this metadata among the published tensors."""


class PartOfState(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One tensor of a state, as one rank has it.

    Attributes:
        name: Name of the tensor.
        is_global: Whether the ranks hold parts of one tensor.
        dtype: As torch writes it.
        size: Size of the whole tensor.
        start, part: First index and length of this rank's part, by dimension.
        is_here: Whether this rank publishes the part; otherwise another rank does, or the part is empty.
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
    """Decode the `PartOfState` records of a rank.

    Raises:
        ProtocolError: The data holds no such records.
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


# ---- places of tensor parts in a checkpoint: one file for each rank, and offsets in it -------------------------------

RAW_SUFFIX: Final = ".safetensors"
"""Suffix of files that store parts as raw elements."""


class Stored(msgspec.Struct, frozen=True, array_like=True):
    """One part of a tensor in a file, in the format of `torch.save`; in a safetensors file as raw elements, in order.

    Attributes:
        file: Name of the file in the directory of the checkpoint.
        offset: Offset in the file, in bytes.
        length: Length in bytes.
        start: First index in each dimension of the tensor.
        size: Number of indices in each dimension.
    """

    file: str
    offset: int
    length: int
    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def box(self) -> Box:
        """Return the box of this part in the tensor."""
        return Box(self.start, self.size)

    def read(self, directory: Path, dtype: torch.dtype) -> torch.Tensor:
        """Read the part. A safetensors file is mapped, and its pages are read on first access.

        Raises:
            OSError: The file cannot be read.
            ValueError: The file does not hold this part.
        """
        with (directory / self.file).open("rb") as file:
            if self.file.endswith(RAW_SUFFIX):
                return self._mapped(file, dtype)
            file.seek(self.offset)
            found = torch.load(io.BytesIO(file.read(self.length)), map_location="cpu", weights_only=True)
        if not isinstance(found, torch.Tensor) or tuple(found.size()) != self.size:
            raise ValueError(f"a part of size {self.size} must be at {self.offset} of {self.file}, got {found!r:.80}")
        return found

    def _mapped(self, file: IO[bytes], dtype: torch.dtype) -> torch.Tensor:
        count = math.prod(self.size)
        if self.length != count * dtype.itemsize or os.fstat(file.fileno()).st_size < self.offset + self.length:
            raise ValueError(f"{self.file} must have {count} elements of {dtype} at {self.offset}, but it does not")
        if not count:
            return torch.empty(self.size, dtype=dtype)
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch requires writable memory
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=self.offset).view(self.size)


class Wanted(msgspec.Struct, frozen=True, array_like=True):
    """Tensors that ranks are to read: a directory, and the stored parts of each tensor."""

    directory: str
    parts: list[list[Stored]]


def read_box(directory: Path, parts: Sequence[Stored], box: Box, dtype: torch.dtype) -> torch.Tensor:
    """Assemble one box of a tensor from its stored parts.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file does not hold its part, or the parts do not cover the box.
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
        raise ValueError(f"the parts of a checkpoint must cover a tensor, got {count} of {box.count} elements")
    return made
