"""Who reads the rows of a stream: this process, or loaders. Both put a batch onto a mesh.

LD-1 Rows lie in memory of the loader until `release`, or until it ends: no rank reads what was lent to others since.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import torch
import trio

from trimesh import limits
from trimesh.actor.actor import Actor
from trimesh.actor.endpoint import endpoint
from trimesh.context_managers import asynccontextmanager
from trimesh.data.columns import Column
from trimesh.data.reading import (
    FoundRows,
    Position,
    ReadingPlan,
    RowPiece,
    SourceReading,
    SourceSummary,
    order_of,
    pieces_of,
)
from trimesh.data.sources import DataSource
from trimesh.errors import LimitExceeded, MeshError, MeshErrorGroup, ProcDied, leaves, origin
from trimesh.rdma.buffers.buffer import RDMABuffer
from trimesh.rdma.memory.local import allocate
from trimesh.tensor.ops.rows import LyingRows, RowMemory, row_memory, rows_of_others
from trimesh.tensor.protocol.placement import Cut

if TYPE_CHECKING:
    from trimesh.actor.proc_mesh import ProcMesh
    from trimesh.tensor.controller.team import Team
    from trimesh.tensor.controller.tensor import MeshTensor


class OwnFeed:
    """Reads in worker threads of this process."""

    def __init__(self, reading: SourceReading, plan: ReadingPlan) -> None:
        self.summary = reading.summary
        self._reading = reading
        self._plan = plan
        self._order = order_of(reading.summary, plan)

    async def batch(self, team: Team, along: Cut, position: Position, rows: int) -> tuple[dict[str, MeshTensor], int]:
        """Put the next rows onto a mesh; return them with their number, which is less at the end of an epoch."""
        pieces = pieces_of(self._order, self._plan, position, rows)
        found = [await trio.to_thread.run_sync(self._reading.find, position.epoch, piece) for piece in pieces]
        count = sum(one.count for one in found)
        if not count:
            return {}, 0
        columns = self.summary.columns
        async with row_memory(team, [column.nbytes(count) for column in columns]) as memories:
            await trio.to_thread.run_sync(_gather, found, columns, memories)
            tensors = {
                column.name: memory.put((count, *column.shape), column.torch_dtype, [along])
                for column, memory in zip(columns, memories, strict=True)
            }
        return tensors, count


def _gather(found: Sequence[FoundRows], columns: Sequence[Column], memories: Sequence[RowMemory]) -> None:
    for column, memory in zip(columns, memories, strict=True):
        flat = torch.frombuffer(memory.memory, dtype=column.torch_dtype)
        rows = flat.view(sum(one.count for one in found), *column.shape)
        first = 0
        for one in found:
            one.fill(column.name, rows[first : first + one.count])
            first += one.count


class LoaderFeed:
    """Lets actors read, each the windows that are its own; ranks take the rows from their memory."""

    def __init__(self, loaders: Any, summary: SourceSummary, plan: ReadingPlan) -> None:
        self.summary = summary
        self._mesh = loaders.name
        self._loaders = [loaders.slice(**point) for point in loaders.points()]
        self._plan = plan
        self._order = order_of(summary, plan)

    async def batch(self, team: Team, along: Cut, position: Position, rows: int) -> tuple[dict[str, MeshTensor], int]:
        """See `OwnFeed.batch`. A batch whose loader has died is read again, if the loader is restarted."""
        for _ in range(limits.DATA_TRIES - 1):
            try:
                return await self._try_batch(team, along, position, rows)
            except (ProcDied, MeshErrorGroup) as error:
                if not all(self._is_death_of_loader(leaf) for leaf in leaves(error)):
                    raise
            await trio.sleep(limits.DATA_RETRY_SECONDS)
        return await self._try_batch(team, along, position, rows)

    async def _try_batch(
        self, team: Team, along: Cut, position: Position, rows: int
    ) -> tuple[dict[str, MeshTensor], int]:
        pieces = pieces_of(self._order, self._plan, position, rows)
        found: list[tuple[Any, LoadedRows]] = []
        try:
            for piece in pieces:
                loader = self._loaders[piece.window % len(self._loaders)]
                found.append((loader, await loader.load.call_one(position.epoch, piece)))
            return await self._put(team, along, [loaded for _, loaded in found])
        finally:
            with trio.CancelScope(shield=True):
                for loader, loaded in found:
                    await _release(loader, loaded)

    async def _put(self, team: Team, along: Cut, found: Sequence[LoadedRows]) -> tuple[dict[str, MeshTensor], int]:
        count = sum(loaded.rows for loaded in found)
        if not count:
            return {}, 0
        columns = self.summary.columns
        told = [((count, *column.shape), column.torch_dtype, _lying(found, column.name)) for column in columns]
        tensors = await rows_of_others(team, told, [along])
        return {column.name: tensor for column, tensor in zip(columns, tensors, strict=True)}, count

    def _is_death_of_loader(self, error: BaseException) -> bool:
        found = origin(error)
        return isinstance(error, ProcDied) and found is not None and found.mesh == self._mesh


async def _release(loader: Any, loaded: LoadedRows) -> None:
    if loaded.rows:
        with trio.move_on_after(limits.REVOKE_SECONDS):
            try:
                await loader.release.broadcast(loaded.number)
            except (MeshError, MeshErrorGroup):
                pass  # with a process that has ended nothing is left to be released


def _lying(found: Sequence[LoadedRows], name: str) -> list[LyingRows]:
    lying: list[LyingRows] = []
    first = 0
    for loaded in found:
        if loaded.rows:
            lying.append((first, loaded.rows, loaded.buffers[name]))
            first += loaded.rows
    return lying


Feed = OwnFeed | LoaderFeed


@asynccontextmanager
async def open_feed(source: DataSource, plan: ReadingPlan, loaders: ProcMesh | None) -> AsyncGenerator[Feed]:
    """Open a source here, or let loaders open it."""
    if loaders is None:
        yield OwnFeed(await trio.to_thread.run_sync(partial(SourceReading, source, plan)), plan)
        return
    async with loaders.spawn("loaders", Loader, source, plan) as actors:
        summary = await actors.slice(**_first(actors)).summary.call_one()
        if summary.chunks is None and len(list(actors.points())) > 1:
            raise ValueError(
                "rows of a query come one after the other, so that one process reads them, got "
                f"{len(list(actors.points()))} loaders: say loaders=procs.slice(...)"
            )
        yield LoaderFeed(actors, summary, plan)


def _first(actors: Any) -> Mapping[str, int]:
    return next(iter(actors.points()))


# ---- the actor that reads rows in a process of its own, for ranks to take them from its memory -----------------------


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
