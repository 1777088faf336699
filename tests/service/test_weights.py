"""Weights of many ranks as one version, for readers with another layout."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from tests.patience import HANG_SECONDS

from trimesh import Actor, Isolate, ProcDied, endpoint
from trimesh.rdma import Published, VersionGone
from trimesh.testing import simulate

torch = pytest.importorskip("torch", reason="torch is an extra")

from trimesh.service.weights import Publication, ShardOf, ShardPublisher, publication_of  # noqa: E402 - needs torch
from trimesh.tensor.controller.shard_of import shard_of  # noqa: E402 - needs torch

pytestmark = pytest.mark.torch
both = pytest.mark.mesh_backend("sim", "proc")
TRAINERS = 4
ROWS, COLUMNS = 10, 7
"""Rows are cut in 3, 3, 3 and 1."""


def whole(version: int) -> Any:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS) + 1_000 * version


class Trainer(Actor):
    """Has some rows of a weight, a whole bias that all have, and a buffer that the first one has."""

    def __init__(self, retain: int = 1) -> None:
        self.shards = ShardPublisher(retain=retain)

    @endpoint
    async def publication(self) -> Published:
        return self.shards.handle

    @endpoint
    async def publish(self, rank: int, version: int) -> int:
        begin = min(3 * rank, ROWS)
        return await self.shards.publish(
            {
                "weight": ShardOf(whole(version)[begin : begin + 3], size=(ROWS, COLUMNS), start=(begin, 0)),
                "bias": ShardOf(torch.full([5], float(version)), size=[5], start=[0], is_first=rank == 1),
            },
            version=version,
        )


class Reader(Actor):
    """Has some columns, in another type."""

    @endpoint
    async def read(self, weights: Publication, begin: int, end: int) -> tuple[int, Any, Any]:
        mine = torch.zeros([ROWS, end - begin], dtype=torch.float64)
        bias = torch.zeros([5], dtype=torch.bfloat16)
        async with weights.pin() as snapshot:
            await snapshot.read_into({"weight": ShardOf(mine, size=(ROWS, COLUMNS), start=(0, begin)), "bias": bias})
            return snapshot.version, mine, bias

    @endpoint
    async def read_twice(self, weights: Publication) -> tuple[int, bool]:
        async with weights.pin() as snapshot:
            first = await snapshot.read()
            await trio.sleep(0.2)
            second = await snapshot.read()
            version = snapshot.version
        is_one = all((first[name] == second[name]).all() for name in first)
        return version, bool(is_one and (first["weight"] == whole(version)).all() and (first["bias"] == version).all())


async def publish(trainers: Any, version: int, ranks: range = range(TRAINERS)) -> None:
    async with trio.open_nursery() as nursery:
        for rank in ranks:
            nursery.start_soon(trainers.slice(gpus=rank).publish.call_one, rank, version)


@both
@simulate(seeds=5, per_host={"gpus": TRAINERS})
async def test_readers_of_another_layout_get_their_parts_of_one_version(mesh):
    """Y10: rows there, columns here, cast on the way; a version is there when all ranks have published it."""
    trainers = await mesh.spawn("trainers", Trainer)
    readers = await mesh.spawn("readers", Reader)
    weights = publication_of(await trainers.publication.call())
    await publish(trainers, 7)
    for begin, end in ((0, COLUMNS), (0, 3), (3, 7), (6, 7)):
        version, mine, bias = await readers.slice(gpus=1).read.call_one(weights, begin, end)
        assert version == 7
        assert (mine.dtype, bias.dtype) == (torch.float64, torch.bfloat16)
        assert (mine == whole(7)[:, begin:end]).all()
        assert (bias == 7).all()
    await publish(trainers, 9, range(1, TRAINERS))
    assert await weights.wait_newer(0) == 7
    await publish(trainers, 9, range(1))
    with trio.fail_after(HANG_SECONDS):
        assert await weights.wait_newer(7) == 9
    with pytest.raises(ValueError, match="versions go up"):
        await trainers.slice(gpus=0).publish.call_one(0, 8)


@both
@simulate(seeds=5, per_host={"gpus": TRAINERS})
async def test_no_reader_gets_parts_of_two_versions(mesh):
    """Y10."""
    trainers = await mesh.spawn("trainers", Trainer)
    readers = await mesh.spawn("readers", Reader)
    weights = publication_of((await trainers.publication.call()).values())
    await publish(trainers, 1)
    seen: list[tuple[int, bool]] = []
    async with trio.open_nursery() as nursery:

        async def follow(rank: int) -> None:
            while not seen or seen[-1][0] < 6:
                seen.append(await readers.slice(gpus=rank).read_twice.call_one(weights))

        for rank in range(2):
            nursery.start_soon(follow, rank)
        for version in range(2, 7):
            await publish(trainers, version)
    assert all(is_one for _, is_one in seen)
    assert {version for version, _ in seen} >= {6}


@both
@simulate(seeds=5, per_host={"gpus": TRAINERS}, supervision=Isolate())
async def test_versions_are_retained_and_ranks_that_come_back_go_on(mesh, faults):
    """Y10."""
    trainers = await mesh.spawn("trainers", Trainer, 3)
    weights = publication_of(await trainers.publication.call())
    for version in range(1, 6):
        await publish(trainers, version)
    for version in (3, 4, 5):
        async with weights.pin(version) as snapshot:
            assert ((await snapshot.read())["weight"] == whole(version)).all()
    with pytest.raises(VersionGone):
        async with weights.pin(1):
            pass
    faults.kill(mesh.slice(gpus=3))
    with pytest.raises(ProcDied), trio.fail_after(HANG_SECONDS):
        await weights.wait_newer(5)
    others = await mesh.slice(gpus=slice(3)).spawn("others", Trainer)
    last = await mesh.slice(gpus=2).spawn("last", Trainer)
    again = publication_of([*(await others.publication.call()).values(), await last.publication.call_one()])
    await publish(others, 6, range(3))
    await last.publish.call_one(3, 6)
    async with again.pin() as snapshot:
        assert snapshot.version == 6
        assert ((await snapshot.read())["weight"] == whole(6)).all()


def test_what_is_no_part_is_refused() -> None:
    """Y10."""
    with pytest.raises(ValueError, match="must lie within the whole"):
        ShardOf(torch.zeros(3, 2), size=(4, 2), start=(2, 0))
    with pytest.raises(TypeError, match="a tensor of this process"):
        ShardOf([1, 2], size=[2], start=[0])
    with pytest.raises(ValueError, match="versions are retained"):
        ShardPublisher(retain=0)


@pytest.mark.parametrize("rank", range(3))
def test_dtensors_say_which_part_a_rank_has(rank: int) -> None:
    """Y10: as torch cuts it; of replicas the first one is published."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=rank, world_size=3, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (3,))
        cut = distribute_tensor(whole(1), mesh, [Shard(0)], src_data_rank=None)
        found = shard_of(cut)
        begin = 4 * rank
        assert (found.size, found.box.start, found.is_first) == ((ROWS, COLUMNS), (begin, 0), True)
        assert found.tensor.equal(whole(1)[begin : begin + 4])
        everywhere = shard_of(distribute_tensor(whole(1), mesh, [Replicate()], src_data_rank=None))
        assert (everywhere.box.size, everywhere.is_first) == ((ROWS, COLUMNS), rank == 0)
        partial = torch.distributed.tensor.DTensor.from_local(whole(1), mesh, [Partial()])
        with pytest.raises(TypeError, match="redistribute it first"):
            shard_of(partial)
    finally:
        torch.distributed.destroy_process_group()
