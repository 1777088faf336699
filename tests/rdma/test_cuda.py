"""Buffers on CUDA devices, and transfers from and to them, over real processes; only actors touch the device."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import trio
import trio.testing
from tests.conformance.vault import Vault, pattern

import trimesh
from trimesh import Actor, Isolate, LinkLost, ProcDied, RDMABuffer, endpoint, limits, this_host
from trimesh.rdma import Published

torch = pytest.importorskip("torch", reason="torch is an extra")

pytestmark = [
    pytest.mark.real,
    pytest.mark.torch,
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device on this machine"),
]

DEVICE = "cuda"
SIZES = pytest.mark.parametrize("size", [1, 1000, limits.CUDA_PIECE_BYTES, 3 * limits.CUDA_PIECE_BYTES + 5])
LARGE = 2 * limits.CUDA_COPY_BYTES + 7
BUSY_CYCLES = 1_000_000_000
"""Of a device that is kept busy: about half a second."""


def on_device(data: bytes | bytearray) -> Any:
    """Return bytes on the device; its work has ended."""
    made = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(DEVICE)
    torch.cuda.current_stream().synchronize()
    return made


def on_host(tensor: Any) -> bytes:
    return bytes(tensor.cpu().numpy())


class Owner(Actor):
    """Has memory on a device."""

    def __init__(self, size: int) -> None:
        self.tensor = on_device(pattern(size))
        self.buffer = RDMABuffer(self.tensor)

    @endpoint(concurrency=100)
    async def handle(self) -> RDMABuffer:
        return self.buffer

    @endpoint(concurrency=100)
    async def look(self) -> bytes:
        return on_host(self.tensor)

    @endpoint(concurrency=100)
    async def revoke(self) -> float:
        """Return how long it took."""
        before = trio.current_time()
        await self.buffer.aclose()
        return trio.current_time() - before

    @endpoint
    async def made_while_busy(self, size: int) -> RDMABuffer:
        """Return a buffer whose memory is being computed."""
        tensor = torch.zeros(size, dtype=torch.uint8, device=DEVICE)
        torch.cuda._sleep(BUSY_CYCLES)
        tensor.fill_(9)
        return RDMABuffer(tensor)

    @endpoint
    async def read_itself_while_busy(self) -> bytes:
        """Read what has yet to be computed when the read begins."""
        torch.cuda._sleep(BUSY_CYCLES)
        self.tensor.fill_(9)
        found = bytearray(self.buffer.nbytes)
        await self.buffer.read_into(found)
        return bytes(found)

    @endpoint
    async def use_itself(self) -> tuple[bytes, bytes, str]:
        """Read by way of the process itself, into both kinds of memory, after having written."""
        size = self.buffer.nbytes
        await self.buffer.write_from(on_device(pattern(size, 1)))
        first, second = bytearray(size), torch.zeros(size, dtype=torch.uint8, device=DEVICE)
        await self.buffer.read_into(first)
        await self.buffer.readonly().read_into(second)
        return bytes(first), on_host(second), self.buffer.backend


class Reader(Actor):
    """Reaches memory of others, from its own and from a device's."""

    @endpoint
    async def backend(self, buffer: RDMABuffer) -> str:
        return buffer.backend

    @endpoint
    async def read_to_host(self, buffer: RDMABuffer) -> bytes:
        found = bytearray(buffer.nbytes)
        await buffer.read_into(found)
        return bytes(found)

    @endpoint
    async def read_to_device(self, buffer: RDMABuffer) -> bytes:
        found = torch.zeros(buffer.nbytes, dtype=torch.uint8, device=DEVICE)
        await buffer.read_into(found)
        return on_host(found)

    @endpoint
    async def write_from_host(self, buffer: RDMABuffer, data: bytes) -> None:
        await buffer.write_from(data)

    @endpoint
    async def write_from_device(self, buffer: RDMABuffer, data: bytes) -> None:
        await buffer.write_from(on_device(data))

    @endpoint
    async def write_what_is_computed(self, buffer: RDMABuffer) -> int:
        """Write while the device is busy with it; return how often the loop has run meanwhile."""
        tensor = torch.zeros(buffer.nbytes, dtype=torch.uint8, device=DEVICE)
        torch.cuda._sleep(BUSY_CYCLES)
        tensor.fill_(7)
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                await trio.sleep(0.001)
                turns += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(count)
            await buffer.write_from(tensor)
            nursery.cancel_scope.cancel()
        return turns

    @endpoint
    async def read_over_what_is_used(self, buffer: RDMABuffer) -> tuple[bytes, bytes]:
        """Read into memory that the device has yet to copy elsewhere; return that copy, and what was read."""
        tensor = torch.full((buffer.nbytes,), 5, dtype=torch.uint8, device=DEVICE)
        torch.cuda._sleep(BUSY_CYCLES)
        copied = tensor.clone()
        await buffer.read_into(tensor)
        return on_host(copied), on_host(tensor)

    @endpoint
    async def read_for_ever(self, buffer: RDMABuffer, port: trimesh.Port[int]) -> None:
        """Read, again and again; say so after the first time."""
        found = torch.zeros(buffer.nbytes, dtype=torch.uint8, device=DEVICE)
        await buffer.read_into(found)
        port.send_nowait(1)
        while True:
            await buffer.read_into(found)

    @endpoint
    async def read_together(self, buffer: RDMABuffer, parts: int) -> bytes:
        """Read parts of one allocation at one time, into parts of another."""
        size = buffer.nbytes // parts
        found = torch.zeros(size * parts, dtype=torch.uint8, device=DEVICE)
        async with trimesh.rdma.batch() as batch:
            for start in range(0, size * parts, size):
                batch.read(buffer[start : start + size], into=found[start : start + size])
        return on_host(found)

    @endpoint
    async def cancel_while_busy(self, buffer: RDMABuffer) -> float:
        """Give up a transfer that waits for the device; return how long that took."""
        tensor = torch.zeros(buffer.nbytes, dtype=torch.uint8, device=DEVICE)
        torch.cuda._sleep(4 * BUSY_CYCLES)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(buffer.write_from, tensor)
                await trio.testing.wait_all_tasks_blocked()
                before = trio.current_time()
                scope.cancel()
        return trio.current_time() - before

    @endpoint
    async def follow(self, weights: Published) -> dict[str, bytes]:
        async with weights.pin() as snapshot:
            made = {
                name: torch.zeros(entry.shape, dtype=getattr(torch, entry.dtype), device=DEVICE)
                for name, entry in snapshot.entries.items()
            }
            await snapshot.read_into(made)
        return {name: on_host(tensor.view(torch.uint8)) for name, tensor in made.items()}

    @endpoint
    async def publish(self) -> Published:
        self.published = Published()
        await self.published.publish({"a": torch.arange(6.0, device=DEVICE), "b": torch.ones(3, device=DEVICE)})
        return self.published


