"""Memory that others read and write themselves (rule N4)."""

from __future__ import annotations

import pickle
import weakref
from typing import Any

import pytest
import trio
import trio.testing
from tests.conformance.meshes import Backend, attempt, tick
from tests.conformance.vault import LARGE, SMALL, Reader, Vault, pattern

import trimesh
from trimesh import RDMABuffer, this_proc

BOTH_SIZES = pytest.mark.parametrize("size", [SMALL, LARGE])


@BOTH_SIZES
async def test_buffer_is_read_and_written(backend: Backend, size: int):
    """API 7: by the program that has got the handle; the owner sees what was written."""
    async with backend.procs({"gpus": 1}) as procs:
        vaults = await procs.spawn("vaults", Vault, size)
        handle = await vaults.handle.call_one()
        assert handle.nbytes == size
        found = bytearray(size)
        await handle.read_into(found)
        assert found == pattern(size)
        await handle.write_from(pattern(size, salt=1))
        assert await vaults.look.call_one(0, size) == pattern(size, salt=1)


class Local(bytearray):
    """Memory that can be watched: a bytearray itself takes no weak references."""


@BOTH_SIZES
async def test_memory_of_a_transfer_is_let_go_when_it_has_ended(backend: Backend, size: int):
    """MV-1: whether it has ended well or was given up; a reader that takes new memory each time does not grow."""
    async with backend.procs({"gpus": 1}) as procs:
        handle = await (await procs.spawn("vaults", Vault, size)).handle.call_one()
        kept = list[weakref.ref[Local]]()
        for is_cancelled in False, True, False:
            local = Local(size)
            kept.append(weakref.ref(local))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(handle.read_into, local)
                del local
                if is_cancelled:
                    await tick(2)
                    nursery.cancel_scope.cancel()
        for _ in range(20):  # what was given up has ended soon
            await handle.write_from(pattern(size))
        assert [memory() is None for memory in kept] == [True, True, True]


async def test_handle_is_passed_on(backend: Backend):
    """API 7: a handle reaches any process; each reads for itself, and sees the latest bytes."""
    async with backend.procs({"gpus": 3}) as procs:
        vault = await procs.slice(gpus=slice(0, 1)).spawn("vault", Vault)
        readers = await procs.slice(gpus=slice(1, 3)).spawn("readers", Reader)
        handle = await vault.handle.call_one()
        assert set((await readers.read.call(handle)).values()) == {pattern(SMALL)}
        await vault.put.call_one(3, b"new")
        changed = pattern(3) + b"new" + pattern(SMALL)[6:]
        assert set((await readers.read.call(handle)).values()) == {changed}
        assert set((await readers.backend.call(handle)).values()) == {"cma"}
        assert handle.owner.mesh == "vault"
        assert handle.owner.point == {"gpus": 0}


async def test_owner_uses_its_own_buffer(backend: Backend):
    """API 7: also the controller has buffers, and a process reaches its own memory by the same handle."""
    async with backend.procs({"gpus": 1}) as procs:
        reader = await procs.spawn("reader", Reader)
        memory = bytearray(pattern(SMALL))
        async with RDMABuffer(memory) as buffer:
            assert buffer.backend == "local"
            assert await reader.read.call_one(buffer) == pattern(SMALL)
            await reader.write.call_one(buffer[10:13], b"xyz")
            assert memory[10:13] == b"xyz"
            found = bytearray(3)
            await buffer[10:13].read_into(found)
            assert found == b"xyz"


async def test_parts_count_bytes(backend: Backend):
    """API 7: `buffer[start:stop]`, and parts of parts."""
    async with backend.procs({"gpus": 1}) as procs:
        vault = await procs.spawn("vault", Vault)
        handle = await vault.handle.call_one()
        part = handle[100:200][10:-10]
        assert part.nbytes == 80
        found = bytearray(80)
        await part.read_into(found)
        assert found == pattern(SMALL)[110:190]
        await part.write_from(bytes(80))
        whole = await vault.look.call_one(0, SMALL)
        assert whole == pattern(SMALL)[:110] + bytes(80) + pattern(SMALL)[190:]


