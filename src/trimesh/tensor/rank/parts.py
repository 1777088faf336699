"""Parts of tensors in memory that was lent: how they lie there, and how they are read to where they belong."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import attrs
import torch

from trimesh.errors import ProtocolError
from trimesh.tensor.protocol.box import Box
from trimesh.tensor.protocol.new_memory import new_tensor
from trimesh.tensor.rank.moves import Piece

ALIGN_BYTES: Final = 64
"""Where a part begins: a cache line, and the widest vector load."""


@attrs.frozen
class Part:
    """A part of a tensor in lent memory.

    Attributes:
        box: Which part.
        dtype: Of the tensor.
        offset: Where it begins, in bytes; from there it lies row-major.
    """

    box: Box
    dtype: torch.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        return self.box.count * self.dtype.itemsize

    def fields(self) -> tuple[Any, ...]:
        """Return it as plain values."""
        return list(self.box.start), list(self.box.size), str(self.dtype).removeprefix("torch."), self.offset


def part_of(fields: Any, nbytes: int) -> Part:
    """Return the part that `Part.fields` has described.

    Raises:
        ProtocolError: It is none that lies within `nbytes`.
    """
    try:
        start, size, dtype, offset = fields
        found = Part(Box(tuple(start), tuple(size)), getattr(torch, dtype), offset)
        numbers = [*start, *size, offset]
    except (TypeError, ValueError, AttributeError) as error:
        raise ProtocolError(f"part of a tensor must be described by its box, type and place, got {fields!r}") from error
    if not isinstance(found.dtype, torch.dtype) or not all(type(number) is int and number >= 0 for number in numbers):
        raise ProtocolError(f"part of a tensor must be described by whole numbers and a type, got {fields!r}")
    if len(start) != len(size) or offset + found.nbytes > nbytes:
        raise ProtocolError(f"part of a tensor must lie within the {nbytes} bytes that were lent, got {fields!r}")
    return found


def lay_out(boxes: Iterable[tuple[Box, torch.dtype]]) -> tuple[list[Part], int]:
    """Return how parts lie one after the other, and how many bytes they take."""
    parts: list[Part] = []
    at = 0
    for box, dtype in boxes:
        parts.append(Part(box, dtype, at))
        at = -(-(at + parts[-1].nbytes) // ALIGN_BYTES) * ALIGN_BYTES
    return parts, at


def fill(memory: memoryview, part: Part, value: torch.Tensor) -> None:
    """Write a part to where it is to lie."""
    if part.nbytes:
        flat = torch.frombuffer(memory, dtype=part.dtype, count=part.box.count, offset=part.offset)
        flat.view(part.box.size).copy_(value)


class PartReading:
    """What is to be read of lent memory to fill tensors, and what is left to be done when it has been read.

    Attributes:
        pieces: What to read.
    """

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self._later: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, part: Part, target: torch.Tensor, place: Box) -> None:
        """Read what a part has of the box that a contiguous tensor stands for."""
        common = part.box.overlap(place)
        if common is None:
            return
        begin, length = part.box.span(common)
        offset = part.offset + begin * part.dtype.itemsize
        there = target[place.slices(common)]
        if length == common.count and common.is_whole_in(place):
            self.pieces.append((offset, there))
            return
        # With its gaps: one copy of what lies between costs less than a read for each run of bytes.
        flat = new_tensor([length], part.dtype)
        self.pieces.append((offset, flat))
        self._later.append((there, flat.as_strided(common.size, part.box.strides())))

    def finish(self) -> None:
        """Put into place what was read with gaps."""
        for target, value in self._later:
            target.copy_(value)
