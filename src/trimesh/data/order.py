"""Which rows a stream gives, in which order: it follows from the seed, the epoch and the sizes of the chunks alone.

A source has *chunks*, as it is stored: row groups, record batches. With a seed, chunks are put into an order; as many
of them as have some tens of thousands of rows are a *window*, whose rows are mixed. So a row is found by its number in
the epoch without reading what comes before, on a mesh of any size.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import attrs
import msgspec
import torch

_WORD: Final = 1 << 64


class Position(msgspec.Struct, frozen=True, order=True):
    """A place in a stream: the next row is this one of this epoch, both from 0."""

    epoch: int
    row: int


class RowPiece(msgspec.Struct, frozen=True):
    """Rows that follow each other in one window.

    Attributes:
        window: Its number in the epoch.
        offset: Of the first row, in the order of the window.
        rows: How many.
    """

    window: int
    offset: int
    rows: int


@attrs.frozen
class Window:
    """Chunks that are read together, in this order.

    Attributes:
        first: Number of its first row in the epoch.
        rows: Of all its chunks.
        chunks: Their numbers in the source.
    """

    first: int
    rows: int
    chunks: tuple[int, ...]


class Order:
    """The rows of a source whose chunks are known.

    Args:
        chunks: Rows of each chunk of the source.
        seed: Rows are mixed by it; None: they come as they are stored.
        mixed_rows: Rows of a window, at least; less than one chunk are one chunk.
    """

    def __init__(self, chunks: Sequence[int], seed: int | None, mixed_rows: int) -> None:
        self.chunks = tuple(chunks)
        self.rows = sum(self.chunks)
        self._seed = seed
        self._mixed_rows = mixed_rows
        self._epoch = -1
        self._windows: list[Window] = []
        self._firsts: list[int] = []

    def windows(self, epoch: int) -> Sequence[Window]:
        if epoch != self._epoch:
            self._windows = list(self._cut(epoch))
            self._firsts = [window.first for window in self._windows]
            self._epoch = epoch
        return self._windows

    def pieces(self, position: Position, rows: int) -> list[RowPiece]:
        """Return where the next rows are, fewer of them at the end of the epoch."""
        windows = self.windows(position.epoch)
        found: list[RowPiece] = []
        row = position.row
        end = min(row + rows, self.rows)
        at = bisect.bisect_right(self._firsts, row) - 1
        while row < end:
            window = windows[at]
            offset = row - window.first
            count = min(window.rows - offset, end - row)
            if count > 0:
                found.append(RowPiece(at, offset, count))
            row += count
            at += 1
        return found

    def _cut(self, epoch: int) -> Iterator[Window]:
        numbers = range(len(self.chunks))
        order: Iterable[int] = numbers
        if self._seed is not None:
            order = map(int, permutation(len(numbers), self._seed, epoch))
        first = 0
        kept: list[int] = []
        rows = 0
        for number in order:
            kept.append(number)
            rows += self.chunks[number]
            if rows and (self._seed is None or rows >= self._mixed_rows):
                yield Window(first, rows, tuple(kept))
                first, rows, kept = first + rows, 0, []
        if rows:
            yield Window(first, rows, tuple(kept))


def stream_pieces(position: Position, rows: int, mixed_rows: int) -> list[RowPiece]:
    """Return where the next rows are in a stream whose end is not known: its windows have equally many rows."""
    found: list[RowPiece] = []
    row, end = position.row, position.row + rows
    while row < end:
        window, offset = divmod(row, mixed_rows)
        count = min(mixed_rows - offset, end - row)
        found.append(RowPiece(window, offset, count))
        row += count
    return found


def permutation(count: int, *salt: int) -> torch.Tensor:
    """Return the numbers below `count` in an order that follows from some numbers.

    It is not torch's generator, nor Python's: a run that goes on after an upgrade finds the same rows.
    """
    start = 0
    for number in salt:
        start = _mixed_word(start ^ (number % _WORD))
    keys = _mixed(torch.arange(count, dtype=torch.int64) + _signed(start))
    return torch.argsort(keys, stable=True)


# The finalizer of splitmix64, whose constants these are; torch has no unsigned words that it can multiply.
_STEP: Final = 0x9E3779B97F4A7C15
_FIRST: Final = 0xBF58476D1CE4E5B9
_SECOND: Final = 0x94D049BB133111EB


def _mixed_word(word: int) -> int:
    word = (word + _STEP) % _WORD
    word = ((word ^ (word >> 30)) * _FIRST) % _WORD
    word = ((word ^ (word >> 27)) * _SECOND) % _WORD
    return word ^ (word >> 31)


def _mixed(words: torch.Tensor) -> torch.Tensor:
    words = words + _signed(_STEP)
    words = (words ^ _shifted(words, 30)) * _signed(_FIRST)
    words = (words ^ _shifted(words, 27)) * _signed(_SECOND)
    return words ^ _shifted(words, 31)


def _shifted(words: torch.Tensor, bits: int) -> torch.Tensor:
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - _WORD if word >= _WORD >> 1 else word
