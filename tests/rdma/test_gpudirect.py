"""Memory of devices by adapters, as far as neither is needed: what is asked of UCX, and what is said without one.

UCX is a stand-in that takes memory of the host for memory of a device (tests/native/recording_ucp.c); the owner's
process counts as one of another host. tests/rdma/test_cuda.py has what needs a device.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import trio
from tests.conformance.device_vault import BOTH
from tests.conformance.vault import pattern
from tests.native.mover import CUDA_MEMORY
from tests.native.recording import Recording
from tests.rdma.adapter_owner import SIZE, DeviceOwner
from tests.rdma.slow_lane import SlowLane

from trimesh import LinkLost, RDMABuffer, limits, this_host, untried
from trimesh._runtime.life.current import current_proc
from trimesh._transport.interface import MemoryKind, Span, TransferKind
from trimesh.rdma.buffers.buffer import buffer_by
from trimesh.rdma.memory import device_transfer
from trimesh.rdma.memory.local import Memory, address_of

pytestmark = pytest.mark.real

READ, WRITE = TransferKind.READ, TransferKind.WRITE


class Rig:
    """The owner's process, and how the stand-in is found there."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recording = Recording(tmp_path)
        self.recording.install(monkeypatch)
        self.patch = monkeypatch
        self.flushed = list[int]()
        monkeypatch.setattr(device_transfer, "settle_writes", self.flushed.append)
        monkeypatch.setattr(device_transfer, "_said", set[str]())
        monkeypatch.setattr(untried, "_said", set[str]())

    @asynccontextmanager
    async def open(self, *, is_ready: bool = True, changes: Mapping[str, str] | None = None) -> AsyncGenerator[Any]:
        """Give the owner; `changes` are of its environment."""
        env = self.recording.environment | {"TRIMESH_HOST_ID": "elsewhere"} | dict(changes or {})
        async with this_host().spawn_procs({"gpus": 1}, env=env) as procs:
            yield await procs.spawn("owner", DeviceOwner, is_ready=is_ready)

    def told(self, name: str, length: int) -> list[tuple[int, int]]:
        """Return kind of memory here and there of the transfers of that size."""
        return [(one["kind"], one["theirs"]) for one in self.recording.calls(name) if one["length"] == length]


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    rig = Rig(tmp_path, monkeypatch)
    yield rig
    rig.recording.uninstall(monkeypatch)


def on_device(data: bytearray) -> Memory:
    """Return memory as that of a CUDA tensor would be."""
    span = Span(address_of(memoryview(data)), len(data), data, MemoryKind.CUDA)
    return Memory(span, is_writable=True, text="a tensor", tensor=SimpleNamespace(device=SimpleNamespace(index=5)))


async def move(buffer: RDMABuffer, kind: TransferKind, data: bytearray) -> None:
    """Make a transfer of a buffer with memory of a device."""
    await device_transfer.move(current_proc().bulk, buffer.handle, kind, on_device(data))


async def test_device_of_another_host_is_read_and_written(rig: Rig) -> None:
    """N4, N5: by whoever has the handle, in the range and with the rights that it has, until it is revoked."""
    async with rig.open() as owner:
        buffer, _ = await owner.handles.call_one()
        assert buffer.backend == "ibverbs"
        found = bytearray(SIZE)
        await buffer.read_into(found)
        assert found == pattern(SIZE)
        part = bytearray(1000)
        await buffer[500:1500].read_into(part)
        assert part == pattern(SIZE)[500:1500]
        await buffer[8:1008].write_from(pattern(1000, 9))
        assert await owner.look.call_one() == pattern(8) + pattern(1000, 9) + pattern(SIZE)[1008:]
        assert rig.told("get", SIZE) == [(-1, CUDA_MEMORY)]
        assert rig.told("put", 1000) == [(-1, CUDA_MEMORY)]
        assert rig.told("get", 1) == [(-1, CUDA_MEMORY)]  # AD-2: behind the write

        readonly = await owner.readonly.call_one()
        await readonly[:1000].read_into(part)
        with pytest.raises(PermissionError, match="no such buffer"):
            await buffer_by(attrs.evolve(readonly.handle, rights=BOTH)).write_from(bytes(SIZE))

        with pytest.raises(PermissionError, match="range"):  # which the ticket says, not the handle
            await buffer_by(attrs.evolve(buffer.handle, offset=SIZE - 4, nbytes=8)).read_into(bytearray(8))

        await owner.revoke.call_one()
        with pytest.raises(trio.ClosedResourceError):
            await buffer.read_into(found)
        mapped, unmapped = (rig.recording.calls(name) for name in ("mem_map", "mem_unmap"))
        assert sum(call["kind"] == CUDA_MEMORY for call in mapped) == 2  # for each set of rights
        assert sum(call["kind"] == CUDA_MEMORY for call in unmapped) == 2


