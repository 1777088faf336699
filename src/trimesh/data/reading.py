"""Rows of an open source by piece, in the order of a stream. Runs in worker threads; knows no mesh."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import attrs
import msgspec
import torch

from trimesh.data.arrow import ArrowBatch, ArrowTable, arrow
from trimesh.data.columns import Column, Pad, columns_of, tensors_of
from trimesh.data.order import Order, Position, RowPiece, permutation, stream_pieces
from trimesh.data.sources import DataSource, OpenSource

WINDOWS_KEPT: Final = 2
"""A batch may begin in one window and end in the next."""


class ReadingPlan(msgspec.Struct, frozen=True):
    """How a stream reads its source; travels to loaders.

    Attributes:
        seed: See `Order`.
        mixed_rows: See `Order`.
        pads: By column: length and value.
    """

    seed: int | None
    mixed_rows: int
    pads: dict[str, tuple[int, float]]


class SourceSummary(msgspec.Struct, frozen=True):
    """What there is in a source.

    Attributes:
        columns: Of its rows.
        chunks: Rows of each chunk; None if that is known only at its end.
    """

    columns: tuple[Column, ...]
    chunks: tuple[int, ...] | None

    def fingerprint(self) -> str:
        """Return what differs where another source would give other rows under the same numbers."""
        said = msgspec.msgpack.encode((self.columns, self.chunks))
        return hashlib.blake2b(said, digest_size=16).hexdigest()


@attrs.frozen(eq=False)
class FoundRows:
    """Rows of one window, not copied yet.

    Attributes:
        count: How many.
    """

    count: int
    _window: Mapping[str, torch.Tensor]
    _places: slice | torch.Tensor

    def fill(self, name: str, destination: torch.Tensor) -> None:
        """Copy a column of the rows to where they are to be: the one copy on the way into shared memory."""
        source = self._window[name]
        if isinstance(self._places, slice):
            destination.copy_(source[self._places])
        else:
            torch.index_select(source, 0, self._places, out=destination)


@attrs.define(eq=False)
class _KeptWindow:
    """A window that has been read.

    Attributes:
        rows: Of it.
        columns: Its rows, as they are stored.
        order: In which they are given; None: as they are stored.
    """

    rows: int
    columns: dict[str, torch.Tensor]
    order: torch.Tensor | None


class SourceReading:
    """A source that is read piece by piece; the last windows are kept."""

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
        """Return the rows of a piece; fewer, down to none, where a source whose end was not known ends."""
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
    """A query that is under way: windows of equally many rows, the last one shorter.

    Attributes:
        epoch: For which it was made.
        window: Number of the next one.
    """

    def __init__(self, opened: OpenSource, epoch: int, rows: int) -> None:
        self.epoch = epoch
        self.window = 0
        self._schema = opened.schema
        self._rows = rows
        self._batches: Iterator[ArrowBatch] = opened.batches()
        self._rest: list[ArrowBatch] = []

    def next_window(self) -> ArrowTable:
        """Return the next window; without rows after the last one."""
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
    """Return where the next rows of a stream are."""
    return stream_pieces(position, rows, plan.mixed_rows) if order is None else order.pieces(position, rows)
