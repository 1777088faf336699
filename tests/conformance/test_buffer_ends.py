"""Buffers that are revoked, and processes that die while their memory is read (rule N4)."""

from __future__ import annotations

import pytest
import trio
from tests.conformance.meshes import Backend, SimBackend, attempt, only_sim
from tests.conformance.vault import LARGE, SMALL, Reader, Vault, pattern, read_until_dead
from tests.patience import HANG_SECONDS

import trimesh
from trimesh import Isolate, MeshErrorGroup, MeshStopped, ProcDied, RDMABuffer, Restart, Restarted

SIZES = pytest.mark.parametrize("size", [SMALL, LARGE])


# ---- revoked ---------------------------------------------------------------------------------------------------------


@SIZES
@pytest.mark.seeds(5)
async def test_revoked_buffer_gives_no_bytes(backend: Backend, size: int):
    """N4: who reads meanwhile, and who does later, gets ClosedResourceError; the owner does not wait for them."""
    async with backend.procs({"gpus": 3}) as procs, trio.open_nursery() as nursery:
        vault = await procs.slice(gpus=slice(0, 1)).spawn("vault", Vault, size)
        readers = await procs.slice(gpus=slice(1, 3)).spawn("readers", Reader)
        handle = await vault.handle.call_one()
        reading = attempt(nursery, readers.read_for_ever.call, handle)
        await readers.wait.call("has read")
        assert await vault.revoke.call_one(HANG_SECONDS) < HANG_SECONDS
        with pytest.raises(MeshErrorGroup) as caught:
            await reading.result()
        assert {type(leaf) for leaf in trimesh.leaves(caught.value)} == {trio.ClosedResourceError}
        for part in (handle, handle[:8], handle.readonly()):
            with pytest.raises(trio.ClosedResourceError, match="revoked"):
                await part.read_into(bytearray(part.nbytes))
        with pytest.raises(trio.ClosedResourceError, match="revoked"):
            await handle.write_from(bytes(size))
        assert await vault.look.call_one(0, size) == pattern(size)
        assert await vault.revoke.call_one(HANG_SECONDS) < HANG_SECONDS  # once more: nothing is left to do


async def test_all_handles_are_revoked_while_one_is_in_use(backend: Backend):
    """N4: who looks at the memory by one handle keeps no other one open."""
    async with backend.procs({"gpus": 1}) as procs, trio.open_nursery() as nursery:
        vault = await procs.spawn("vault", Vault, allocated=True)
        handle = await vault.handle.call_one()
        readonly = await vault.readonly.call_one()
        async with handle.map():
            revoking = attempt(nursery, vault.revoke.call_one, HANG_SECONDS)
            with pytest.raises(trio.ClosedResourceError):
                while True:
                    await handle.read_into(bytearray(SMALL))
            assert not revoking.over.is_set()
            with pytest.raises(trio.ClosedResourceError):
                await readonly.read_into(bytearray(SMALL))
        assert await revoking.result() < HANG_SECONDS


@only_sim
async def test_buffer_is_revoked_in_the_middle_of_a_read(backend: SimBackend):
    """N4: the copy stops at the next look, and the revocation has waited for that."""
    backend.network.memory.chunk_seconds = 0.5
    async with backend.procs({"gpus": 1}) as procs, trio.open_nursery() as nursery:
        vault = await procs.spawn("vault", Vault, LARGE)
        handle = await vault.handle.call_one()
        found = bytearray(LARGE)
        reading = attempt(nursery, handle.read_into, found)
        await trio.sleep(1.25)
        before = bytes(found)
        assert before.startswith(pattern(1000))
        assert before.endswith(bytes(1000))
        assert 0 < await vault.revoke.call_one() <= 0.6
        with pytest.raises(trio.ClosedResourceError):
            await reading.result()
        assert found == before


async def test_own_buffer_is_closed_by_its_block(backend: Backend):
    """N4: `async with`; closing twice does nothing, and a closed one says so here, too."""
    async with backend.procs({"gpus": 1}) as procs:
        reader = await procs.spawn("reader", Reader)
        async with RDMABuffer(bytearray(SMALL)) as buffer:
            assert await reader.read.call_one(buffer) == bytes(SMALL)
        await buffer.aclose()
        with pytest.raises(trio.ClosedResourceError):
            await buffer.read_into(bytearray(SMALL))
        with pytest.raises(trio.ClosedResourceError):
            buffer.readonly()
        with pytest.raises(trio.ClosedResourceError):
            await reader.read.call_one(buffer)
        assert "revoked" in repr(buffer)