# ---- memory of the host, from and to a device ------------------------------------------------------------------------


@SIZES
@pytest.mark.parametrize("allocated", [True, False])
async def test_host_buffer_is_read_and_written_by_a_device(size: int, allocated: bool) -> None:
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        vault = await procs.slice(gpus=0).spawn("vault", Vault, size, allocated=allocated)
        reader = await procs.slice(gpus=1).spawn("reader", Reader)
        handle = await vault.handle.call_one()
        assert await reader.read_to_device.call_one(handle) == pattern(size)
        await reader.write_from_device.call_one(handle, pattern(size, 3))
        assert await vault.look.call_one(0, size) == pattern(size, 3)


async def test_host_buffer_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """What carries the bytes does not matter to the device."""
    monkeypatch.setenv("TRIMESH_RDMA", "tcp")
    size = 2 * limits.CUDA_PIECE_BYTES + 1
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        vault = await procs.slice(gpus=0).spawn("vault", Vault, size)
        reader = await procs.slice(gpus=1).spawn("reader", Reader)
        handle = await vault.handle.call_one()
        assert await reader.backend.call_one(handle) == "tcp"
        assert await reader.read_to_device.call_one(handle) == pattern(size)
        await reader.write_from_device.call_one(handle, pattern(size, 3))
        assert await vault.look.call_one(0, size) == pattern(size, 3)


async def test_publication_from_device_to_device() -> None:
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        actors = await procs.spawn("actors", Reader)
        weights = await actors.slice(gpus=0).publish.call_one()
        found = await actors.slice(gpus=1).follow.call_one(weights)
        assert found["a"] == bytes(torch.arange(6.0).numpy())
        assert found["b"] == bytes(torch.ones(3).numpy())


# ---- memory of a device, granted -------------------------------------------------------------------------------------


