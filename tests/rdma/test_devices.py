"""One-sided reads, writes and publications of tensors on each kind of device; test_cuda.py has the rules of CUDA."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from tests.devices import device_parameters
from tests.patience import HANG_SECONDS

import trimesh
from trimesh import Actor, RDMABuffer, endpoint, this_host
from trimesh.rdma import Published

torch = pytest.importorskip("torch", reason="torch is an extra")

pytestmark = [pytest.mark.real, pytest.mark.torch]

DTYPES = ("float32", "bfloat16", "int64", "uint8")
ROWS, COLUMNS = 1031, 77
"""Of a matrix whose size in bytes is a multiple of no page or piece."""
LARGE = 64 << 20
VERSIONS = 5


def needs_two_devices() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two CUDA devices, torch finds {torch.cuda.device_count()}")


def matrix(dtype: str, device: str, first: int = 0) -> Any:
    """Return a matrix of small numbers that every dtype holds exactly; its work has ended."""
    made = ((torch.arange(ROWS * COLUMNS) + first) % 101).view(ROWS, COLUMNS).to(getattr(torch, dtype)).to(device)
    finish(device)
    return made


def finish(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


class Owner(Actor):
    """Has matrices on a device."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.tensors = {dtype: matrix(dtype, device) for dtype in DTYPES}
        self.buffers = {dtype: RDMABuffer(tensor) for dtype, tensor in self.tensors.items()}

    @endpoint
    async def handles(self) -> dict[str, RDMABuffer]:
        return self.buffers

    @endpoint
    async def holds(self, first: int) -> bool:
        """Return whether every matrix is the one that starts at `first`."""
        return all(tensor.cpu().equal(matrix(dtype, "cpu", first)) for dtype, tensor in self.tensors.items())

    @endpoint
    async def rows(self, begin: int, end: int) -> RDMABuffer:
        """Return a buffer over some rows of the float32 matrix: its memory begins inside an allocation."""
        return RDMABuffer(self.tensors["float32"][begin:end])

    @endpoint
    async def large(self) -> RDMABuffer:
        self.kept = torch.full((LARGE,), 5, dtype=torch.uint8, device=self.device)
        finish(self.device)
        return RDMABuffer(self.kept)


class Peer(Actor):
    """Reads and writes matrices of an owner one-sided, by tensors on a device."""

    @endpoint
    async def reads(self, handles: dict[str, RDMABuffer], device: str, first: int) -> bool:
        """Read all matrices in one batch; return whether they start at `first`."""
        found = {dtype: torch.zeros_like(matrix(dtype, device)) for dtype in handles}
        async with trimesh.rdma.batch() as batch:
            for dtype, handle in handles.items():
                batch.read(handle, into=found[dtype])
        return all(tensor.cpu().equal(matrix(dtype, "cpu", first)) for dtype, tensor in found.items())

    @endpoint
    async def writes(self, handles: dict[str, RDMABuffer], device: str, first: int) -> None:
        async with trimesh.rdma.batch() as batch:
            for dtype, handle in handles.items():
                batch.write(handle, source=matrix(dtype, device, first))

    @endpoint
    async def reads_again(self, handle: RDMABuffer, device: str, value: int) -> list[bool]:
        """Read the same memory several times into tensors that were in use just before."""
        correct = []
        for turn in range(4):
            target = torch.full((handle.nbytes,), turn, dtype=torch.uint8, device=device)
            await handle.read_into(target)
            correct.append(bool((target == value).all()))
        return correct

    @endpoint
    async def reads_rows(self, handle: RDMABuffer, device: str, first: int, begin: int, end: int) -> bool:
        """Read some rows of the float32 matrix; return whether they are of the one that starts at `first`."""
        found = torch.zeros((end - begin, COLUMNS), dtype=torch.float32, device=device)
        await handle.read_into(found)
        return found.cpu().equal(matrix("float32", "cpu", first)[begin:end])


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    ("owned", "local"),
    device_parameters(("cpu", "cpu"), ("cuda:0", "cuda:0"), ("cuda:0", "cpu"), ("cpu", "cuda:0"), ("cuda:0", "cuda:1")),
)
async def test_matrices_are_read_and_written(processes: int, owned: str, local: str) -> None:
    """API 7: in one process, and from another one."""
    if "cuda:1" in (owned, local):
        needs_two_devices()
    async with this_host().spawn_procs({"gpus": processes}, preload=("torch",)) as procs:
        owner = await procs.slice(gpus=0).spawn("owner", Owner, owned)
        peer = await procs.slice(gpus=processes - 1).spawn("peer", Peer)
        handles = await owner.handles.call_one()
        assert await peer.reads.call_one(handles, local, 0)
        await peer.writes.call_one(handles, local, 3)
        assert await owner.holds.call_one(3)
        assert await peer.reads.call_one(handles, local, 3)
        assert await peer.reads_rows.call_one(await owner.rows.call_one(500, 503), local, 3, 500, 503)
        assert await peer.reads_again.call_one(await owner.large.call_one(), local, 5) == [True] * 4


def network(device: str, value: float) -> Any:
    net = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.BatchNorm1d(200), torch.nn.Linear(200, 7)).to(device)
    fill(net, value)
    return net


def fill(net: Any, value: float) -> None:
    with torch.no_grad():
        for tensor in net.state_dict().values():
            tensor.fill_(value)


class Trainer(Actor):
    """Publishes versions of a module on a device; all numbers of one are its own."""

    def __init__(self, device: str) -> None:
        self.net = network(device, 0.0)
        self.published = Published()

    @endpoint
    async def publication(self) -> Published:
        return self.published

    @endpoint
    async def train(self, versions: int) -> int:
        number = 0
        for _ in range(versions):
            fill(self.net, number + 1.0)
            number = await self.published.publish(self.net.state_dict())
        return number


class Generator(Actor):
    """Follows such a module by one on its device."""

    @endpoint
    async def follow(self, weights: Published, device: str, last: int) -> list[tuple[int, set[float]]]:
        """Return each version that was taken over, and the numbers in it."""
        net = network(device, -1.0)
        seen = []
        async for version in weights.follow(net):
            seen.append((version, {value for one in net.state_dict().values() for value in one.unique().tolist()}))
            if version >= last:
                break
        return seen


@pytest.mark.parametrize(
    ("published", "followed"),
    device_parameters(("cpu", "cpu"), ("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")),
)
async def test_module_follows_versions_without_mixing_them(published: str, followed: str) -> None:
    async with this_host().spawn_procs({"gpus": 2}, preload=("torch",)) as procs, trio.open_nursery() as nursery:
        trainer = await procs.slice(gpus=0).spawn("trainer", Trainer, published)
        generator = await procs.slice(gpus=1).spawn("generator", Generator)
        weights = await trainer.publication.call_one()
        nursery.start_soon(trainer.train.call_one, VERSIONS)
        with trio.fail_after(HANG_SECONDS):
            seen = await generator.follow.call_one(weights, followed, VERSIONS)
    assert seen[-1][0] == VERSIONS
    assert all(numbers == {float(version)} for version, numbers in seen)
