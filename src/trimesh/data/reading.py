"""Reader of a source: returns pieces of rows in the order of a stream. Runs in worker threads; has no mesh."""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import attrs
import msgspec
import torch

from trimesh.data.sources import (
    ArrowBatch,
    ArrowTable,
    Column,
    DataSource,
    OpenSource,
    Pad,
    arrow,
    columns_of,
    tensors_of,
)

WINDOWS_KEPT: Final = 2
"""Number of cached windows: a batch may begin in one window and end in the next."""


class ReadingPlan(msgspec.Struct, frozen=True):
    """Reading options of a stream, sent to loaders.

    Attributes:
        seed: See `Order`.
        mixed_rows: See `Order`.
        pads: By column: length and value.
    """

    seed: int | None
    mixed_rows: int
    pads: dict[str, tuple[int, float]]


class SourceSummary(msgspec.Struct, frozen=True):
    """Columns and chunk sizes of a source.

    Attributes:
        columns: The columns.
        chunks: Number of rows of each chunk; None if known only at the end.
    """

    columns: tuple[Column, ...]
    chunks: tuple[int, ...] | None

    def fingerprint(self) -> str:
        """Return a digest of columns and chunk sizes, which decide the numbering of rows."""
        said = msgspec.msgpack.encode((self.columns, self.chunks))
        return hashlib.blake2b(said, digest_size=16).hexdigest()


@attrs.frozen(eq=False)
class FoundRows:
    """Rows of one window, before they are copied.

    Attributes:
        count: Number of rows.
    """

    count: int
    _window: Mapping[str, torch.Tensor]
    _places: slice | torch.Tensor

    def fill(self, name: str, destination: torch.Tensor) -> None:
        """Copy a column of the rows to its destination in shared memory: the only copy on this side."""
        source = self._window[name]
        if isinstance(self._places, slice):
            destination.copy_(source[self._places])
        else:
            torch.index_select(source, 0, self._places, out=destination)


@attrs.define(eq=False)
class _KeptWindow:
    """A cached window.

    Attributes:
        rows: The window.
        columns: Its rows by column, in stored order.
        order: Permutation of the rows; None keeps the stored order.
    """

    rows: int
    columns: dict[str, torch.Tensor]
    order: torch.Tensor | None


class SourceReading:
    """Reads a source piece by piece, and caches the last windows."""

    def __init__(self, source: DataSource, plan: ReadingPlan) -> None:
        self._plan = plan
        self._opened: OpenSource = source.open()
        pads = {name: Pad(*pad) for name, pad in plan.pads.items()}
        self._columns = columns_of(self._opened.schema, pads)
        chunks = self._opened.chunks
        self.summary = SourceSummary(tuple(self._columns), None if chunks is None else tuple(chunks))
        self._order = order_of(self.summary, plan)
        self._kept: dict[tuple[int, int], _KeptWindow] = {}
        self._flow: _Flow | None = None

    def find(self, epoch: int, piece: RowPiece) -> FoundRows:
        """Return the rows of a piece; fewer, or none, at the end of a source of unknown length."""
        window = self._window(epoch, piece.window)
        first, stop = min(piece.offset, window.rows), min(piece.offset + piece.rows, window.rows)
        places = slice(first, stop) if window.order is None else window.order[first:stop]
        return FoundRows(stop - first, window.columns, places)

    def _window(self, epoch: int, number: int) -> _KeptWindow:
        key = epoch, number
        found = self._kept.get(key)
        if found is None:
            rows = self._read(epoch, number)
            seed = self._plan.seed
            order = None if seed is None else permutation(rows.num_rows, seed, epoch, number)
            found = _KeptWindow(rows.num_rows, tensors_of(rows, self._columns), order)
            while len(self._kept) >= WINDOWS_KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = found
        return found

    def _read(self, epoch: int, number: int) -> ArrowTable:
        if self._order is not None:
            return self._opened.read(self._order.windows(epoch)[number].chunks)
        flow = self._flow
        if flow is None or flow.epoch != epoch or flow.window > number:
            flow = self._flow = _Flow(self._opened, epoch, self._plan.mixed_rows)
        while flow.window < number:
            flow.next_window()
        return flow.next_window()


