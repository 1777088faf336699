"""Many transfers at once, and memory that is looked at where it lies (rule N4)."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing
from tests.conformance.meshes import Backend, SimBackend, attempt, only_sim
from tests.conformance.vault import LARGE, SMALL, Reader, Vault, pattern, read_until_dead
from tests.patience import HANG_SECONDS

import trimesh
from trimesh import Isolate, MeshErrorGroup, ProcDied, RDMABuffer, limits

# ---- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [SMALL, LARGE])
async def test_batch_runs_when_the_block_is_left(backend: Backend, size: int):
    """API 7: reads from and writes to several processes."""
    async with backend.procs({"gpus": 2}) as procs:
        vaults = await procs.spawn("vaults", Vault, size)
        a, b = (await vaults.handle.call()).values()
        x, y = bytearray(size), pattern(size, salt=5)
        async with trimesh.rdma.batch() as batch:
            batch.read(a, into=x)
            batch.write(b, source=y)
            await trio.lowlevel.checkpoint()
            assert x == bytes(size)
        assert x == pattern(size)
        assert await vaults.slice(gpus=1).look.call_one(0, size) == y


async def test_batch_of_many_parts(backend: Backend):
    """API 7: more than run at one time."""
    async with backend.procs({"gpus": 1}) as procs:
        vault = await procs.spawn("vault", Vault, 16 * 300)
        handle = await vault.handle.call_one()
        found = bytearray(16 * 300)
        view = memoryview(found)
        async with trimesh.rdma.batch() as batch:
            for at in range(0, len(found), 16):
                batch.read(handle[at : at + 16], into=view[at : at + 16])
        assert found == pattern(len(found))


async def test_batch_refuses_overlaps_when_queued(backend: Backend):
    """API 7: whatever is written by one may be touched by no other; the error names both."""
    async with backend.procs({"gpus": 1}) as procs:
        vault = await procs.spawn("vault", Vault)
        handle = await vault.handle.call_one()
        x = memoryview(bytearray(200))
        async with RDMABuffer(x) as own:
            async with trimesh.rdma.batch() as batch:
                batch.read(handle[0:100], into=x[0:100])
                batch.read(handle[50:100], into=bytearray(50))  # both only read
                batch.write(handle[200:300], source=x[100:200])
                batch.write(handle[300:400], source=x[100:200])  # the same source twice
                overlaps: list[Any] = [
                    lambda: batch.read(handle[400:500], into=x[99:199]),  # a destination over another one, and a source
                    lambda: batch.read(handle[400:401], into=x[99:100]),  # a destination over another one
                    lambda: batch.read(handle[400:410], into=x[150:160]),  # a destination over a source
                    lambda: batch.write(handle[299:300], source=b"x"),  # a write over another one
                    lambda: batch.write(handle[60:70], source=bytes(10)),  # a write over a read
                    lambda: batch.read(handle[250:260], into=bytearray(10)),  # a read over a write
                    lambda: batch.write(handle[500:510], source=x[90:100]),  # a source over a destination
                    lambda: batch.read(own[20:40], into=bytearray(20)),  # own memory, which is a destination
                    lambda: batch.read(own[100:110], into=x[105:115]),  # itself
                ]
                for queue in overlaps:
                    with pytest.raises(ValueError, match="overlap") as caught:
                        queue()
                    assert "transfer" in str(caught.value)
                with pytest.raises(ValueError, match=r"transfer 5, .* overlaps .*transfer 3"):
                    batch.write(handle[299:300], source=b"x")
            assert x[:100] == pattern(SMALL)[:100]


async def test_batch_tells_all_errors(backend: Backend):
    """API 7: in one group, in the order in which they were queued; the others are made."""
    async with backend.procs({"gpus": 3}, supervision=Isolate()) as procs:
        vaults = await procs.spawn("vaults", Vault, LARGE)
        dead, revoked, healthy = (await vaults.handle.call()).values()
        await vaults.slice(gpus=1).revoke.call_one()
        backend.kill(procs, 0)
        await read_until_dead(dead)
        found = bytearray(LARGE)
        with pytest.raises(MeshErrorGroup, match="2 of 3 transfers") as caught:
            async with trimesh.rdma.batch() as batch:
                batch.read(dead, into=bytearray(LARGE))
                batch.read(revoked, into=bytearray(LARGE))
                batch.read(healthy, into=found)
        assert [type(leaf) for leaf in trimesh.leaves(caught.value)] == [ProcDied, trio.ClosedResourceError]
        assert trimesh.coords(caught.value) == [{"gpus": 0}]
        assert found == pattern(LARGE)


async def test_failed_body_runs_no_batch(backend: Backend):
    """API 7."""
    async with backend.procs({"gpus": 1}) as procs:
        vault = await procs.spawn("vault", Vault)
        handle = await vault.handle.call_one()
        with pytest.raises(KeyError):
            async with trimesh.rdma.batch() as batch:
                batch.write(handle, source=bytes(SMALL))
                raise KeyError
        assert await vault.look.call_one(0, SMALL) == pattern(SMALL)
        with pytest.raises(RuntimeError, match="left"):
            batch.write(handle, source=bytes(SMALL))
        with pytest.raises(PermissionError):
            async with trimesh.rdma.batch() as batch:
                batch.write(handle.readonly(), source=bytes(SMALL))


@only_sim
async def test_transfers_of_a_batch_run_together(backend: SimBackend):
    """API 7: three large ones take as long as one, and a cancel ends them all."""
    backend.network.memory.chunk_seconds = 1.0
    async with backend.procs({"gpus": 3}) as procs:
        vaults = await procs.spawn("vaults", Vault, LARGE)
        handles = list((await vaults.handle.call()).values())
        before = trio.current_time()
        async with trimesh.rdma.batch() as batch:
            for handle in handles:
                batch.read(handle, into=bytearray(LARGE))
        assert trio.current_time() - before == pytest.approx(16)
        with trio.move_on_after(3) as scope:
            async with trimesh.rdma.batch() as batch:
                for handle in handles:
                    batch.read(handle, into=bytearray(LARGE))
        assert scope.cancelled_caught
        assert max((await vaults.revoke.call()).values()) <= 1.1


async def test_entering_and_leaving_a_batch_are_checkpoints(backend: Backend):
    """K01, K03: also one without transfers."""
    async with backend.procs({"gpus": 1}):
        block = trimesh.rdma.batch()
        with trio.testing.assert_checkpoints():
            await block.__aenter__()
        with trio.testing.assert_checkpoints():
            await block.__aexit__(None, None, None)
        with trio.CancelScope() as scope:
            scope.cancel()
            async with trimesh.rdma.batch():
                raise AssertionError
        assert scope.cancelled_caught


# ---- views -----------------------------------------------------------------------------------------------------------


async def test_allocated_memory_is_mapped(backend: Backend):
    """API 7: the view is of the memory itself; it is read-only unless asked otherwise, and ends with its block."""
    async with backend.procs({"gpus": 1}) as procs:
        vault = await procs.spawn("vault", Vault, allocated=True)
        handle = await vault.handle.call_one()
        assert handle.backend == "shm"
        async with handle.map() as view:
            assert view == pattern(SMALL)
            assert view.readonly
            await vault.put.call_one(0, b"changed")
            assert view[:7] == b"changed"
        with pytest.raises(ValueError, match="released"):
            view[0]
        async with handle[2:4].map(writable=True) as view:
            view[:] = b"AB"
        assert await vault.look.call_one(0, 6) == b"chABge"
        assert await vault.revoke.call_one(HANG_SECONDS) < HANG_SECONDS
        with pytest.raises(trio.ClosedResourceError):
            async with handle.map():
                raise AssertionError


async def test_allocated_memory_is_read_and_written(backend: Backend):
    """API 7: as any other."""
    async with backend.procs({"gpus": 1}) as procs:
        reader = await procs.spawn("reader", Reader)
        memory = trimesh.rdma.allocate(LARGE)
        memory[:] = pattern(LARGE)
        async with RDMABuffer(memory) as buffer:
            assert await reader.backend.call_one(buffer) == "shm"
            assert await reader.read.call_one(buffer) == pattern(LARGE)
            await reader.write.call_one(buffer[5:8], b"xyz")
            assert memory[5:8] == b"xyz"


async def test_other_memory_is_not_mapped(backend: Backend):
    """API 7: and nothing that this handle does not allow."""
    async with backend.procs({"gpus": 1}) as procs:
        vault = await procs.spawn("vault", Vault)
        with pytest.raises(ValueError, match="allocate"):
            async with (await vault.handle.call_one()).map():
                raise AssertionError
        mapped = await procs.spawn("mapped", Vault, allocated=True)
        with pytest.raises(PermissionError):
            (await mapped.readonly.call_one()).map(writable=True)


async def test_memory_that_is_looked_at_is_not_used_again(backend: Backend):
    """N4: a view that outlives the revocation sees what was there, and nothing that comes later."""
    async with backend.procs({"gpus": 2}) as procs, trio.open_nursery() as nursery:
        vault = await procs.slice(gpus=0).spawn("vault", Vault, allocated=True)
        reader = await procs.slice(gpus=1).spawn("reader", Reader)
        handle = await vault.handle.call_one()
        looking = attempt(nursery, reader.look_for_ever.call_one, handle)
        await reader.wait.call_one("sees 0")
        async with handle.map() as view:
            assert await vault.revoke.call_one() >= limits.REVOKE_SECONDS
            other = await procs.slice(gpus=0).spawn("other", Vault, SMALL, 99, allocated=True)
            new = await other.handle.call_one()
            found = bytearray(SMALL)
            await new.read_into(found)
            assert found == pattern(SMALL, salt=99)
            assert view == pattern(SMALL)
        looking.cancel()


async def test_view_of_a_killed_owner_stays(backend: Backend):
    """N4: memory goes with its last view, not under it; a new one is refused."""
    async with backend.procs({"gpus": 1}, supervision=Isolate()) as procs:
        vault = await procs.spawn("vault", Vault, allocated=True)
        handle = await vault.handle.call_one()
        async with handle.map() as view:
            backend.kill(procs, 0)
            await read_until_dead(handle)
            with pytest.raises(ProcDied):
                async with handle.map():
                    raise AssertionError
            assert view == pattern(SMALL)
