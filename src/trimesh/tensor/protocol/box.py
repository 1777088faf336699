"""`Box`: a rectangular part of a tensor, and where that lies in memory. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs


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
