"""Buffers of plain threads, without `await` (K06)."""

from __future__ import annotations

import os
from typing import Any

import pytest
import trio

import trimesh
import trimesh.blocking as tb
from trimesh import Actor, endpoint

pytestmark = [pytest.mark.real, pytest.mark.daily]


class Sender(Actor):
    """Has a buffer; reads and writes those of others."""

    def __init__(self) -> None:
        self.memory = bytearray(8)
        self.kept: Any = None

    @endpoint
    async def buffer(self) -> trimesh.RDMABuffer:
        self.kept = trimesh.RDMABuffer(self.memory)
        return self.kept

    @endpoint
    async def write(self, buffer: Any, data: bytes) -> str:
        await buffer.write_from(data)
        return type(buffer).__module__

    @endpoint(thread=True)
    def read_in_thread(self, buffer: Any) -> bytes:
        found = bytearray(buffer.nbytes)
        tb.face(buffer).read_into(found)
        return bytes(found)


def test_buffers_are_read_and_written() -> None:
    """K06: the memory of this process by actors, and that of actors by this process."""
    memory = bytearray(8)
    with tb.spawn_procs({"gpus": 1}) as procs:
        sender = procs.spawn("sender", Sender)
        with tb.RDMABuffer(memory) as mine:
            assert (mine.nbytes, mine.is_writable, mine.owner.pid) == (8, True, os.getpid())
            assert sender.write.call_one(mine, b"abcdefgh") == "trimesh.rdma.buffers.buffer"
            assert memory == b"abcdefgh"
            assert sender.read_in_thread.call_one(mine[2:4]) == b"cd"
            assert not mine.readonly().is_writable
            with pytest.raises(PermissionError):
                mine.readonly().write_from(bytes(8))

            theirs = tb.face(sender.buffer.call_one())
            assert theirs.backend in ("local", "shm", "cma", "tcp")
            theirs.write_from(bytes(8))
            assert theirs.fetch_add(5) == 0
            assert theirs.compare_and_swap(5, 7) == 5
            found = bytearray(8)
            theirs.read_into(found)
            assert int.from_bytes(found, "little") == 7
        with pytest.raises(trio.ClosedResourceError):
            mine.read_into(bytearray(8))


def test_allocated_memory_is_mapped() -> None:
    """K06: where it lies."""
    with tb.spawn_procs({"gpus": 1}):
        memory = tb.run(allocated)
        with tb.RDMABuffer(memory) as mine, mine.map(writable=True) as view:
            view[:3] = b"xyz"
        assert bytes(memory[:3]) == b"xyz"
        del memory, view


async def allocated() -> Any:
    """Return memory that others can map."""
    await trio.lowlevel.checkpoint()
    return trimesh.rdma.allocate(16)
