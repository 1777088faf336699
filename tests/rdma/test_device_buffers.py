"""Buffers on a device, as processes find them that do not have that device: what is granted is the ticket.

No device is needed here: what is refused is refused before one is touched. tests/rdma/test_cuda.py has the rest.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import trio
from tests.conformance.device_vault import BOTH, SIZE, SPACE, Owner, post
from tests.conformance.vault import Reader

import trimesh
from trimesh import LinkLost, ProtocolError, RDMABuffer, limits, this_host
from trimesh.rdma.buffers.buffer import buffer_by
from trimesh.rdma.memory.handle import Handle

pytestmark = pytest.mark.real


@pytest.mark.daily
async def test_process_without_the_device_is_told_why() -> None:
    """N5: the error names the owner, and says what is missing here."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        handle = await (await procs.spawn("owner", Owner)).handle.call_one()
        assert handle.backend == "none"
        assert handle.nbytes == SIZE
        for use in (
            handle.read_into(bytearray(SIZE)),
            handle.write_from(bytes(SIZE)),
            handle[5:9].read_into(bytearray(4)),
        ):
            with pytest.raises(LinkLost, match="CUDA device of owner") as caught:
                await use
            assert trimesh.origin(caught.value).point == {"gpus": 0}
            assert any(why in str(caught.value) for why in ("torch is not imported", "torch sees no", "process sees"))


async def test_device_of_this_process_is_found_by_name() -> None:
    """The memory of a device is not opened by what a handle says, even in the process that has granted it."""
    async with this_host().spawn_procs({"gpus": 1}):
        registration, buffer = post()
        assert buffer.backend == "local"
        with pytest.raises(LinkLost, match="CUDA device"):
            await buffer.read_into(bytearray(SIZE))
        registration.revoke()
        with pytest.raises(trio.ClosedResourceError):
            await buffer.read_into(bytearray(SIZE))


@pytest.mark.daily
async def test_rights_and_range_on_a_device_are_checked() -> None:
    """N5: before a byte moves, by the ledger and the ticket; not by what the handle says."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        owner = await procs.spawn("owner", Owner)
        readonly = await owner.readonly.call_one()
        with pytest.raises(PermissionError, match="read-only"):
            await readonly.write_from(bytes(SIZE))
        forged = Handle(readonly.handle.granted, 1 << 40, 0, SIZE, BOTH, SPACE)
        with pytest.raises(PermissionError, match="no such buffer"):
            await buffer_by(forged).write_from(bytes(SIZE))
        whole = (await owner.handle.call_one()).handle.granted
        for offset, nbytes in ((0, SIZE + 1), (SIZE, 1)):
            with pytest.raises(PermissionError, match="range"):
                await buffer_by(Handle(whole, 1 << 40, offset, nbytes, BOTH, SPACE)).read_into(bytearray(nbytes))
        with pytest.raises(ProtocolError, match="for the device"):
            await buffer_by(Handle(whole, 1 << 40, 0, 8, BOTH, "cuda:other")).read_into(bytearray(8))


@pytest.mark.parametrize("data", [bytes(512), b"\xff" * 512, b"\5\0\0\0hello", b"\1\0\0\0\x90"])
async def test_forged_ticket_is_a_protocol_error(data: bytes) -> None:
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        owner = await procs.spawn("owner", Owner)
        handle = await owner.handle.call_one()
        await owner.lay.call_one(data)
        with pytest.raises(ProtocolError, match="ticket"):
            await handle.read_into(bytearray(SIZE))


async def test_device_memory_is_no_memory_of_the_host() -> None:
    """N5: no view and no atomic operation; the ticket is not taken for it."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        handle = await (await procs.spawn("owner", Owner)).handle.call_one()
        with pytest.raises(ValueError, match="can be mapped"):
            async with handle.map():
                pass
        for use in (handle.fetch_add(1), handle.compare_and_swap(0, 1)):
            with pytest.raises(ValueError, match="need host memory"):
                await use
        assert handle.readonly().handle.space == handle[3:].handle.space == SPACE


async def test_ranges_of_host_and_device_do_not_overlap() -> None:
    """N5: equal addresses mean nothing between two memories."""
    async with this_host().spawn_procs({"gpus": 1}):
        device = post()[1]
        data = bytearray(SIZE)
        async with RDMABuffer(data) as host:
            same = Handle(device.handle.granted, host.handle.address, 0, SIZE, BOTH, SPACE)
            batch = trimesh.rdma.Batch()
            batch.write(host, source=bytes(SIZE))
            batch.write(buffer_by(same), source=bytes(SIZE))
            with pytest.raises(ValueError, match="overlaps"):
                batch.write(buffer_by(same)[5:10], source=bytes(5))


async def test_other_host_does_not_reach_a_device() -> None:
    async with this_host().spawn_procs({"gpus": 2}, env=lambda point: {"TRIMESH_HOST_ID": str(point["gpus"])}) as procs:
        owner = await procs.slice(gpus=0).spawn("owner", Owner)
        reader = await procs.slice(gpus=1).spawn("reader", Reader)
        handle = await owner.handle.call_one()
        assert await reader.backend.call_one(handle) == "none"
        with pytest.raises(LinkLost, match="cannot be reached from here") as caught:
            await reader.read.call_one(handle)
        assert "CUDA device" in "".join(caught.value.__notes__)


async def test_room_of_tickets_is_used_again() -> None:
    """A process has few blocks: hundreds of buffers share one, and a room is free when its buffer has been dropped."""

    async def make(count: int) -> set[int]:
        made = [post()[0] for _ in range(count)]
        places = {one.span.address for one in made}
        for one in made:
            one.revoke()
            await one.is_over.wait()
        del made, one
        gc.collect()
        return places

    in_one_block = limits.CUDA_TICKET_BLOCK_BYTES // limits.CUDA_TICKET_BYTES
    async with this_host().spawn_procs({"gpus": 1}):
        first = await make(in_one_block + 1)
        assert len(first) == in_one_block + 1
        assert max(first) - min(first) >= limits.CUDA_TICKET_BLOCK_BYTES
        everything: set[Any] = set(first)
        for _ in range(5):
            everything |= await make(in_one_block + 1)
        assert len(everything) <= 2 * in_one_block