class _Flow:
    """A running query, cut into windows of equal size; the last one is shorter.

    Attributes:
        epoch: Its epoch.
        window: Number of the next window.
    """

    def __init__(self, opened: OpenSource, epoch: int, rows: int) -> None:
        self.epoch = epoch
        self.window = 0
        self._schema = opened.schema
        self._rows = rows
        self._batches: Iterator[ArrowBatch] = opened.batches()
        self._rest: list[ArrowBatch] = []

    def next_window(self) -> ArrowTable:
        """Return the next window; empty after the last one."""
        kept, count = self._rest, sum(batch.num_rows for batch in self._rest)
        while count < self._rows:
            batch = next(self._batches, None)
            if batch is None:
                break
            kept.append(batch)
            count += batch.num_rows
        whole = arrow().Table.from_batches(kept, self._schema)
        self._rest = whole.slice(self._rows).to_batches()
        self.window += 1
        return whole.slice(0, self._rows)


def order_of(summary: SourceSummary, plan: ReadingPlan) -> Order | None:
    """Return the order of a source, or None if its chunks are not known."""
    return None if summary.chunks is None else Order(summary.chunks, plan.seed, plan.mixed_rows)


def pieces_of(order: Order | None, plan: ReadingPlan, position: Position, rows: int) -> Sequence[RowPiece]:
    """Return the pieces that contain the next rows of a stream."""
    return stream_pieces(position, rows, plan.mixed_rows) if order is None else order.pieces(position, rows)


# ---- order -----------------------------------------------------------------------------------------------------------

# The order of rows is a function of the seed, the epoch and the sizes of the chunks.
#
# A source is stored in *chunks*: row groups, record batches. With a seed, chunks are shuffled first. Then consecutive
# ones, some tens of thousands of rows, form a *window*, whose rows are shuffled. So a row can be found by its number in
# the epoch without reading the rows before it, on a mesh of any size.

_WORD: Final = 1 << 64


class Position(msgspec.Struct, frozen=True, order=True):
    """Position in a stream: number of the next row and its epoch, both from 0."""

    epoch: int
    row: int


class RowPiece(msgspec.Struct, frozen=True):
    """Consecutive rows of one window.

    Attributes:
        window: Number of the window in the epoch.
        offset: Position of the first row, in the order of the window.
        rows: Number of rows.
    """

    window: int
    offset: int
    rows: int


@attrs.frozen
class Window:
    """Chunks that are read together, in order.

    Attributes:
        first: Number of its first row in the epoch.
        rows: Number of rows of all its chunks.
        chunks: Numbers of the chunks in the source.
    """

    first: int
    rows: int
    chunks: tuple[int, ...]


class Order:
    """Order of the rows of a source whose chunks are known.

    Args:
        chunks: Number of rows of each chunk.
        seed: Seed of the shuffle; None keeps the stored order, and each chunk is a window.
        mixed_rows: With a seed, a window takes chunks until it has at least this many rows.
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
        """Return the pieces that contain the next rows; fewer rows at the end of the epoch."""
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
    """Return the pieces that contain the next rows of a stream of unknown length; its windows have equal sizes."""
    found: list[RowPiece] = []
    row, end = position.row, position.row + rows
    while row < end:
        window, offset = divmod(row, mixed_rows)
        count = min(mixed_rows - offset, end - row)
        found.append(RowPiece(window, offset, count))
        row += count
    return found


def permutation(count: int, *salt: int) -> torch.Tensor:
    """Return a permutation of the numbers below `count`, determined by `salt`.

    It uses neither torch's nor Python's generator, so that a run resumed after an upgrade finds the same rows.
    """
    start = 0
    for number in salt:
        start = _mixed_word(start ^ (number % _WORD))
    keys = _mixed(torch.arange(count, dtype=torch.int64) + _signed(start))
    return torch.argsort(keys, stable=True)


# The finalizer of splitmix64, with its constants, in signed words: torch cannot multiply unsigned ones.
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
