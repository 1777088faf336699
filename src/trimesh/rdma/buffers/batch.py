"""`batch` checks transfers for overlaps as they are queued, then runs them concurrently; `multicast`: one to many."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager
from typing import Any, overload

import attrs
import trio

from trimesh import limits
from trimesh._runtime.life import current_proc
from trimesh._runtime.tasks import TrioBlock, in_trio
from trimesh._transport.interface import TransferKind
from trimesh.actor.endpoint import Endpoint
from trimesh.errors import LimitExceeded, MeshErrorGroup
from trimesh.rdma.buffers.buffer import RDMABuffer
from trimesh.rdma.memory.local import Memory, allocate
from trimesh.shape.value_mesh import ValueMesh


@attrs.frozen(order=True)
class _Range:
    """Address range that a transfer reads or writes."""

    start: int
    stop: int
    text: str = attrs.field(order=False)

    def overlaps(self, other: _Range) -> bool:
        return self.start < other.stop and other.start < self.stop


@attrs.define(eq=False)
class _Space:
    """Queued ranges in the memory of one process; a written range overlaps no other range."""

    written: list[_Range] = attrs.field(factory=list[_Range])
    read: list[_Range] = attrs.field(factory=list[_Range])

    def conflict(self, new: _Range, *, is_write: bool) -> _Range | None:
        """Return a queued range that conflicts with `new`, or None."""
        at = bisect.bisect_left(self.written, new)
        for found in self.written[max(0, at - 1) : at + 1]:
            if found.overlaps(new):
                return found
        return next((found for found in self.read if found.overlaps(new)), None) if is_write else None

    def add(self, new: _Range, *, is_write: bool) -> None:
        if is_write:
            bisect.insort(self.written, new)
        else:
            self.read.append(new)


@attrs.frozen(eq=False)
class _Queued:
    """One queued transfer."""

    buffer: RDMABuffer
    kind: TransferKind
    memory: Memory


class Batch:
    """Transfers that run concurrently when the block is left; see `batch`."""

    def __init__(self) -> None:
        self._me = current_proc().proc_id
        self._queued: list[_Queued] = []
        self._spaces: dict[tuple[int, str], _Space] = {}
        self._is_over = False

    def read(self, buffer: RDMABuffer, *, into: Any) -> None:
        """Queue `buffer.read_into(into)`.

        Raises:
            ValueError: It overlaps memory that another transfer of the batch writes, or writes memory that one reads.
            TypeError, ValueError: As `read_into`.
            LimitExceeded: `limits.BATCH_TRANSFERS_MAX` are queued.
            RuntimeError: The block has been left.
        """
        self._check(buffer)
        self._queue(buffer, TransferKind.READ, buffer.check_read(into))

    def write(self, buffer: RDMABuffer, *, source: Any) -> None:
        """Queue `buffer.write_from(source)`; raises as `read`, and `PermissionError` for a handle that is read-only."""
        self._check(buffer)
        self._queue(buffer, TransferKind.WRITE, buffer.check_write(source))

    def _check(self, buffer: object) -> None:
        if self._is_over:
            raise RuntimeError("a batch accepts transfers only inside its `async with` block, which has been left")
        if not isinstance(buffer, RDMABuffer):
            raise TypeError(f"a batch transfers RDMABuffers, got {buffer!r:.100}")
        if len(self._queued) >= limits.BATCH_TRANSFERS_MAX:
            raise LimitExceeded("BATCH_TRANSFERS_MAX", len(self._queued) + 1)

    def _queue(self, buffer: RDMABuffer, kind: TransferKind, memory: Memory) -> None:
        number = len(self._queued) + 1
        handle = buffer.handle
        is_read = kind is TransferKind.READ
        verb, what = ("read", "its destination") if is_read else ("write", "its source")
        name = f"transfer {number}, a {verb} of {buffer!r}"
        there = _Range(handle.address, handle.address + handle.nbytes, name)
        here = _Range(memory.span.address, memory.span.address + memory.nbytes, f"{what}, of {name}")
        touched = (
            (self._space(handle.granted.home.epoch, handle.space), there, not is_read),
            (self._space(self._me, memory.space), here, is_read),
        )
        if touched[0][0] is touched[1][0] and there.overlaps(here):
            raise ValueError(
                f"source and destination of a transfer must not overlap, got {name} with {what} in the buffer"
            )
        for space, new, is_write in touched:
            other = space.conflict(new, is_write=is_write)
            if other is not None:
                raise ValueError(
                    "a transfer of a batch must not write memory that another one reads or writes, as their order is "
                    f"undefined: {new.text} overlaps {other.text}; put them into two batches"
                )
        for space, new, is_write in touched:
            space.add(new, is_write=is_write)
        self._queued.append(_Queued(buffer, kind, memory))

    def _space(self, epoch: int, name: str) -> _Space:
        return self._spaces.setdefault((epoch, name), _Space())

    def close(self) -> None:
        """Refuse further transfers."""
        self._is_over = True

    async def run(self) -> None:
        """Run the transfers concurrently.

        Raises:
            MeshErrorGroup: Some have failed; the others are complete.
        """
        waiting = deque(self._queued)
        errors: list[tuple[int, Exception]] = []
        numbers = {queued: number for number, queued in enumerate(self._queued)}

        async def work() -> None:
            while waiting:
                queued = waiting.popleft()
                try:
                    await queued.buffer.move(queued.kind, queued.memory)
                except Exception as error:  # noqa: BLE001 - raised below, with the others
                    errors.append((numbers[queued], error))

        async with trio.open_nursery() as nursery:
            for _ in range(min(len(waiting), limits.BATCH_TASKS)):
                nursery.start_soon(work)
        await trio.lowlevel.checkpoint()
        if errors:
            errors.sort(key=lambda found: found[0])
            raise MeshErrorGroup(
                f"{len(errors)} of {len(self._queued)} transfers of a batch failed", [error for _, error in errors]
            )


@attrs.define(eq=False)
class _BatchBlock(TrioBlock[Batch]):
    """Block of a batch; runs it when left without an error."""

    _batch: Batch | None = None

    async def _enter(self) -> Batch:
        await trio.lowlevel.checkpoint()
        self._batch = Batch()
        return self._batch

    async def _leave(self, error: BaseException | None) -> bool | None:
        assert self._batch is not None
        self._batch.close()
        if error is None:
            await self._batch.run()
        else:
            await trio.lowlevel.checkpoint()
        return None


def batch() -> AbstractAsyncContextManager[Batch]:
    """Return a block that queues transfers and runs them concurrently when it is left.

    If the block is left by an error, none runs. If some transfers fail, the others still complete, and the block
    raises all errors in one `MeshErrorGroup`, in the order of queueing. A cancel ends all transfers.

    Example:
        async with trimesh.rdma.batch() as batch:
            batch.read(weights, into=local)
            batch.write(gradients, source=mine)
    """
    return _BatchBlock()


# ---- `multicast`: one source to many readers -------------------------------------------------------------------------


@overload
async def multicast(buffer: RDMABuffer, *, into: Endpoint[[memoryview], Any]) -> ValueMesh[Any]: ...
@overload
async def multicast(buffer: RDMABuffer, *, into: Iterable[RDMABuffer]) -> None: ...
@trio.lowlevel.enable_ki_protection
async def multicast(
    buffer: RDMABuffer, *, into: Endpoint[[memoryview], Any] | Iterable[RDMABuffer]
) -> ValueMesh[Any] | None:
    """Multicast the contents of a buffer, reading it once.

    Args:
        buffer: The source, here or elsewhere.
        into: An endpoint of a mesh, called with a read-only view of the bytes; its results are returned. On one host
            the bytes are in shared memory that all members map: one copy in all up to `limits.SEGMENT_BYTES_MAX`. Or
            buffers of the size of the source, each of which is overwritten.

    Raises:
        MeshErrorGroup: Some members, or some of the writes, have failed.
        ValueError: The buffers of `into` have another size, or overlap; nothing was moved.
        PermissionError: One of them is read-only; nothing was moved.
        ProcDied, MeshStopped, trio.ClosedResourceError, LinkLost, Unresponsive: The source could not be read.

    Blocking: until all receivers have the bytes; cancellable as `Endpoint.call` and `RDMABuffer.write_from`.

    Example:
        await trimesh.rdma.multicast(self.buffer, into=generators.load)
    """
    return await in_trio(_multicast)(buffer, into)


async def _multicast(
    buffer: RDMABuffer, into: Endpoint[[memoryview], Any] | Iterable[RDMABuffer]
) -> ValueMesh[Any] | None:
    if isinstance(into, Endpoint):
        return await into.call((await _bytes_of(buffer)).toreadonly())
    targets = list(into)
    for target in targets:
        if not isinstance(target, RDMABuffer):
            raise TypeError(f"into= of a multicast must be an endpoint of a mesh or RDMABuffers, got {target!r:.100}")
        if target.nbytes != buffer.nbytes:
            raise ValueError(
                f"all buffers of a multicast must have the size of its source, {buffer.nbytes} bytes, got {target!r}"
            )
    async with batch() as writes:
        source = await _bytes_of(buffer) if targets else None
        for target in targets:
            writes.write(target, source=source)
    return None


async def _bytes_of(buffer: RDMABuffer) -> memoryview:
    """Return the contents of a buffer: a zero-copy view in the object that made the buffer, else a copy."""
    own = buffer.own_memory()
    if own is not None:
        return own
    copy: memoryview = allocate(buffer.nbytes)
    await buffer.read_into(copy)
    return copy