async def test_handles_revoke_nothing(backend: Backend):
    """N4: only what `RDMABuffer(data)` made."""
    async with backend.procs({"gpus": 1}) as procs:
        vault = await procs.spawn("vault", Vault)
        handle = await vault.handle.call_one()
        with pytest.raises(RuntimeError, match="owner"):
            await handle.aclose()
        with pytest.raises(RuntimeError, match="handle"):
            async with handle:
                raise AssertionError
        await handle.read_into(bytearray(SMALL))


async def test_dropped_buffer_goes_on(backend: Backend):
    """N4: handles may be anywhere, so the object that made them means nothing."""
    async with backend.procs({"gpus": 1}) as procs:
        reader = await procs.spawn("reader", Reader)
        handle = RDMABuffer(bytearray(b"12345678"))[:]
        assert await reader.read.call_one(handle) == b"12345678"


async def test_buffer_ends_with_its_actor(backend: Backend):
    """N4: what an actor has made for others ends with it, in `__init__` and in endpoints."""
    async with backend.procs({"gpus": 1}) as procs:
        reader = await procs.spawn("reader", Reader)
        async with procs.spawn("vault", Vault) as vault:
            handle = await vault.handle.call_one()
            assert await reader.read.call_one(handle) == pattern(SMALL)
        with pytest.raises(trio.ClosedResourceError, match="actor"):
            await handle.read_into(bytearray(SMALL))
        with pytest.raises(trio.ClosedResourceError, match="actor"):
            await reader.read.call_one(handle)


# ---- cancelled -------------------------------------------------------------------------------------------------------


@pytest.mark.seeds(5)
async def test_cancelled_read_ends_at_once(backend: Backend):
    """N4: the wait ends, others go on, and the buffer can be revoked."""
    async with backend.procs({"gpus": 2}) as procs, trio.open_nursery() as nursery:
        vault = await procs.slice(gpus=slice(0, 1)).spawn("vault", Vault, LARGE)
        reader = await procs.slice(gpus=1).spawn("reader", Reader)
        handle = await vault.handle.call_one()
        reading = attempt(nursery, reader.read_for_ever.call, handle)
        await reader.wait.call_one("has read")
        reading.cancel()
        await reading.over.wait()
        assert reading.cancelled
        assert await reader.read.call_one(handle) == pattern(LARGE)
        assert await vault.revoke.call_one(HANG_SECONDS) < HANG_SECONDS


@only_sim
async def test_cancelled_read_writes_no_more(backend: SimBackend):
    """N4: a chunk at most comes after the cancel; then nothing touches the destination."""
    backend.network.memory.chunk_seconds = 1.0
    async with backend.procs({"gpus": 1}) as procs:
        vault = await procs.spawn("vault", Vault, LARGE)
        handle = await vault.handle.call_one()
        found = bytearray(LARGE)
        before = trio.current_time()
        with trio.move_on_after(2.5):
            await handle.read_into(found)
        assert trio.current_time() - before == pytest.approx(2.5)
        await trio.sleep(1)
        after = bytes(found)
        assert after != pattern(LARGE)
        await trio.sleep(60)
        assert found == after


# ---- dead ------------------------------------------------------------------------------------------------------------


@SIZES
@pytest.mark.seeds(10)
async def test_killed_owner_is_a_death(backend: Backend, size: int):
    """N4: who reads meanwhile gets the diagnosis, who does later as well; and no task waits for ever."""
    async with backend.procs({"gpus": 3}, supervision=Isolate()) as procs, trio.open_nursery() as nursery:
        vault = await procs.slice(gpus=slice(0, 1)).spawn("vault", Vault, size)
        readers = await procs.slice(gpus=slice(1, 3)).spawn("readers", Reader)
        handle = await vault.handle.call_one()
        reading = attempt(nursery, readers.read_for_ever.call, handle)
        await readers.wait.call("has read")
        backend.kill(procs, 0)
        with pytest.raises(MeshErrorGroup) as caught:
            await reading.result()
        for leaf in trimesh.leaves(caught.value):
            assert isinstance(leaf, ProcDied)
            assert leaf.signal == 9
        for _ in range(2):
            with pytest.raises(ProcDied) as late:
                await handle.read_into(bytearray(size))
            assert late.value.signal == 9
            assert trimesh.origin(late.value).point == {"gpus": 0}
        assert handle.backend == "none"