@SIZES
async def test_device_buffer_within_its_process(size: int) -> None:
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        owner = await procs.spawn("owner", Owner, size)
        expected = pattern(size, 1)
        assert await owner.use_itself.call_one() == (expected, expected, "local")


@pytest.mark.parametrize("size", [1, 1000, 3 * limits.CUDA_PIECE_BYTES + 5, LARGE])
async def test_device_buffer_between_processes(size: int) -> None:
    """API 7: the owner's Python takes no part; whoever sees the device copies, to it or to the host."""
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        owner = await procs.slice(gpus=0).spawn("owner", Owner, size)
        reader = await procs.slice(gpus=1).spawn("reader", Reader)
        handle = await owner.handle.call_one()
        assert await reader.backend.call_one(handle) == "cuda_ipc"
        assert await reader.read_to_device.call_one(handle) == pattern(size)
        assert await reader.read_to_host.call_one(handle) == pattern(size)
        await reader.write_from_device.call_one(handle, pattern(size, 2))
        assert await owner.look.call_one() == pattern(size, 2)
        await reader.write_from_host.call_one(handle, pattern(size, 3))
        assert await owner.look.call_one() == pattern(size, 3)


async def test_part_of_a_device_buffer() -> None:
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        owner = await procs.slice(gpus=0).spawn("owner", Owner, 1000)
        reader = await procs.slice(gpus=1).spawn("reader", Reader)
        handle = await owner.handle.call_one()
        assert await reader.read_to_host.call_one(handle[100:200]) == pattern(1000)[100:200]
        await reader.write_from_device.call_one(handle[100:200][:3], b"abc")
        assert await owner.look.call_one() == pattern(1000)[:100] + b"abc" + pattern(1000)[103:]
        with pytest.raises(PermissionError):
            await reader.write_from_host.call_one(handle[100:200].readonly(), bytes(100))


async def test_many_parts_at_one_time() -> None:
    """One allocation is opened as often as it is read, at one time."""
    size = 40 * 1000
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        owner = await procs.slice(gpus=0).spawn("owner", Owner, size)
        reader = await procs.slice(gpus=1).spawn("reader", Reader)
        assert await reader.read_together.call_one(await owner.handle.call_one(), 40) == pattern(size)


# ---- the order of streams --------------------------------------------------------------------------------------------


async def test_what_was_queued_comes_before_a_write() -> None:
    """CD-1: without the loop waiting for it."""
    size = limits.CUDA_PIECE_BYTES + 1
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        reader = await procs.spawn("reader", Reader)
        local = bytearray(size)
        async with RDMABuffer(local) as buffer:
            turns = await reader.write_what_is_computed.call_one(buffer)
        assert local == b"\7" * size
        assert turns > 10


async def test_what_was_queued_comes_before_a_read() -> None:
    """CD-1"""
    size = limits.CUDA_PIECE_BYTES + 1
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        reader = await procs.spawn("reader", Reader)
        async with RDMABuffer(pattern(size), writable=False) as buffer:
            copied, found = await reader.read_over_what_is_used.call_one(buffer)
        assert copied == b"\5" * size
        assert found == pattern(size)


async def test_what_was_queued_when_the_buffer_was_made_comes_before_others_read() -> None:
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        owner = await procs.slice(gpus=0).spawn("owner", Owner, 1)
        reader = await procs.slice(gpus=1).spawn("reader", Reader)
        handle = await owner.made_while_busy.call_one(1000)
        assert await reader.read_to_host.call_one(handle) == b"\t" * 1000


async def test_what_was_queued_comes_before_a_read_in_the_same_process() -> None:
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        owner = await procs.spawn("owner", Owner, 1000)
        assert await owner.read_itself_while_busy.call_one() == b"\t" * 1000


async def test_cancel_does_not_wait_for_what_is_computed() -> None:
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        reader = await procs.spawn("reader", Reader)
        async with RDMABuffer(bytearray(1000)) as buffer:
            assert await reader.cancel_while_busy.call_one(buffer) < limits.CUDA_END_SECONDS / 4


# ---- ends ------------------------------------------------------------------------------------------------------------