@pytest.mark.daily("real")
async def test_readonly_handle_refuses_writes(backend: Backend):
    """API 7: rights are checked before a byte moves."""
    async with backend.procs({"gpus": 1}) as procs:
        vault = await procs.spawn("vault", Vault)
        for handle in (await vault.readonly.call_one(), (await vault.handle.call_one()).readonly()):
            assert not handle.is_writable
            with pytest.raises(PermissionError, match="read-only"):
                await handle.write_from(bytes(SMALL))
            with pytest.raises(PermissionError, match="read-only"):
                await handle[:8].fetch_add(1)
            found = bytearray(SMALL)
            await handle.read_into(found)
            assert found == pattern(SMALL)


async def test_forged_handles_are_refused(backend: Backend):
    """API 7, N4: what a handle says is checked where the memory is."""
    async with backend.procs({"gpus": 1}) as procs:
        vault = await procs.spawn("vault", Vault)
        whole, readonly = await vault.handle.call_one(), await vault.readonly.call_one()
        rebuild, (home, grant, reach, origin) = whole.__reduce__()
        place, generation, secret, block, exported = grant
        rest = (secret, block, exported)
        address, _, nbytes, rights, space = reach
        forged = {
            "secret": (home, (place, generation, bytes(16), block, exported), reach, origin),
            "range": (home, grant, (address, 8, nbytes, rights, space), origin),
            "far range": (home, grant, (address, (1 << 64) - SMALL - 1, nbytes, rights, space), origin),
            "rights": (home, readonly.__reduce__()[1][1], reach, origin),
        }
        for what, fields in forged.items():
            handle = rebuild(*fields)
            with pytest.raises(PermissionError, match="has no such buffer"):
                await handle.write_from(bytes(SMALL))
            if what != "rights":
                with pytest.raises(PermissionError, match="has no such buffer"):
                    await handle.read_into(bytearray(SMALL))
        for other in ((place, generation + 1, *rest), (place + 1000, generation, *rest)):
            with pytest.raises((PermissionError, trio.ClosedResourceError)):
                await rebuild(home, other, reach, origin).read_into(bytearray(SMALL))
        assert await vault.look.call_one(0, SMALL) == pattern(SMALL)


async def test_wrong_sizes_move_nothing(backend: Backend):
    """API 7: sizes are checked before a byte moves."""
    async with backend.procs({"gpus": 1}) as procs:
        vault = await procs.spawn("vault", Vault)
        handle = await vault.handle.call_one()
        found = bytearray(SMALL - 1)
        with pytest.raises(ValueError, match=f"{SMALL} bytes"):
            await handle.read_into(found)
        assert found == bytes(SMALL - 1)
        with pytest.raises(ValueError, match=f"{SMALL} bytes"):
            await handle.write_from(bytes(SMALL + 1))
        with pytest.raises(ValueError, match="writable"):
            await handle.read_into(bytes(SMALL))
        with pytest.raises(TypeError, match="tensor"):
            await handle.read_into(SMALL)
        assert await vault.look.call_one(0, SMALL) == pattern(SMALL)


async def test_handles_can_be_pickled(backend: Backend):
    """API 7: a handle is a capability; whoever has its bytes may use it."""
    async with backend.procs({"gpus": 1}) as procs:
        vault = await procs.spawn("vault", Vault)
        handle = pickle.loads(pickle.dumps((await vault.handle.call_one())[2:6]))
        found = bytearray(4)
        await handle.read_into(found)
        assert found == pattern(SMALL)[2:6]
        assert handle.owner.mesh == "vault"


