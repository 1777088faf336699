"""`DataStream`: batches of a source's rows on a mesh, prefetched while the one before is used; and `open_stream`.

LD-1 A loader keeps the memory of rows until `release`, or until it ends, so no rank reads memory that was reused.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import attrs
import msgspec
import torch
import trio
from msgspec import structs

from trimesh import limits
from trimesh._runtime.tasks import in_trio_block, in_trio_taking
from trimesh.actor.actor import Actor
from trimesh.actor.endpoint import endpoint
from trimesh.actor.proc_mesh import ProcMesh
from trimesh.context_managers import asynccontextmanager
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
from trimesh.data.sources import Column, DataError, DataSource, Pad
from trimesh.errors import LimitExceeded, MeshError, MeshErrorGroup, ProcDied, ShapeError, leaves, origin
from trimesh.plain_numbers import plain_whole
from trimesh.rdma.buffers.buffer import RDMABuffer
from trimesh.rdma.memory.local import allocate
from trimesh.tensor import MeshTensor
from trimesh.tensor.ops.rows import LyingRows, RowMemory, row_memory, rows_of_others, team_for_rows
from trimesh.tensor.protocol.placement import Cut

if TYPE_CHECKING:
    from typing import Self

    from trimesh.tensor.controller.team import Team


class RowBatch(Mapping[str, MeshTensor]):
    """Batch of rows: a mapping of column names to global tensors.

    Attributes:
        rows: Number of rows; the last batch of an epoch may have fewer than the others.
        epoch: Number of the epoch, from 0.
        first_row: Number of its first row in the epoch.
    """

    def __init__(self, tensors: Mapping[str, MeshTensor], rows: int, epoch: int, first_row: int) -> None:
        self._tensors = tensors
        self.rows = rows
        self.epoch = epoch
        self.first_row = first_row

    def __getitem__(self, name: str) -> MeshTensor:
        """Return a column; its first dimension counts rows."""
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        """Return the names of the columns."""
        return iter(self._tensors)

    def __len__(self) -> int:
        """Return the number of columns."""
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"<batch of {self.rows} rows from {self.first_row} on of epoch {self.epoch}: {', '.join(self._tensors)}>"


STATE_VERSION: Final = 1


class DataStreamStatistics(msgspec.Struct, frozen=True):
    """Statistics of the batches that a stream has returned.

    Attributes:
        batches: Batches returned.
        rows: Rows in them.
        bytes: Bytes of these rows, as copied into memory that the ranks read.
        dropped_batches: Batches prefetched but not returned, because the stream was moved or repositioned.
    """

    batches: int
    rows: int
    bytes: int
    dropped_batches: int


class _Sizes(msgspec.Struct, frozen=True):
    """Batching options of a stream."""

    batch: int
    epochs: int | None
    drop_last: bool
    prefetch: int


class _Production:
    """Prefetching of batches, from one position, for one mesh; a stream has one at a time."""

    def __init__(self, prefetch: int) -> None:
        self.scope = trio.CancelScope()
        self.made, self.ready = trio.open_memory_channel[RowBatch | Exception](prefetch - 1)


class DataStream(AsyncIterator[RowBatch]):
    """Stream of batches of rows on a mesh: `async for batch in stream:`, by one task at a time.

    Attributes:
        columns: Names of the columns, in the order of the source.
        rows: Number of rows of an epoch; None if known only at its end.
    """

    def __init__(
        self, feed: Feed, plan: ReadingPlan, sizes: _Sizes, mesh: ProcMesh, along: Any, nursery: trio.Nursery
    ) -> None:
        summary = feed.summary
        self.columns = [column.name for column in summary.columns]
        self.rows = None if summary.chunks is None else sum(summary.chunks)
        self._feed = feed
        self._plan = plan
        self._sizes = sizes
        self._team = team_for_rows(mesh)
        self._along = _checked_along(along, mesh)
        self._nursery = nursery
        self._position = Position(0, 0)
        self._production: _Production | None = None
        self._returned: list[RowBatch] = []
        self._given = DataStreamStatistics(0, 0, 0, 0)
        self._is_closed = False

    # ---- batches ---------------------------------------------------------------------------------------------

    def __anext__(self) -> Any:
        """Return the next batch.

        Raises:
            StopAsyncIteration: The last epoch has ended.
            DataError: A row cannot be converted to a tensor.
            OSError: The source cannot be read.
            MeshErrorGroup: A rank or a loader has ended; once it is restarted, the next call continues here.
            trio.BrokenResourceError: The block of the stream has been left.

        Blocking: until the batch is on the mesh; with `loaders`, until the ranks have read it; cancellable.
        """
        return in_trio_taking(self._advance, self._put_back)

    def __aiter__(self) -> Self:
        """Return itself."""
        return self

    async def _advance(self) -> RowBatch:
        if self._is_closed:
            raise trio.BrokenResourceError(
                "a stream returns batches only inside its `async with` block, which has been left"
            )
        if self._returned:
            await trio.lowlevel.checkpoint()
            return self._give(self._returned.pop())
        production = self._production
        if production is None:
            production = self._production = _Production(self._sizes.prefetch)
            self._nursery.start_soon(self._produce, production, self._position)
        try:
            made = await production.ready.receive()
        except trio.EndOfChannel:
            raise StopAsyncIteration from None
        if isinstance(made, Exception):
            self._production = None
            raise made
        return self._give(made)

    def _give(self, batch: RowBatch) -> RowBatch:
        self._position = Position(batch.epoch, batch.first_row + batch.rows)
        self._count(batch, 1)
        return batch

    def _put_back(self, batch: RowBatch) -> None:
        """Take a batch back: a caller outside of Trio was cancelled before it received the batch."""
        self._position = Position(batch.epoch, batch.first_row)
        self._count(batch, -1)
        self._returned.append(batch)

    def _count(self, batch: RowBatch, sign: int) -> None:
        given = self._given
        nbytes = sum(column.nbytes(batch.rows) for column in self._feed.summary.columns)
        self._given = structs.replace(
            given,
            batches=given.batches + sign,
            rows=given.rows + sign * batch.rows,
            bytes=given.bytes + sign * nbytes,
        )

    async def _produce(self, production: _Production, position: Position) -> None:
        with production.scope, production.made:
            while self._sizes.epochs is None or position.epoch < self._sizes.epochs:
                try:
                    made = await self._make(position)
                except Exception as error:  # noqa: BLE001 - raised to the caller that waits for a batch
                    await production.made.send(error)
                    return
                if made is None:
                    if position.row == 0 and self._sizes.epochs is None:
                        return  # a source without rows: endless epochs would all be empty
                    position = Position(position.epoch + 1, 0)
                    continue
                position = Position(position.epoch, position.row + made.rows)
                await production.made.send(made)

    async def _make(self, position: Position) -> RowBatch | None:
        wanted = self._sizes.batch
        tensors, rows = await self._feed.batch(self._team, self._along, position, wanted)
        if not rows or (rows < wanted and self._sizes.drop_last):
            return None
        return RowBatch(tensors, rows, position.epoch, position.row)

    # ---- position --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch returned, as plain values for a checkpoint."""
        return {
            "version": STATE_VERSION,
            "epoch": self._position.epoch,
            "row": self._position.row,
            "source": self._feed.summary.fingerprint(),
            "seed": self._plan.seed,
            "mixed_rows": self._plan.mixed_rows,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state. No row is repeated or lost, even if mesh size or batch size differ from before.

        Raises:
            DataError: The state is of another source, or of another order.
        """
        ours = self.state_dict()
        for name, what in (
            ("version", "of this version of trimesh"),
            ("source", "of a stream over the same rows"),
            ("seed", "of a stream with the same seed="),
            ("mixed_rows", "of a stream with the same mixed_rows="),
        ):
            if state.get(name) != ours[name]:
                raise DataError(f"the state must be {what}, got {name}={state.get(name)!r}, not {ours[name]!r}")
        epoch, row = state.get("epoch"), state.get("row")
        if not (isinstance(epoch, int) and isinstance(row, int) and epoch >= 0 and row >= 0):
            raise DataError(f"epoch and row of a state must be 0 or more, got epoch={epoch!r}, row={row!r}")
        self._stop_producing()
        self._position = Position(epoch, row)

    def move_to(self, mesh: ProcMesh, along: str | Sequence[str] | None = None) -> None:
        """Put the next batches onto another mesh, or other processes of the same one, for example after a resize.

        Prefetched batches are made again. Batches already returned stay where they are.

        Raises:
            ShapeError: `along` is not in the labels of the mesh, or the mesh has holes.
        """
        team, checked = team_for_rows(mesh), _checked_along(along, mesh)
        self._stop_producing()
        self._team, self._along = team, checked

    def statistics(self) -> DataStreamStatistics:
        """Return the statistics of the batches returned so far."""
        return self._given

    def close(self) -> None:
        """End the stream; its block does this."""
        self._is_closed = True
        self._stop_producing()

    def _stop_producing(self) -> None:
        production, self._production = self._production, None
        dropped = self._given.dropped_batches + len(self._returned)
        self._returned.clear()
        if production is not None:
            dropped += production.ready.statistics().current_buffer_used
            production.scope.cancel(reason="the stream was moved, set to another place, or closed")
        self._given = structs.replace(self._given, dropped_batches=dropped)

    def __repr__(self) -> str:
        return f"<stream of {', '.join(self.columns)} at row {self._position.row} of epoch {self._position.epoch}>"


def open_stream(
    source: DataSource,
    mesh: ProcMesh,
    *,
    batch: int,
    along: str | Sequence[str] | None = None,
    seed: int | None = None,
    mixed_rows: int = limits.DATA_MIXED_ROWS,
    pad: Mapping[str, Pad] | None = None,
    epochs: int | None = 1,
    drop_last: bool = False,
    prefetch: int = limits.DATA_PREFETCH,
    loaders: ProcMesh | None = None,
) -> AbstractAsyncContextManager[DataStream]:
    """Open a stream of batches: `async with data.open_stream(source, procs, batch=256, along="dp") as stream:`.

    Each column becomes a global tensor whose rows are split along dimensions of the mesh. Rows are copied once, from
    the source into shared memory, and once more by the rank that they belong to.

    Args:
        source: `data.parquet(...)`, `data.arrow_files(...)`, `data.table(...)`, `data.query(...)`.
        mesh: The processes that train.
        batch: Rows of a batch, over all ranks.
        along: The label of the mesh, or several, that rows are split along; None gives every rank all rows.
        seed: Seed of a shuffle that differs in each epoch; None keeps the stored order.
        mixed_rows: Minimum size, in rows, of the window in which rows are shuffled. Chunks of the source (row groups,
            record batches) are shuffled first; rows of a query only within their window.
        pad: Padding by column, for lists of differing lengths.
        epochs: Number of passes over all rows; None for endless.
        drop_last: Drop the last batch of an epoch if it is shorter.
        prefetch: Batches to make ahead, at least 1. Each takes memory here and on the ranks.
        loaders: Processes that read and decode instead of this one; rows never pass through this process. The ranks
            must reach their memory (one host, or `tcp`, see rdma.md). Under `Restart`, a loader that dies is started
            again, and its rows are read again. None reads in worker threads of this process.

    Raises:
        ValueError: A number is out of its bounds; a query has several loaders.
        DataError: A column cannot be converted to tensors.
        ShapeError: `along` is not in the labels of the mesh, or the mesh has holes.
        ModuleNotFoundError: pyarrow is not installed.
        OSError: The source cannot be read.

    Blocking: entering reads the footers of files, leaving stops the prefetching; both cancellable.
    """
    batch, mixed_rows, prefetch = plain_whole(batch), plain_whole(mixed_rows), plain_whole(prefetch)
    epochs, seed = plain_whole(epochs), plain_whole(seed)
    for name, number in (("batch", batch), ("mixed_rows", mixed_rows), ("prefetch", prefetch), ("epochs", epochs)):
        if number is not None and number < 1:
            raise ValueError(f"{name} must be at least 1, got {number!r}")
    pads = {name: (plain_whole(one.length), one.value) for name, one in (pad or {}).items()}
    plan = ReadingPlan(seed, mixed_rows, pads)
    return in_trio_block(_open(source, plan, _Sizes(batch, epochs, drop_last, prefetch), mesh, along, loaders))


@asynccontextmanager
async def _open(
    source: DataSource, plan: ReadingPlan, sizes: _Sizes, mesh: ProcMesh, along: Any, loaders: ProcMesh | None
) -> AsyncGenerator[DataStream]:
    async with open_feed(source, plan, loaders) as feed, trio.open_nursery() as nursery:
        stream = DataStream(feed, plan, sizes, mesh, along, nursery)
        try:
            yield stream
        finally:
            stream.close()


def _checked_along(along: Any, mesh: ProcMesh) -> Any:
    labels = () if along is None else (along,) if isinstance(along, str) else tuple(along)
    for label in labels:
        if label not in mesh.extent:
            raise ShapeError(f"along= must name dimensions of the mesh, {list(mesh.extent)}, got {label!r}")
    return labels or None


# ---- feeds: put batches that this process or loaders read onto a mesh ------------------------------------------------


class OwnFeed:
    """Reads in worker threads of this process."""

    def __init__(self, reading: SourceReading, plan: ReadingPlan) -> None:
        self.summary = reading.summary
        self._reading = reading
        self._plan = plan
        self._order = order_of(reading.summary, plan)

    async def batch(self, team: Team, along: Cut, position: Position, rows: int) -> tuple[dict[str, MeshTensor], int]:
        """Put the next rows onto a mesh; return tensors and number of rows, which is smaller at the end of an epoch."""
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
    """Distributes windows over loaders; ranks read the rows from the loaders' memory."""

    def __init__(self, loaders: Any, summary: SourceSummary, plan: ReadingPlan) -> None:
        self.summary = summary
        self._mesh = loaders.name
        self._loaders = [loaders.slice(**point) for point in loaders.points()]
        self._plan = plan
        self._order = order_of(summary, plan)
        self._numbers = itertools.count()

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
        requested: list[tuple[Any, int]] = []
        found: list[LoadedRows] = []
        try:
            for piece in pieces:
                loader = self._loaders[piece.window % len(self._loaders)]
                number = next(self._numbers)
                requested.append((loader, number))  # even a cancelled call may have loaded
                found.append(await loader.load.call_one(number, position.epoch, piece))
            return await self._put(team, along, found)
        finally:
            with trio.CancelScope(shield=True):
                for loader, number in requested:
                    await _release(loader, number)

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


async def _release(loader: Any, number: int) -> None:
    with trio.move_on_after(limits.REVOKE_SECONDS):
        try:
            await loader.release.broadcast(number)
        except (MeshError, MeshErrorGroup):
            pass  # the process has ended, so nothing is left to release


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
    """Open a source here or in loaders."""
    if loaders is None:
        yield OwnFeed(await trio.to_thread.run_sync(partial(SourceReading, source, plan)), plan)
        return
    async with loaders.spawn("loaders", Loader, source, plan) as actors:
        summary = await actors.slice(**_first(actors)).summary.call_one()
        if summary.chunks is None and len(list(actors.points())) > 1:
            raise ValueError(
                "a query must be read by one process, as its rows are computed in order, got "
                f"{len(list(actors.points()))} loaders: write loaders=procs.slice(...)"
            )
        yield LoaderFeed(actors, summary, plan)


def _first(actors: Any) -> Mapping[str, int]:
    return next(iter(actors.points()))


# ---- loader: an actor that reads rows into memory of its process, which ranks read -----------------------------------


@attrs.frozen(eq=False)
class LoadedRows:
    """A piece of a batch in memory of a loader.

    Attributes:
        rows: Number of rows; 0, without buffers, after the end of the source.
        buffers: Buffers by column.
    """

    rows: int
    buffers: dict[str, RDMABuffer]


class Loader(Actor):
    """Reads pieces of rows on request."""

    def __init__(self, source: DataSource, plan: ReadingPlan) -> None:
        self.source = source
        self.plan = plan
        self.reading: SourceReading | None = None
        self.lock = trio.Lock()
        self.kept: dict[int, LoadedRows] = {}

    @endpoint(idempotent=True)
    async def summary(self) -> SourceSummary:
        return (await self._opened()).summary

    @endpoint(concurrency=limits.DATA_PREFETCH, group="reads", idempotent=True)
    async def load(self, number: int, epoch: int, piece: RowPiece) -> LoadedRows:
        """Read a piece into memory that ranks can read, until `release(number)`."""
        if len(self.kept) >= limits.DATA_HELD_BATCHES_MAX:
            raise LimitExceeded(
                "DATA_HELD_BATCHES_MAX",
                len(self.kept) + 1,
                f"a loader holds at most {limits.DATA_HELD_BATCHES_MAX} pieces that ranks have not read yet: lower "
                "prefetch=",
            )
        reading = await self._opened()
        async with self.lock:  # `SourceReading` and its source take one call at a time
            found = await trio.to_thread.run_sync(reading.find, epoch, piece)
        loaded = LoadedRows(found.count, {})
        if found.count:
            columns = reading.summary.columns
            memory = {one.name: _memory(one, found.count) for one in columns}
            await trio.to_thread.run_sync(_fill, found, memory)
            loaded.buffers.update({name: RDMABuffer(rows, writable=False) for name, rows in memory.items()})
            self.kept[number] = loaded
        return loaded

    @endpoint(group="control")
    async def release(self, number: int) -> None:
        """Reuse the memory of a piece, if it was loaded (LD-1)."""
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
