"""`multicast`: one source to many readers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, overload

import trio

from trimesh._runtime.tasks import in_trio
from trimesh.actor.endpoint import Endpoint
from trimesh.rdma.buffers.batch import batch
from trimesh.rdma.buffers.buffer import RDMABuffer
from trimesh.rdma.memory.allocation import allocate
from trimesh.shape.value_mesh import ValueMesh


@overload
async def multicast(buffer: RDMABuffer, *, into: Endpoint[[memoryview], Any]) -> ValueMesh[Any]: ...
@overload
async def multicast(buffer: RDMABuffer, *, into: Iterable[RDMABuffer]) -> None: ...
@trio.lowlevel.enable_ki_protection
async def multicast(
    buffer: RDMABuffer, *, into: Endpoint[[memoryview], Any] | Iterable[RDMABuffer]
) -> ValueMesh[Any] | None:
    """Bring what a buffer holds to many, reading it once.

    Args:
        buffer: The source, here or elsewhere.
        into: An endpoint of a mesh: it is called with a read-only view of the bytes, which on one host lie in shared
            memory that all members map, one copy in all up to `limits.SEGMENT_BYTES_MAX`; the results are returned. Or
            buffers of the size of the source: it is written to each of them.

    Raises:
        MeshErrorGroup: What some members, or some of the writes, have raised.
        ValueError: The buffers of `into` have another size, or overlap; nothing was moved.
        PermissionError: One of them is read-only; nothing was moved.
        ProcDied, MeshStopped, trio.ClosedResourceError, LinkLost, Unresponsive: The source could not be read.

    Blocking: until all have it; cancellable as `Endpoint.call` and `RDMABuffer.write_from` are.

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
            raise TypeError(f"multicast goes into an endpoint of a mesh or into RDMABuffers, got {target!r:.100}")
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
    """Return what a buffer holds: its memory itself for the object that has made the buffer, else a copy."""
    own = buffer.own_memory()
    if own is not None:
        return own
    copy: memoryview = allocate(buffer.nbytes)
    await buffer.read_into(copy)
    return copy