async def test_revoked_device_buffer() -> None:
    """N4: who reads meanwhile, and who does later, gets ClosedResourceError."""
    async with this_host().spawn_procs({"gpus": 2}) as procs, trio.open_nursery() as nursery:
        owner = await procs.slice(gpus=0).spawn("owner", Owner, LARGE)
        reader = await procs.slice(gpus=1).spawn("reader", Reader)
        handle = await owner.handle.call_one()

        async def read() -> None:
            with pytest.raises(trio.ClosedResourceError):
                await reader.read_for_ever.call_one(handle, port)

        async with trimesh.open_channel(int, capacity=1) as (port, receiver):
            nursery.start_soon(read)
            await receiver.receive()
            assert await owner.revoke.call_one() < limits.REVOKE_SECONDS
        with pytest.raises(trio.ClosedResourceError):
            await handle.read_into(bytearray(LARGE))


async def test_death_of_the_owner_of_a_device_buffer() -> None:
    """BK-2: in the middle of a read, and later."""
    async with this_host().spawn_procs({"gpus": 2}, supervision=Isolate()) as procs, trio.open_nursery() as nursery:
        owner = await procs.slice(gpus=0).spawn("owner", Owner, LARGE)
        reader = await procs.slice(gpus=1).spawn("reader", Reader)
        handle = await owner.handle.call_one()

        async def read() -> None:
            with pytest.raises(ProcDied):
                await reader.read_for_ever.call_one(handle, port)

        async with trimesh.open_channel(int, capacity=1) as (port, receiver):
            nursery.start_soon(read)
            await receiver.receive()
            os.kill(handle.owner.pid, signal.SIGKILL)


async def test_other_host_is_told_that_it_does_not_reach_the_device() -> None:
    async with this_host().spawn_procs({"gpus": 2}, env=lambda point: {"TRIMESH_HOST_ID": str(point["gpus"])}) as procs:
        owner = await procs.slice(gpus=0).spawn("owner", Owner, 1000)
        reader = await procs.slice(gpus=1).spawn("reader", Reader)
        handle = await owner.handle.call_one()
        if await reader.backend.call_one(handle) == "none":
            with pytest.raises(LinkLost):
                await reader.read_to_device.call_one(handle)


@SIZES
async def test_other_host_reaches_the_device_by_an_adapter(size: int) -> None:
    """GPUDirect RDMA; `tools/gpudirect.py` says what it lacks."""
    async with this_host().spawn_procs({"gpus": 2}, env=lambda point: {"TRIMESH_HOST_ID": str(point["gpus"])}) as procs:
        owner = await procs.slice(gpus=0).spawn("owner", Owner, size)
        reader = await procs.slice(gpus=1).spawn("reader", Reader)
        handle = await owner.handle.call_one()
        if await reader.backend.call_one(handle) == "none":
            pytest.skip(handle.handle.granted.why_no_device or "no adapter of this machine reaches the device")
        assert await reader.read_to_device.call_one(handle) == pattern(size)
        assert await reader.read_to_host.call_one(handle) == pattern(size)
        await reader.write_from_device.call_one(handle, pattern(size, 1))
        assert await owner.look.call_one() == pattern(size, 1)
        await reader.write_from_host.call_one(handle, pattern(size, 2))
        assert await owner.look.call_one() == pattern(size, 2)
        await owner.revoke.call_one()
        with pytest.raises(trio.ClosedResourceError):
            await reader.read_to_device.call_one(handle)


async def test_process_that_is_shown_no_device_is_told_so() -> None:
    def environment(point: trimesh.Point) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": ""} if point["gpus"] else {}

    async with this_host().spawn_procs({"gpus": 2}, env=environment) as procs:
        owner = await procs.slice(gpus=0).spawn("owner", Owner, 1000)
        reader = await procs.slice(gpus=1).spawn("reader", Reader)
        handle = await owner.handle.call_one()
        assert await reader.backend.call_one(handle) == "none"
        with pytest.raises(LinkLost, match="no CUDA device"):
            await reader.read_to_host.call_one(handle)


class Expandable(Actor):
    """Has memory that CUDA does not share."""

    @endpoint
    async def make(self) -> str:
        with pytest.raises(ValueError, match="expandable_segments:False") as caught:
            RDMABuffer(torch.zeros(1 << 22, dtype=torch.uint8, device=DEVICE))
        return str(caught.value)


async def test_expandable_segments_are_refused() -> None:
    setting = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    async with this_host().spawn_procs({"gpus": 1}, env=setting) as procs:
        assert "Expandable" in await (await procs.spawn("one", Expandable)).make.call_one()