@pytest.mark.daily("real")
async def test_atomic_additions_add_up(backend: Backend):
    """API 7: from many processes at once, by handles and parts; none sees a number that another one has seen."""
    times = 50
    async with backend.procs({"gpus": 3}) as procs, trio.open_nursery() as nursery:
        vault = await procs.slice(gpus=slice(0, 1)).spawn("vault", Vault)
        await vault.put.call_one(0, bytes(16))
        readers = await procs.spawn("readers", Reader)
        handle = await vault.handle.call_one()
        swaps = attempt(nursery, readers.count_by_swaps.call, handle[8:16], times)
        seen = [number for found in (await readers.count.call(handle[:8], times)).values() for number in found]
        assert sorted(seen) == list(range(3 * times))
        await swaps.result()
        numbers = await vault.look.call_one(0, 16)
        assert int.from_bytes(numbers[:8], "little") == 3 * times
        assert int.from_bytes(numbers[8:], "little") == 6 * times


async def test_atomic_numbers_wrap(backend: Backend):
    """API 7: they are unsigned and of 64 bits."""
    async with backend.procs({"gpus": 1}) as procs:
        vault = await procs.spawn("vault", Vault)
        await vault.put.call_one(8, b"\xff" * 8)
        handle = await vault.handle.call_one()
        assert await handle.fetch_add(2, 8) == (1 << 64) - 1
        assert await handle.fetch_add(-3, offset=8) == 1
        assert await handle.compare_and_swap(0, 5, 8) == (1 << 64) - 2
        assert await handle.compare_and_swap((1 << 64) - 2, 5, 8) == (1 << 64) - 2
        assert await handle.fetch_add(0, 8) == 5
        for offset, match in ((4, "aligned"), (-8, "within"), (SMALL - 7, "within")):
            with pytest.raises(ValueError, match=match):
                await handle.fetch_add(1, offset)
        for value in (1 << 64, -(1 << 63) - 1):
            with pytest.raises(ValueError, match="64 bits"):
                await handle.fetch_add(value)


async def test_transfers_are_checkpoints(backend: Backend):
    """K01, K03: also those that are done at once, and those of a revoked buffer are cancelled."""
    async with backend.procs({"gpus": 1}) as procs:
        vault = await procs.spawn("vault", Vault)
        handle = await vault.handle.call_one()
        own = RDMABuffer(bytearray(8))
        steps: list[Any] = [
            lambda: handle.read_into(bytearray(SMALL)),
            lambda: handle.write_from(bytes(SMALL)),
            lambda: handle.fetch_add(1),
            lambda: handle.compare_and_swap(0, 1),
            lambda: own.read_into(bytearray(8)),
            own.aclose,
            own.aclose,
        ]
        for step in steps:
            with trio.testing.assert_checkpoints():
                await step()
            with trio.CancelScope() as scope:
                scope.cancel()
                await step()
                raise AssertionError
            assert scope.cancelled_caught


async def test_making_a_buffer_never_waits(backend: Backend):
    """K02."""
    async with backend.procs({"gpus": 1}) as procs:
        del procs
        with trio.testing.assert_no_checkpoints():
            buffer = RDMABuffer(bytearray(8))
            assert buffer[2:4].readonly().nbytes == 2
            assert repr(buffer)
            assert buffer.backend
            assert len(trimesh.rdma.allocate(8)) == 8
        await buffer.aclose()


async def test_buffers_need_a_mesh():
    """API 7: the text says what to write."""
    with pytest.raises(RuntimeError, match="spawn_procs"):
        RDMABuffer(bytearray(8))
    with pytest.raises(RuntimeError, match="spawn_procs"):
        trimesh.rdma.allocate(8)


async def test_actor_of_this_process_has_buffers(backend: Backend):
    """API 7: M7."""
    async with backend.procs({"gpus": 1}) as procs, this_proc().spawn("vault", Vault) as vault:
        reader = await procs.spawn("reader", Reader)
        handle = await vault.handle.call_one()
        assert handle.backend == "local"
        assert await reader.read.call_one(handle) == pattern(SMALL)
