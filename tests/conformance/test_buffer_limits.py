"""Bounds of bulk data, made small (N4)."""

from __future__ import annotations

import pytest
import trio
from tests.conformance.meshes import SimBackend, attempt, only_sim
from tests.conformance.vault import LARGE, SMALL, Reader, Vault, pattern

import trimesh
from trimesh import LimitExceeded, RDMABuffer, limits


@only_sim
async def test_transfers_wait_for_room(backend: SimBackend, monkeypatch: pytest.MonkeyPatch):
    """More than may be under way take turns; one that is cancelled while it waits has moved nothing."""
    monkeypatch.setattr(limits, "TRANSFERS_MAX", 2)
    backend.network.memory.chunk_seconds = 1.0
    async with backend.procs({"gpus": 1}) as procs, trio.open_nursery() as nursery:
        vault = await procs.spawn("vault", Vault, LARGE)
        handle = await vault.handle.call_one()
        found = [bytearray(LARGE) for _ in range(6)]
        before = trio.current_time()
        reads = [attempt(nursery, handle.read_into, one) for one in found[:2]]
        await trio.sleep(1)  # they are under way
        reads += [attempt(nursery, handle.read_into, one) for one in found[2:]]
        await trio.sleep(1)
        reads[-1].cancel()
        for read in reads[:-1]:
            await read.result()
        assert trio.current_time() - before == pytest.approx(3 * 16, abs=3)
        assert all(one == pattern(LARGE) for one in found[:-1])
        assert not any(found[-1])


@only_sim
async def test_attachments_come_and_go(backend: SimBackend, monkeypatch: pytest.MonkeyPatch):
    """More processes are reached than are attached to at one time, as long as not all of them are read at once."""
    monkeypatch.setattr(limits, "ATTACHMENTS_MAX", 1)
    backend.network.memory.chunk_seconds = 1.0
    async with backend.procs({"gpus": 2}) as procs, trio.open_nursery() as nursery:
        vaults = await procs.spawn("vaults", Vault, LARGE)
        a, b = (await vaults.handle.call()).values()
        for handle in (a, b, a, b):
            found = bytearray(SMALL)
            await handle[:SMALL].read_into(found)
            assert found == pattern(SMALL)
        reading = attempt(nursery, a.read_into, bytearray(LARGE))
        await trio.sleep(1)
        with pytest.raises(LimitExceeded) as caught:
            await b[:SMALL].read_into(bytearray(SMALL))
        assert caught.value.limit == "ATTACHMENTS_MAX"
        await reading.result()
        await b[:SMALL].read_into(bytearray(SMALL))


@only_sim
async def test_buffers_are_counted(backend: SimBackend, monkeypatch: pytest.MonkeyPatch):
    """A closed buffer makes room, and its place is not taken for it: an old handle opens nothing."""
    monkeypatch.setattr(limits, "GRANTS_MAX", 4)
    async with backend.procs({"gpus": 1}) as procs:
        reader = await procs.spawn("reader", Reader)
        buffers = [RDMABuffer(bytearray(8)) for _ in range(4)]
        with pytest.raises(LimitExceeded) as caught:
            RDMABuffer(bytearray(8))
        assert caught.value.limit == "GRANTS_MAX"
        old = buffers[2][:]
        await buffers[2].aclose()
        new = RDMABuffer(bytearray(b"12345678"))
        assert await reader.read.call_one(new) == b"12345678"
        with pytest.raises(trio.ClosedResourceError):
            await reader.read.call_one(old)
        for buffer in (*buffers, new):
            await buffer.aclose()


@only_sim
async def test_batches_are_bounded(backend: SimBackend, monkeypatch: pytest.MonkeyPatch):
    """What was queued before is made all the same."""
    monkeypatch.setattr(limits, "BATCH_TRANSFERS_MAX", 2)
    async with backend.procs({"gpus": 1}) as procs:
        vault = await procs.spawn("vault", Vault)
        handle = await vault.handle.call_one()
        found = [bytearray(8) for _ in range(3)]
        async with trimesh.rdma.batch() as batch:
            for one in found[:2]:
                batch.read(handle[:8], into=one)
            with pytest.raises(LimitExceeded) as caught:
                batch.read(handle[:8], into=found[2])
        assert caught.value.limit == "BATCH_TRANSFERS_MAX"
        assert found == [pattern(8), pattern(8), bytes(8)]
