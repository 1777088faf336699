"""Buffers of real processes: what simulation cannot show (API 7, N4)."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.conformance.publishing import Follower, Publisher
from tests.conformance.vault import LARGE, SMALL, Reader, Vault, pattern
from tests.lifetime.processes import stop

import trimesh
from trimesh import Actor, ConfigError, LinkLost, RDMABuffer, endpoint, this_host

pytestmark = [pytest.mark.real, pytest.mark.daily]
numpy = pytest.importorskip("numpy")


async def test_owner_that_does_not_run_is_read():
    """API 7: the owner's Python takes no part; its process is even stopped meanwhile."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        vault = await procs.spawn("vault", Vault, LARGE)
        handle = await vault.handle.call_one()
        stop(handle.owner.pid)
        try:
            found = bytearray(LARGE)
            await handle.read_into(found)
            assert found == pattern(LARGE)
            await handle[:8].write_from(b"12345678")
            assert await handle.fetch_add(1) == int.from_bytes(b"12345678", "little")
        finally:
            os.kill(handle.owner.pid, signal.SIGCONT)
        assert await vault.look.call_one(1, 8) == b"2345678"


async def test_new_reader_of_a_publisher_that_does_not_run():
    """RE-4: its first contact needs nothing of the publisher's Python either, whose process is even stopped."""
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        publisher = await procs.slice(gpus=0).spawn("publisher", Publisher)
        reader = await procs.slice(gpus=1).spawn("reader", Follower)
        handle = await publisher.handle.call_one()
        await publisher.publish.call_one(1, 3)
        pid = await publisher.pid.call_one()
        stop(pid)
        try:
            assert await reader.follow.call_one(handle, 3) == [3]
        finally:
            os.kill(pid, signal.SIGCONT)
        assert await publisher.publish.call_one(4, 8) == 8


async def test_environment_restricts_the_carriers(monkeypatch: pytest.MonkeyPatch):
    """API 7: and the error says why nothing else works."""
    monkeypatch.setenv("TRIMESH_RDMA", "shm")
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        foreign = await (await procs.spawn("foreign", Vault)).handle.call_one()
        assert foreign.backend == "none"
        with pytest.raises(LinkLost, match="cma") as caught:
            await foreign.read_into(bytearray(SMALL))
        assert trimesh.origin(caught.value).point == {"gpus": 0}
        mapped = await (await procs.spawn("mapped", Vault, allocated=True)).handle.call_one()
        assert mapped.backend == "shm"
        await mapped.read_into(bytearray(SMALL))
    monkeypatch.setenv("TRIMESH_RDMA", "cma")
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        mapped = await (await procs.spawn("mapped", Vault, allocated=True)).handle.call_one()
        assert mapped.backend == "cma"
        found = bytearray(SMALL)
        await mapped.read_into(found)
        assert found == pattern(SMALL)
    monkeypatch.setenv("TRIMESH_RDMA", "cma,tpc")
    with pytest.raises(ConfigError, match="'cma,tpc'"):
        this_host().spawn_procs({"gpus": 1})


async def test_other_host_is_reached_by_messages_only():
    """API 7, H9: `TRIMESH_HOST_ID` makes two hosts of one machine; without tcp no carrier joins them."""
    async with this_host().spawn_procs({"gpus": 2}, env=lambda point: {"TRIMESH_HOST_ID": str(point["gpus"])}) as procs:
        vaults = await procs.spawn("vaults", Vault)
        handles = (await vaults.handle.call()).values()
        reader = await procs.slice(gpus=0).spawn("reader", Reader)
        assert await reader.backend.call_one(handles[0]) == "local"
        assert await reader.backend.call_one(handles[1]) == "link"
        assert await reader.read.call_one(handles[1]) == pattern(SMALL)


