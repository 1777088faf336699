"""Buffers from asyncio: the same objects (K04, API 7)."""

from __future__ import annotations

import asyncio

import pytest
import trio
from tests.aio.loops import Attempt
from tests.conformance.vault import LARGE, SMALL, Reader, Vault, pattern

import trimesh
from trimesh import RDMABuffer

pytestmark = pytest.mark.real


@pytest.mark.daily
def test_buffers_work(run):
    """K04: transfers, batches, views, own buffers and what is known of them."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            vault = await procs.spawn("vault", Vault, LARGE, allocated=True)
            reader = await procs.spawn("reader", Reader)
            handle = await vault.handle.call_one()
            found = bytearray(LARGE)
            await handle.read_into(found)
            assert found == pattern(LARGE)
            assert handle.backend == "shm"
            await handle[:8].write_from(bytes(8))
            assert await handle.fetch_add(5) == 0
            assert await handle.compare_and_swap(5, 6) == 5
            async with handle.map() as view:
                assert view[:2] == b"\x06\x00"
            small = memoryview(bytearray(16))
            async with trimesh.rdma.batch() as batch:
                batch.read(handle[8:16], into=small[:8])
                batch.read(handle[16:24], into=small[8:])
            assert small == pattern(24)[8:]
            memory = trimesh.rdma.allocate(SMALL)
            memory[:] = pattern(SMALL)
            async with RDMABuffer(memory) as buffer:
                assert await reader.read.call_one(buffer.readonly()) == pattern(SMALL)
            with pytest.raises(trio.ClosedResourceError):
                await reader.read.call_one(buffer)

    run(main)


def test_cancel_ends_a_transfer(run):
    """K04, N4: of asyncio."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            vault = await procs.spawn("vault", Vault, LARGE)
            handle = await vault.handle.call_one()

            async def read() -> None:
                while True:
                    await handle.read_into(bytearray(LARGE))

            reading = Attempt(read())
            await asyncio.sleep(0)
            reading.task.cancel()
            assert isinstance(await reading.over(), asyncio.CancelledError)
            await vault.revoke.call_one()

    run(main)