async def test_owner_is_first_reached_while_it_dies(backend: Backend):
    """N4: whatever of a dying process can still be had, it is bytes or its death, and never that it is out of reach."""
    async with backend.procs({"gpus": 4}, supervision=Isolate()) as procs:
        vaults = await procs.spawn("vaults", Vault, allocated=True)
        for rank, handle in enumerate((await vaults.handle.call()).values()):
            backend.kill(procs, rank)
            assert (await read_until_dead(handle)).signal == 9
            with pytest.raises(ProcDied):
                async with handle.map():
                    raise AssertionError


@only_sim
async def test_owner_is_killed_in_the_middle_of_a_read(backend: SimBackend):
    """N4: nothing is read from then on."""
    backend.network.memory.chunk_seconds = 1.0
    async with backend.procs({"gpus": 2}, supervision=Isolate()) as procs, trio.open_nursery() as nursery:
        vault = await procs.slice(gpus=slice(0, 1)).spawn("vault", Vault, LARGE)
        handle = await vault.handle.call_one()
        found = bytearray(LARGE)
        reading = attempt(nursery, handle.read_into, found)
        await trio.sleep(2.5)
        backend.kill(procs, 0)
        before = bytes(found)
        with pytest.raises(ProcDied):
            await reading.result()
        assert found == before


@pytest.mark.daily("real")
@pytest.mark.seeds(20)
async def test_killed_owner_fails_the_block(backend: Backend):
    """X3, N4: under FailFast a reader inside the block ends by its cancel; the death is told once."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs({"gpus": 1}) as procs:
            vault = await procs.spawn("vault", Vault, LARGE)
            handle = await vault.handle.call_one()
            await handle.read_into(bytearray(LARGE))
            backend.kill(procs, 0)
            while True:
                await handle.read_into(bytearray(LARGE))
    (leaf,) = trimesh.leaves(caught.value)
    assert isinstance(leaf, ProcDied)


@pytest.mark.seeds(5)
async def test_killed_reader_holds_nothing(backend: Backend):
    """N4: the owner revokes at once what only the dead were at."""
    async with backend.procs({"gpus": 2}, supervision=Isolate()) as procs, trio.open_nursery() as nursery:
        vault = await procs.slice(gpus=slice(0, 1)).spawn("vault", Vault, LARGE, allocated=True)
        reader = await procs.slice(gpus=1).spawn("reader", Reader)
        handle = await vault.handle.call_one()
        reading = attempt(nursery, reader.read_for_ever.call_one, handle)
        looking = attempt(nursery, reader.look_for_ever.call_one, handle)
        await reader.wait.call_one("has read")
        await reader.wait.call_one("sees 0")
        backend.kill(procs, 1)
        for call in (reading, looking):
            with pytest.raises(ProcDied):
                await call.result()
        assert await vault.revoke.call_one(HANG_SECONDS) < HANG_SECONDS


async def test_handle_of_an_old_incarnation_finds_its_death(backend: Backend):
    """N4, R08: a restarted owner has new memory, under new handles; the old one never gives its bytes."""
    policy = Restart("one_for_one", on=(ProcDied,))
    async with backend.procs({"gpus": 1}, supervision=policy) as procs:
        vault = await procs.spawn("vault", Vault)
        old = await vault.handle.call_one()
        async with procs.events() as events:
            backend.kill(procs, 0)
            async for event in events:
                if isinstance(event, Restarted):
                    break
        new = await vault.handle.call_one()
        found = bytearray(SMALL)
        await new.read_into(found)
        assert found == pattern(SMALL)
        found = bytearray(SMALL)
        with pytest.raises(ProcDied):
            await old.read_into(found)
        assert found == bytes(SMALL)


async def test_stopped_owner_is_no_death(backend: Backend):
    """N4: a mesh that was left in good order says so to those who still have handles."""
    async with backend.procs({"gpus": 1}) as others:
        reader = await others.spawn("reader", Reader)
        async with backend.procs({"gpus": 1}) as procs:
            vault = await procs.spawn("vault", Vault)
            handle = await vault.handle.call_one()
            assert await reader.read.call_one(handle) == pattern(SMALL)
        with pytest.raises(MeshStopped):
            await handle.read_into(bytearray(SMALL))
        with pytest.raises(MeshStopped):
            await reader.read.call_one(handle)