async def test_devices_at_both_ends_need_no_memory_of_a_host(rig: Rig) -> None:
    async with rig.open() as owner:
        for buffer, theirs, salt in zip(await owner.handles.call_one(), (CUDA_MEMORY, 0), (0, 3), strict=True):
            rig.recording.forget()
            found = bytearray(SIZE)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                await move(buffer, READ, found)
            # The first use of all says that it is untried.
            assert [str(one.message).split(" has ")[0] for one in said] == ["GPUDirect RDMA"] * (salt == 0)
            assert found == pattern(SIZE, salt)
            assert rig.told("get", SIZE) == [(CUDA_MEMORY, theirs)]
            assert rig.flushed.pop() == 5  # AD-2: before the caller queues anything
            await move(buffer, WRITE, bytearray(pattern(SIZE, 7)))
            assert rig.told("put", SIZE) == [(CUDA_MEMORY, theirs)]
            assert not rig.flushed
        assert await owner.look.call_one() == pattern(SIZE, 7)


class Lanes:
    """Stands for copies of a device here, and pinned memory."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.made = list[SlowLane]()
        patch.setattr(device_transfer, "pinned_places", self.places)
        patch.setattr(device_transfer, "DeviceLane", self.lane)
        self.data = bytearray()

    async def places(self, nbytes: int) -> list[Span]:
        self.made.append(SlowLane(self.data, is_feed=True, piece=min(nbytes, limits.CUDA_PIECE_BYTES)))
        return self.made[-1].spans

    def lane(self, _index: int, _there: int, _near: Any, is_feed: bool, _memory: object) -> SlowLane:
        self.made[-1].is_feed = is_feed
        return self.made[-1]


@pytest.mark.parametrize("is_refused_by", ["ucx", "driver"])
async def test_what_is_refused_here_goes_through_memory_of_the_host(rig: Rig, is_refused_by: str) -> None:
    """AD-3: to a buffer of either kind, the same bytes; the reason is said once."""
    if is_refused_by == "ucx":
        rig.patch.setenv("RECORDING_UCP_MAP", "-22")
        why = "status -22, unsupported.*nvidia_peermem"
    else:
        why = "too old"

        def refuse(_index: int) -> None:
            raise device_transfer.DriverError("the CUDA driver is too old")

        rig.patch.setattr(device_transfer, "settle_writes", refuse)
    lanes = Lanes(rig.patch)
    async with rig.open(changes={"RECORDING_UCP_MAP": "0"}) as owner:
        buffers = await owner.handles.call_one()
        for buffer, salt in zip(buffers, (0, 3), strict=True):
            lanes.data = bytearray(SIZE)
            if salt == 0:
                with pytest.warns(UserWarning, match=f"go through host memory: .*{why}"):
                    await move(buffer, READ, lanes.data)
            else:
                await move(buffer, READ, lanes.data)
            assert lanes.data == pattern(SIZE, salt)
        if is_refused_by == "ucx":
            lanes.data = bytearray(pattern(SIZE, 7))
            await move(buffers[0], WRITE, lanes.data)
            assert await owner.look.call_one() == pattern(SIZE, 7)
            tried = [call for call in rig.recording.calls("mem_map") if call["status"]]
            assert len(tried) == 1  # the reason holds for what follows
        assert len(lanes.made) == (3 if is_refused_by == "ucx" else 2)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"RECORDING_UCP_CUDA": "0"}, "At its owner: UCX 1.13.0-recording .* knows no memory of CUDA devices"),
        ({"RECORDING_UCP_MAP": "-3"}, "At its owner: .* status -3, input or output error"),
        ({"TRIMESH_RDMA": "tcp"}, "At its owner: ucx is not allowed here"),
    ],
)
async def test_owner_without_says_why(rig: Rig, changes: dict[str, str], why: str) -> None:
    """N5: the text travels with the handle, for who asks is on another host."""
    async with rig.open(changes=changes) as owner:
        buffer, host = await owner.handles.call_one()
        assert buffer.backend == "none"
        with pytest.raises(LinkLost, match="cannot be reached from here") as caught:
            await buffer.read_into(bytearray(SIZE))
        (note,) = caught.value.__notes__
        assert "on a CUDA device" in note
        assert re.search(why, note), note
        # Its user is told, too, if there are adapters at all.
        assert [
            why.partition(": ")[2] for why in await owner.told.call_one() if re.search("cannot reach buffers", why)
        ] == ([] if "TRIMESH_RDMA" in changes else [buffer.handle.granted.why_no_device])
        found = bytearray(SIZE)
        await host.read_into(found)
        assert found == pattern(SIZE, 3)


async def test_reader_without_says_why(rig: Rig) -> None:
    rig.patch.setenv("TRIMESH_RDMA", "tcp")
    async with rig.open(changes={"TRIMESH_RDMA": "ucx,tcp"}) as owner:
        buffer, _ = await owner.handles.call_one()
        with pytest.raises(LinkLost) as caught:
            await buffer.read_into(bytearray(SIZE))
        assert "Here: ucx is not allowed here" in caught.value.__notes__[0]


async def test_process_of_the_same_host_that_does_not_see_the_device_uses_the_adapter(rig: Rig) -> None:
    """And says both reasons where there is none."""
    async with this_host().spawn_procs({"gpus": 1}, env=rig.recording.environment) as procs:
        buffer, _ = await (await procs.spawn("owner", DeviceOwner)).handles.call_one()
        assert buffer.backend == "ibverbs"
        found = bytearray(SIZE)
        await buffer.read_into(found)
        assert found == pattern(SIZE)
    async with this_host().spawn_procs({"gpus": 1}, env=rig.recording.environment | {"TRIMESH_RDMA": "shm"}) as procs:
        buffer, _ = await (await procs.spawn("owner", DeviceOwner)).handles.call_one()
        with pytest.raises(LinkLost, match=r"CUDA device of .*torch .*; nor by an adapter: at its owner: ucx is not"):
            await buffer.read_into(found)


@pytest.mark.parametrize("failed", [False, True])
async def test_readers_wait_for_what_the_owner_had_queued(rig: Rig, failed: bool) -> None:
    """AD-1: nothing of the device is read before; and that it has failed is no wait for ever."""
    async with rig.open(is_ready=False) as owner:
        buffer, _ = await owner.handles.call_one()
        found = bytearray(SIZE)
        is_over = trio.Event()

        async def read() -> None:
            if failed:
                with pytest.raises(LinkLost, match="has failed"):
                    await buffer.read_into(found)
            else:
                await buffer.read_into(found)
            is_over.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            while len(rig.told("get", limits.CUDA_TICKET_BYTES)) < 3:  # noqa: ASYNC110 - UCX sets no event
                await trio.sleep(0.001)
            assert not is_over.is_set()
            assert not rig.told("get", SIZE)
            await owner.let_be.call_one(failed=failed)
        assert bytes(found) == (bytes(SIZE) if failed else pattern(SIZE))
