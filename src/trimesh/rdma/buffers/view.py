"""Memory of others, looked at where it lies, for as long as a block."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

import trio

from trimesh._runtime.life import current_proc
from trimesh.rdma.memory.handle import Handle


@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def mapped(handle: Handle, *, writable: bool, is_shared: bool = False) -> AsyncGenerator[memoryview, None]:
    """Give the memory of a handle to a block; see `RDMABuffer.map`, and `Attachment.view` for `is_shared`."""
    if not handle.granted.block or handle.is_on_device:
        raise ValueError(
            "only memory from trimesh.rdma.allocate can be mapped, got a buffer over other memory: "
            "copy it by read_into, or let the owner make it of allocate"
        )
    bulk = current_proc().bulk
    view = await bulk.view(handle.granted, handle.offset, handle.nbytes, writable=writable, is_shared=is_shared)
    try:
        yield view
    finally:
        with suppress(BufferError):  # an array over it goes on looking: it keeps the memory
            view.release()
        del view
    await trio.lowlevel.checkpoint()