async def test_arrays_of_numpy():
    """API 7: `allocate` with a shape and a type; arrays as sources and destinations."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        arrays = await procs.spawn("arrays", Arrays)
        handle = await arrays.handle.call_one()
        assert handle.backend == "shm"
        found = numpy.zeros((4, 5), numpy.float32)
        await handle.read_into(found)
        assert found.tolist() == numpy.arange(20).reshape(4, 5).tolist()
        await handle[-20:].write_from(numpy.full(5, 7, numpy.float32))
        assert await arrays.total.call_one() == sum(range(15)) + 35
        async with handle.map(writable=True) as view:
            numpy.frombuffer(view, numpy.float32)[:] = 1
        assert await arrays.total.call_one() == 20


class Arrays(Actor):
    def __init__(self) -> None:
        self.values: Any = trimesh.rdma.allocate((4, 5), numpy.float32)
        assert self.values.shape == (4, 5)
        self.values[:] = numpy.arange(20).reshape(4, 5)
        self.buffer = RDMABuffer(self.values)

    @endpoint
    async def handle(self) -> RDMABuffer:
        return self.buffer

    @endpoint
    async def total(self) -> float:
        return float(self.values.sum())


@pytest.mark.torch
async def test_tensors_of_torch():
    """API 7: `RDMABuffer(tensor)`, reads into tensors, tensors from `allocate`, a tensor over a view."""
    import torch

    async with this_host().spawn_procs({"gpus": 1}) as procs:
        tensors = await procs.spawn("tensors", Tensors)
        plain, allocated = await tensors.handles.call_one()
        assert (plain.backend, allocated.backend) == ("cma", "shm")
        for handle in (plain, allocated):
            found = torch.zeros(3, 4)
            await handle.read_into(found)
            assert torch.equal(found, torch.arange(12.0).reshape(3, 4))
            await handle.write_from(torch.ones(12))
        async with allocated.map(writable=True) as view:
            torch.frombuffer(view, dtype=torch.float32)[0] = 5
        assert await tensors.totals.call_one() == [12.0, 16.0]


class Tensors(Actor):
    def __init__(self) -> None:
        import torch

        self.tensors = [torch.zeros(3, 4), trimesh.rdma.allocate((3, 4), torch.float32)]
        for tensor in self.tensors:
            tensor.copy_(torch.arange(12.0).reshape(3, 4))
        self.buffers = [RDMABuffer(tensor) for tensor in self.tensors]

    @endpoint
    async def handles(self) -> list[RDMABuffer]:
        return self.buffers

    @endpoint
    async def totals(self) -> list[float]:
        return [float(tensor.sum()) for tensor in self.tensors]


# ---- memory that outlives what it came from --------------------------------------------------------------------------


async def test_view_outlives_its_mesh():
    """N4: what was made of a view keeps the memory, whoever is gone; then it goes, too."""
    gc.collect()  # what errors of tests before still hold would go at any time
    before = maps()
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        vault = await procs.spawn("vault", Vault, allocated=True)
        handle = await vault.handle.call_one()
        async with handle.map() as view:
            part = view[10:20]
        assert part == pattern(20)[10:]
        allocated = trimesh.rdma.allocate(SMALL)
        allocated[:] = pattern(SMALL)
        buffer = RDMABuffer(allocated)
    assert part == pattern(20)[10:]
    assert allocated == pattern(SMALL)
    await buffer.aclose()
    with pytest.raises((trio.ClosedResourceError, RuntimeError)):
        await buffer.read_into(bytearray(SMALL))
    with pytest.raises(RuntimeError):
        await handle.read_into(bytearray(SMALL))
    assert maps() - before == 2
    del part, allocated
    assert maps() == before


def maps() -> int:
    """Return how many pieces of shared memory this process has mapped."""
    return Path("/proc/self/maps").read_text().count("memfd:trimesh")


async def test_allocated_memory_goes_back():
    """API 7: when its buffer is closed and nothing looks at it; then it is used again, and a limit is never met."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        reader = await procs.spawn("reader", Reader)
        for number in range(2 * trimesh.limits.BLOCKS_MAX):
            memory = trimesh.rdma.allocate(5000)
            memory[:4] = number.to_bytes(4, "little")
            async with RDMABuffer(memory) as buffer:
                if number % 64 == 0:
                    assert (await reader.read.call_one(buffer[:4])) == number.to_bytes(4, "little")
            del memory
            await trio.lowlevel.checkpoint()
        kept = []
        with pytest.raises(trimesh.LimitExceeded) as caught:
            while True:
                kept.append(trimesh.rdma.allocate(64))
        assert caught.value.limit == "BLOCKS_MAX"
        with pytest.raises(trimesh.LimitExceeded) as caught:
            trimesh.rdma.allocate(trimesh.limits.BLOCK_BYTES_MAX + 1)
        assert caught.value.limit == "BLOCK_BYTES_MAX"


async def test_threads_do_not_touch_buffers():
    """API 7: the text says how they can."""
    async with this_host().spawn_procs({"gpus": 1}):

        def make() -> RDMABuffer:
            with pytest.raises(RuntimeError, match="from_thread"):
                RDMABuffer(bytearray(8))
            return trio.from_thread.run_sync(RDMABuffer, bytearray(b"abcdefgh"))

        buffer = await trio.to_thread.run_sync(make)
        found = bytearray(8)
        await buffer.read_into(found)
        assert found == b"abcdefgh"
        await buffer.aclose()


def test_listing_of_bulk_data(tmp_path: Any):
    """API 7, as a program of its own: a trainer's weights, read by the controller, without a word to the trainer."""
    program = tmp_path / "bulk.py"
    program.write_text(
        textwrap.dedent("""\
            import trio, trimesh
            from trimesh import Actor, endpoint, this_host

            class Trainer(Actor):
                def __init__(self):
                    self.weights = bytearray(b"weights!" * 1000)
                    self.buffer = trimesh.RDMABuffer(self.weights)

                @endpoint
                async def handle(self) -> trimesh.RDMABuffer:
                    return self.buffer

            async def main():
                async with this_host().spawn_procs({"gpus": 2}) as procs:
                    trainers = await procs.spawn("trainers", Trainer)
                    a, b = (await trainers.handle.call()).values()
                    x, y = bytearray(8000), bytearray(8000)
                    async with trimesh.rdma.batch() as batch:
                        batch.read(a, into=x)
                        batch.write(b, source=y)
                    assert x == b"weights!" * 1000
                    await b.read_into(x)
                    assert x == y

            trio.run(main)
            """)
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
