"""Weights of many ranks as one version, for readers with another layout."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import pytest
import trio
from tests.patience import HANG_SECONDS

import trimesh
from trimesh import Actor, Isolate, ProcDied, endpoint, jobs, limits
from trimesh.rdma import Published, VersionGone
from trimesh.testing import simulate

torch = pytest.importorskip("torch", reason="torch is an extra")

from trimesh.service.weights import (  # noqa: E402 - needs torch
    Publication,
    ShardOf,
    ShardPublisher,
    elastic_publication,
    open_relays,
    publication_of,
)
from trimesh.tensor.controller.shapes import shard_of  # noqa: E402 - needs torch
from trimesh.tensor.publications.state_snapshot import reshard_plans  # noqa: E402 - needs torch

pytestmark = pytest.mark.torch
both = pytest.mark.mesh_backend("sim", "proc")
TRAINERS = 4
LISTENING = {"TRIMESH_RDMA_ADDRESS": "127.0.0.1"}
"""Of processes whose memory those of other hosts read."""
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


@pytest.mark.daily("proc")
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
    with pytest.raises(ValueError, match="must be above the latest, "):
        await trainers.slice(gpus=0).publish.call_one(0, 8)


class Replica(Actor):
    """Has all of a weight, as every other one has."""

    def __init__(self) -> None:
        self.shards = ShardPublisher(retain=2)

    @endpoint
    async def publication(self) -> Published:
        return self.shards.handle

    @endpoint
    async def publish(self, version: int, *, is_first: bool | None = None) -> int:
        mine: Any = whole(version)
        if is_first is not None:
            mine = ShardOf(mine, size=mine.shape, start=[0, 0], is_first=is_first)
        return await self.shards.publish({"weight": mine}, version=version)


@simulate(seeds=1, per_host={"gpus": 2})
async def test_replicas_that_each_publish_the_whole_state_are_refused(mesh):
    """Y10: when they publish, not when somebody reads; the text says what the others write."""
    replicas = await mesh.spawn("replicas", Replica)
    first, second = replicas.slice(gpus=0), replicas.slice(gpus=1)
    weights = publication_of(await replicas.publication.call())
    await first.publish.call_one(1)
    with pytest.raises(ValueError, match=r"replicas\[gpus=1\], which is not the first: .*is_first=False"):
        await second.publish.call_one(1)
    await second.publish.call_one(1, is_first=False)
    async with weights.pin() as snapshot:
        assert ((await snapshot.read())["weight"] == whole(1)).all()
    await first.publish.call_one(2)
    await second.publish.call_one(2, is_first=True)  # which one rank cannot know
    async with weights.pin() as snapshot:
        with pytest.raises(trimesh.errors.ProtocolError, match=r"'weight' from the ranks \[0, 1\]: on all replicas"):
            await snapshot.read()


@simulate(seeds=1, per_host={"gpus": TRAINERS})
async def test_model_follows_a_publication_of_many_ranks(mesh):
    """Y10: as one of a single rank; each turn is a whole version."""
    trainers = await mesh.spawn("trainers", Trainer)
    weights = publication_of(await trainers.publication.call())
    model = {"weight": torch.zeros(ROWS, COLUMNS, dtype=torch.float64), "bias": torch.zeros(5)}
    await publish(trainers, 1)
    seen = []
    async for version in weights.follow(model):
        seen.append(version)
        assert (model["weight"] == whole(version)).all()
        assert (model["bias"] == version).all()
        if version == 2:
            break
        await publish(trainers, 2)
    assert seen == [1, 2]
    with pytest.raises(ValueError, match="shape it was published with"):
        await anext(weights.follow({"weight": torch.zeros(2, 2)}))


@simulate(seeds=1, per_host={"gpus": 1})
async def test_publish_that_waits_for_readers_is_logged(mesh, caplog):
    """Y10: with the versions that are pinned, and what gives it room."""
    replicas = await mesh.spawn("replicas", Replica)
    weights = publication_of(await replicas.publication.call())
    async with trio.open_nursery() as nursery, AsyncExitStack() as pins:
        for version in (1, 2, 3):
            await replicas.publish.call_one(version)
            await pins.enter_async_context(weights.pin())
        nursery.start_soon(replicas.publish.call_one, 4)
        await trio.sleep(3 * limits.PUBLISH_LOG_SECONDS)
    [record] = [one for one in caplog.records if "publish has waited" in one.message]
    assert "readers have the versions 1, 2, 3 pinned, and of 3 slots" in record.message
    assert "retain=" in record.message


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
    """Y10: what is pinned when a rank dies is read on; what was not whole by then is never there."""
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
    await publish(trainers.slice(gpus=slice(3)), 6, range(3))
    async with weights.pin(5) as snapshot:
        faults.kill(mesh.slice(gpus=3))
        with pytest.raises(ProcDied), trio.fail_after(HANG_SECONDS):
            await weights.wait_newer(5)
        for version in (5, 6):
            with pytest.raises(ProcDied):
                async with weights.pin(version):
                    pass
        assert ((await snapshot.read())["weight"] == whole(5)).all()
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
    with pytest.raises(ValueError, match="retain must be 1 to"):
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


@pytest.mark.mesh_backend("proc")
@simulate(per_host={"gpus": TRAINERS})
async def test_plans_are_computed_once_for_two_layouts(mesh):
    """Y10: versions of the same layout are read by the plan of the first, by whatever handle."""
    trainers = await mesh.spawn("trainers", Trainer)
    for version in range(1, 4):
        await publish(trainers, version)
        weights = publication_of(await trainers.publication.call())  # as a handle that came with a call is another one
        mine = torch.zeros([ROWS, 3])
        async with weights.pin() as snapshot:
            await snapshot.read_into({"weight": ShardOf(mine, size=(ROWS, COLUMNS), start=(0, 2))})
        assert (mine == whole(version)[:, 2:5]).all()
    assert reshard_plans().computed == 1


class ElasticTrainer(Actor):
    """Has as many rows as there are ranks to share them."""

    def __init__(self) -> None:
        self.shards = ShardPublisher()

    @endpoint
    async def publication(self) -> Published:
        return self.shards.handle

    @endpoint
    async def publish(self, ranks: list[int], rank: int, version: int) -> None:
        begin = ROWS * ranks.index(rank) // len(ranks)
        end = ROWS * (ranks.index(rank) + 1) // len(ranks)
        rows = whole(version)[begin:end]
        await self.shards.publish({"weight": ShardOf(rows, size=(ROWS, COLUMNS), start=(begin, 0))}, version=version)


class Puller(Actor):
    """Reads the whole weight of a version above one."""

    @endpoint(concurrency=2)
    async def pull(self, weights: Publication, above: int) -> tuple[int, bool]:
        await weights.wait_newer(above)
        async with weights.pin() as snapshot:
            found = await snapshot.read()
            return snapshot.version, bool((found["weight"] == whole(snapshot.version)).all())

    @endpoint
    async def near(self, weights: Publication) -> str:
        """Name where this process reads."""
        return repr(weights._near()._members.item(ranks=0))  # type: ignore[attr-defined]


@both
@simulate(seeds=5, per_host={"gpus": 2}, supervision=Isolate())
async def test_readers_follow_publishers_that_come_and_go(mesh, faults):
    """Y12: after a growth, a shrinking and a death, a reader gets the first version of the new layout, whole."""
    trainers = await mesh.spawn("trainers", ElasticTrainer)
    weights = elastic_publication(trainers)
    async with trimesh.this_proc().spawn("puller", Puller) as puller:
        version = 0

        async def step(ranks: list[int]) -> None:
            nonlocal version
            version += 1
            now = await trimesh.current_view(trainers)
            async with trio.open_nursery() as nursery:
                for rank in ranks:
                    nursery.start_soon(now.slice(gpus=rank).publish.call_one, ranks, rank, version)
            with trio.fail_after(HANG_SECONDS):
                assert await puller.pull.call_one(weights, version - 1) == (version, True)

        await step([0, 1])
        await mesh.resize(gpus=4)
        await step([0, 1, 2, 3])
        await mesh.resize(gpus=3)
        await step([0, 1, 2])
        faults.kill(mesh.slice(gpus=1))
        await step([0, 2])
        await step([0, 2])


@both
@simulate(seeds=5, per_host={"gpus": 3}, supervision=Isolate())
async def test_readers_of_a_host_read_from_its_relay_while_that_lives(mesh, faults):
    """Y13: then from the publisher."""
    trainer = await mesh.slice(gpus=2).spawn("trainer", ElasticTrainer)
    puller = await mesh.slice(gpus=1).spawn("puller", Puller)
    weights = publication_of([await trainer.publication.call_one()])
    async with open_relays(weights, mesh.slice(gpus=0)) as relayed:
        await trainer.publish.call_one([2], 2, 1)
        with trio.fail_after(HANG_SECONDS):
            assert await puller.pull.call_one(relayed, 0) == (1, True)
        assert "weight relays" in await puller.near.call_one(relayed)
        faults.kill(mesh.slice(gpus=0))
        await trainer.publish.call_one([2], 2, 2)
        with trio.fail_after(HANG_SECONDS):
            assert await puller.pull.call_one(relayed, 1) == (2, True)


@both
@simulate(seeds=5, per_host={"gpus": 3}, supervision=Isolate())
async def test_relay_keeps_what_it_has_when_the_publisher_dies(mesh, faults):
    """Y13: for readers that come then, too; who waits for more is told of the death."""
    trainer = await mesh.slice(gpus=2).spawn("trainer", ElasticTrainer)
    puller = await mesh.slice(gpus=1).spawn("puller", Puller)
    weights = publication_of([await trainer.publication.call_one()])
    async with open_relays(weights, mesh.slice(gpus=0)) as relayed:
        await trainer.publish.call_one([2], 2, 1)
        with trio.fail_after(HANG_SECONDS):
            assert await relayed.wait_newer(0) == 1
            faults.kill(mesh.slice(gpus=2))
            with pytest.raises(ProcDied):
                await relayed.wait_newer(1)
            assert await puller.pull.call_one(relayed, 0) == (1, True)


@pytest.mark.executed("agents of hosts are processes of their own")
async def test_relays_fetch_a_version_once_for_each_host() -> None:
    """Y13: over three hosts, in a chain: readers read on their own host, the first relay alone from the publisher."""
    with trio.fail_after(2 * HANG_SECONDS):
        async with (
            jobs.LocalJob(3, apart=True) as hosts,
            hosts.spawn_procs({"gpus": 2}, supervision=Isolate(), preload=("torch",), env=LISTENING) as procs,
        ):
            trainer = await procs.slice(hosts=0, gpus=1).spawn("trainer", ElasticTrainer)
            pullers = await procs.spawn("pullers", Puller)
            weights = publication_of([await trainer.publication.call_one()])
            async with open_relays(weights, procs.slice(gpus=0), fan_out=1) as relayed:
                for version in (1, 2):
                    await trainer.publish.call_one([1], 1, version)
                    found = await pullers.pull.call(relayed, version - 1)
                    assert set(found.values()) == {(version, True)}
                near = await pullers.near.call(relayed)
                assert len({repr(one) for one in near.values()}) == 3
                assert all(near.item(hosts=host, gpus=0) == near.item(hosts=host, gpus=1) for host in range(3))
                await procs.kill([{"hosts": 1, "gpus": 0}])
                await trainer.publish.call_one([1], 1, 3)
                for host in (0, 1, 2):  # without its relay, or the relay above it
                    assert await pullers.slice(hosts=host, gpus=1).pull.call_one(relayed, 2) == (3, True)
