"""The actor that reads rows in a process of its own, for ranks to take them from its memory.

LD-1 Rows lie in memory of the loader until `release`, or until it ends: no rank reads what was lent to others since.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import attrs
import torch
import trio

from trimesh import limits
from trimesh.actor.actor import Actor
from trimesh.actor.endpoint import endpoint
from trimesh.data.columns import Column
from trimesh.data.order import RowPiece
from trimesh.data.reading import FoundRows, ReadingPlan, SourceReading, SourceSummary
from trimesh.data.sources import DataSource
from trimesh.errors import LimitExceeded
from trimesh.rdma.buffers.buffer import RDMABuffer
from trimesh.rdma.memory.allocation import allocate


@attrs.frozen(eq=False)
class LoadedRows:
    """A piece of a batch in memory of a loader.

    Attributes:
        number: By which it is released.
        rows: How many; 0 behind the end of the source, and then no buffers.
        buffers: By column.
    """

    number: int
    rows: int
    buffers: dict[str, RDMABuffer]


class Loader(Actor):
    """Reads the pieces that it is asked for."""

    def __init__(self, source: DataSource, plan: ReadingPlan) -> None:
        self.source = source
        self.plan = plan
        self.reading: SourceReading | None = None
        self.lock = trio.Lock()
        self.kept: dict[int, LoadedRows] = {}
        self.count = 0

    @endpoint(idempotent=True)
    async def summary(self) -> SourceSummary:
        return (await self._opened()).summary

    @endpoint(concurrency=limits.DATA_PREFETCH, group="reads", idempotent=True)
    async def load(self, epoch: int, piece: RowPiece) -> LoadedRows:
        """Read a piece into memory that ranks read."""
        if len(self.kept) >= limits.DATA_HELD_BATCHES_MAX:
            raise LimitExceeded(
                "DATA_HELD_BATCHES_MAX",
                len(self.kept) + 1,
                f"a loader keeps at most {limits.DATA_HELD_BATCHES_MAX} pieces that ranks have to read: ask for less "
                "by prefetch=",
            )
        reading = await self._opened()
        async with self.lock:  # windows are read one after the other
            found = await trio.to_thread.run_sync(reading.find, epoch, piece)
        self.count += 1
        loaded = LoadedRows(self.count, found.count, {})
        if found.count:
            columns = reading.summary.columns
            memory = {one.name: _memory(one, found.count) for one in columns}
            await trio.to_thread.run_sync(_fill, found, memory)
            loaded.buffers.update({name: RDMABuffer(rows, writable=False) for name, rows in memory.items()})
            self.kept[loaded.number] = loaded
        return loaded

    @endpoint(group="control")
    async def release(self, number: int) -> None:
        """Use the memory of a piece again (LD-1)."""
        loaded = self.kept.pop(number, None)
        if loaded is not None:
            for buffer in loaded.buffers.values():
                await buffer.aclose()

    async def _opened(self) -> SourceReading:
        async with self.lock:
            if self.reading is None:
                self.reading = await trio.to_thread.run_sync(partial(SourceReading, self.source, self.plan))
            return self.reading


def _memory(column: Column, rows: int) -> Any:
    return allocate((rows, *column.shape), column.torch_dtype)


def _fill(found: FoundRows, memory: dict[str, torch.Tensor]) -> None:
    for name, rows in memory.items():
        found.fill(name, rows)
