"""Weights of many ranks as one version, for readers with another layout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from typing import Any

import pytest
import trio
from tests.conformance.meshes import attempt
from tests.conformance.publishing import Publisher
from tests.patience import HANG_SECONDS

import trimesh
from trimesh import (
    Actor,
    Backoff,
    Isolate,
    LinkLost,
    MeshErrorGroup,
    MeshStopped,
    ProcDied,
    Restart,
    endpoint,
    limits,
)
from trimesh._runtime.life.current import current_proc
from trimesh.errors import ProtocolError
from trimesh.rdma import Published, VersionGone
from trimesh.rdma.publications.board import TensorEntry
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


@contextmanager
def device_mesh(rank: int, size: int) -> Iterator[Any]:
    """Give a device mesh of ranks that are not there, but for one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (size,))
    finally:
        torch.distributed.destroy_process_group()


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

    @endpoint
    async def publish_dtensor(self, version: int, rank: int, size: int) -> int:
        """Publish the part that a rank of a group has, of which the others are not there."""
        from torch.distributed.tensor import Shard, distribute_tensor

        with device_mesh(rank, size) as mesh:
            cut = distribute_tensor(whole(version), mesh, [Shard(0)], src_data_rank=None)
            return await self.shards.publish({"weight": cut}, version=version)


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
        with pytest.raises(ProtocolError, match=r"'weight' from the ranks \[0, 1\]: on all replicas"):
            await snapshot.read()
    for rank, replica in enumerate((first, second)):
        await replica.publish_dtensor.call_one(3, rank, 2)
    async with weights.pin() as snapshot:
        assert ((await snapshot.read())["weight"] == whole(3)).all()


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
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    with device_mesh(rank, 3) as mesh:
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


class PlanReader(Actor):
    """Counts plans."""

    @endpoint
    async def read(self, weights: Publication, begin: int, version: int) -> int:
        """Read three columns; return the number of plans that were computed here by then."""
        mine = torch.zeros([ROWS, 3])
        async with weights.pin() as snapshot:
            await snapshot.read_into({"weight": ShardOf(mine, size=(ROWS, COLUMNS), start=(0, begin))})
        assert (mine == whole(version)[:, begin : begin + 3]).all()
        return reshard_plans().computed


@simulate(seeds=1, per_host={"gpus": TRAINERS})
async def test_plans_are_computed_once_for_two_layouts(mesh, monkeypatch):
    """Y10: versions of the same layout are read by the plan of the first, by whatever handle; the newest are kept."""
    monkeypatch.setattr("trimesh.limits.RESHARD_PLANS", 2)
    trainers = await mesh.spawn("trainers", Trainer)
    reader = await mesh.slice(gpus=0).spawn("reader", PlanReader)
    for version, begin, computed in ((1, 2, 1), (2, 2, 1), (3, 3, 2), (4, 2, 2), (5, 4, 3), (6, 2, 3), (7, 3, 4)):
        await publish(trainers, version)
        weights = publication_of(await trainers.publication.call())  # as a handle that came with a call is another one
        assert await reader.read.call_one(weights, begin, version) == computed


GRID = (6, 40, 50)


def grid(version: int) -> Any:
    return torch.arange(6 * 40 * 50, dtype=torch.float32).view(GRID) + 1_000 * version


class Rank(Actor):
    """Has any parts of any tensors."""

    def __init__(self) -> None:
        self.shards = ShardPublisher()

    @endpoint
    async def publication(self) -> Published:
        return self.shards.handle

    @endpoint(group="handles")
    async def first_publication(self) -> Published:
        """Return the handle on the first rank; the others do not answer."""
        if trimesh.context().point.rank:
            await trio.sleep_forever()
        return self.shards.handle

    @endpoint(group="handles")
    async def broken(self) -> Published:
        raise trio.ClosedResourceError("broken")

    @endpoint
    async def publish(self, version: int, **tensors: Any) -> int:
        return await self.shards.publish(tensors, version=version)

    forget_readers = Publisher.forget_readers

    @endpoint
    async def finish(self) -> None:
        self.shards.finish()

    @endpoint
    async def close(self) -> None:
        await self.shards.aclose()


async def publish_grid(ranks: Any, version: int) -> None:
    """Publish a tensor in a part for each of four ranks, a number, and some elements that three of them have."""
    for index, (plane, row) in enumerate(((0, 0), (0, 25), (3, 0), (3, 25))):
        rank = ranks.slice(gpus=index)
        part = grid(version)[plane : plane + 3, row : 25 if row == 0 else 40]
        few = torch.tensor([1.5, 2.5, 3.5], dtype=torch.float64)[index : index + 1]
        assert version == await rank.publish.call_one(
            version,
            grid=ShardOf(part, size=GRID, start=(plane, row, 0)),
            number=ShardOf(torch.tensor(float(version)), size=(), start=(), is_first=index == 2),
            few=ShardOf(few, size=(3,), start=(min(index, 3),)),
        )


PLACES: list[tuple[slice, ...]] = [
    (slice(None), slice(None), slice(None)),
    (slice(1, 5), slice(20, 30), slice(10, 40)),
    (slice(0, 2), slice(0, 25), slice(None)),
    (slice(4, 5), slice(30, 31), slice(None)),
    (slice(2, 4), slice(24, 26), slice(49, 50)),
]


class GridReader(Actor):
    @endpoint
    async def read(self, weights: Publication, version: int, *, is_near: bool) -> None:
        """Read parts of the grid, and all, and check them: in one piece, with gaps, turned, in another type."""
        if not is_near:  # a simulation has the memory of all its hosts on one
            current_proc().bulk._host = 0
        async with weights.pin(version) as snapshot:
            for place in PLACES:
                wanted = grid(version)[place]
                start = [one.start or 0 for one in place]
                for dtype in (torch.float32, torch.float64):
                    room = torch.full((7, 45, 60), -1.0, dtype=dtype)
                    for mine in (
                        torch.full_like(wanted, -1.0, dtype=dtype),
                        room[: wanted.shape[0], : wanted.shape[1], : wanted.shape[2]],
                        torch.full(wanted.shape[::-1], -1.0, dtype=dtype).permute(2, 1, 0),
                    ):
                        await snapshot.read_into({"grid": ShardOf(mine, size=GRID, start=start)})
                        assert (mine == wanted).all()
                    assert (room != -1).sum() == wanted.numel(), "nothing is written beside the part"
            for dtype in (torch.float32, torch.float64):
                number = torch.zeros((), dtype=dtype)
                await snapshot.read_into({"number": number})
                assert number == version
            found = await snapshot.read()
            assert (found["grid"] == grid(version)).all()
            assert found["few"].tolist() == [1.5, 2.5, 3.5]
            assert {name: (tuple(one.shape), one.dtype) for name, one in found.items()} == snapshot.kinds()


@pytest.mark.parametrize(("chunk", "is_near"), [(100, True), (limits.RESHARD_CHUNK_BYTES, True), (100, False)])
@simulate(seeds=1, per_host={"gpus": TRAINERS})
async def test_any_part_is_read_from_any_layout(mesh, monkeypatch, faults, fault_log, chunk, is_near):
    """Y10: in pieces of any size, of ranks of this host and of others."""
    monkeypatch.setattr("trimesh.limits.RESHARD_CHUNK_BYTES", chunk)
    ranks = await mesh.spawn("ranks", Rank)
    weights = publication_of(await ranks.publication.call())
    await publish_grid(ranks, 1)
    reader = await mesh.slice(gpus=1).spawn("reader", GridReader)
    faults.transfer(mesh.slice(gpus=1), times=10**6).delays(1e-6)
    await reader.read.call_one(weights, 1, is_near=is_near)
    assert (len(fault_log) < 220) is is_near, "parts with gaps are mapped on this host, and read from others"


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
                assert await weights.wait_newer(version - 1) == version
                async with weights.pin() as snapshot:
                    assert (snapshot.version, snapshot.is_whole) == (version, True)

        await step([0, 1])
        await mesh.resize(gpus=4)
        await step([0, 1, 2, 3])
        await mesh.resize(gpus=3)
        await step([0, 1, 2])
        faults.kill(mesh.slice(gpus=1))
        await step([0, 2])
        await step([0, 2])


@simulate(seeds=1, per_host={"gpus": 3}, supervision=Isolate())
async def test_reader_that_waits_for_elastic_publishers_learns_of_changes(mesh, faults):
    """Y12: of a death and of a growth; of the end of all; an error that no change explains is raised."""
    trainers = await mesh.slice(gpus=slice(2)).spawn("trainers", Rank)
    weights = elastic_publication(trainers)
    one, other = trainers.slice(gpus=0), trainers.slice(gpus=1)

    def rows(version: int, begin: int, end: int) -> ShardOf:
        return ShardOf(whole(version)[begin:end], size=(ROWS, COLUMNS), start=(begin, 0))

    async with trimesh.this_proc().spawn("puller", Puller) as puller, trio.open_nursery() as nursery:
        await one.publish.call_one(1, weight=rows(1, 0, 4))
        await other.publish.call_one(1, weight=rows(1, 4, 10))
        assert await puller.pull.call_one(weights, 0) == (1, True)
        pulling = attempt(nursery, puller.pull.call_one, weights, 1)
        await one.publish.call_one(2, weight=rows(2, 0, 4))
        await other.publish.call_one(2, weight=rows(2, 5, 10))
        async with weights.pin(2) as snapshot:
            assert not snapshot.is_whole
            with pytest.raises(ProtocolError, match="must cover 'weight', got 63 of 70"):
                await snapshot.read()
        await trio.sleep(1)
        assert not pulling.over.is_set()
        await one.publish.call_one(3, weight=rows(3, 0, 5))
        await other.publish.call_one(3, weight=rows(3, 5, 10))
        assert await pulling.result() == (3, True)
        pulling = attempt(nursery, puller.pull.call_one, weights, 3)
        asking = attempt(nursery, puller.pull.call_one, elastic_publication(trainers, "first_publication"), 3)
        await trio.sleep(1)
        faults.kill(mesh.slice(gpus=1))
        await one.publish.call_one(4, weight=whole(4))
        assert (await pulling.result(), await asking.result()) == ((4, True), (4, True))
        await one.close.call_one()
        with trio.fail_after(HANG_SECONDS), pytest.raises(trio.ClosedResourceError):
            await puller.pull.call_one(weights, 4)
        with trio.fail_after(HANG_SECONDS), pytest.raises(trio.ClosedResourceError):
            await puller.pull.call_one(weights, 0)
        with pytest.raises(MeshErrorGroup) as caught:
            await puller.pull.call_one(elastic_publication(trainers, "broken"), 0)
        assert [type(leaf) for leaf in trimesh.leaves(caught.value)] == [trio.ClosedResourceError]
        faults.kill(mesh.slice(gpus=0))
        await trio.sleep(1)
        with pytest.raises(MeshStopped, match="none of trainers is left"):
            await puller.pull.call_one(weights, 0)


@simulate(seeds=1, per_host={"gpus": 2}, supervision=Restart())
async def test_reader_that_waits_for_an_elastic_publisher_takes_its_successor(mesh, faults):
    """Y12: a restart changes no coordinates, and the publication is another one."""
    trainers = await mesh.slice(gpus=slice(1)).spawn("trainers", Rank)
    puller = await mesh.slice(gpus=1).spawn("puller", Puller)
    weights = elastic_publication(trainers)
    await trainers.publish.call_one(1, weight=whole(1))
    async with trio.open_nursery() as nursery:
        pulling = attempt(nursery, puller.pull.call_one, weights, 1)
        await trio.sleep(1)
        async with faults.partition({"gpus": 0}, {"gpus": 1}):  # the reader learns of the death when it is over
            faults.kill(mesh.slice(gpus=0))
            await trio.sleep(1)
            await trainers.publish.call_one(2, weight=whole(2))
        with trio.fail_after(HANG_SECONDS):
            assert await pulling.result() == (2, True)


@simulate(seeds=1, per_host={"gpus": 2}, supervision=Restart(backoff=Backoff(initial=3, jitter=0)))
async def test_reader_waits_while_the_only_elastic_publisher_is_restarted(mesh, faults):
    """Y12: nobody is left only when nobody comes back."""
    trainers = await mesh.slice(gpus=slice(1)).spawn("trainers", Rank)
    puller = await mesh.slice(gpus=1).spawn("puller", Puller)
    weights = elastic_publication(trainers)
    await trainers.publish.call_one(1, weight=whole(1))
    assert await puller.pull.call_one(weights, 0) == (1, True)
    faults.kill(mesh.slice(gpus=0))
    await trio.sleep(1)
    async with trio.open_nursery() as nursery:
        pulling = attempt(nursery, puller.pull.call_one, weights, 0)
        await trio.sleep(1)
        assert not pulling.over.is_set()
        await trainers.publish.call_one(2, weight=whole(2))
        with trio.fail_after(HANG_SECONDS):
            assert await pulling.result() == (2, True)


@simulate(seeds=1, per_host={"gpus": 3})
async def test_ranks_that_are_versions_apart_are_read_when_they_meet(mesh, faults, fault_log):
    """Y10: one has overwritten what the other one has; a reader waits meanwhile, and learns that one of them ends."""
    ranks = await mesh.slice(gpus=slice(2)).spawn("ranks", Rank)
    one, other = ranks.slice(gpus=0), ranks.slice(gpus=1)
    puller = await mesh.slice(gpus=2).spawn("puller", Puller)
    weights = publication_of(await ranks.publication.call())

    async def publish(rank: Any, version: int) -> None:
        mine = ShardOf(whole(version), size=(ROWS, COLUMNS), start=(0, 0), is_first=rank is one)
        await rank.publish.call_one(version, weight=mine)

    async with trio.open_nursery() as nursery:
        await publish(other, 1)
        for version in (1, 2, 3):
            await publish(one, version)
        faults.transfer(mesh.slice(gpus=2), times=10**6).delays(0.01)
        pulling = attempt(nursery, puller.pull.call_one, weights, 0)
        await trio.sleep(10)
        assert not pulling.over.is_set()
        assert len(fault_log) < 100, "it waits"
        await publish(other, 2)
        assert await pulling.result() == (2, True)
    await one.close.call_one()
    with trio.fail_after(HANG_SECONDS), pytest.raises(trio.ClosedResourceError):
        await puller.pull.call_one(weights, 2)


@simulate(seeds=1, per_host={"gpus": 2})
async def test_read_of_a_version_whose_pin_was_lost_fails(mesh):
    """Y10, N4: before the block is left."""
    ranks = await mesh.spawn("ranks", Rank)
    weights = publication_of(await ranks.publication.call())
    for rank in range(2):
        part = ShardOf(torch.ones(2), size=[4], start=[2 * rank])
        await ranks.slice(gpus=rank).publish.call_one(1, weight=part)
    with pytest.raises(LinkLost):
        async with weights.pin() as snapshot:
            await snapshot.read()
            await ranks.slice(gpus=1).forget_readers.call_one()
            with pytest.raises(LinkLost, match="version 1 is not pinned any more"):
                await snapshot.read()


@simulate(seeds=1, per_host={"gpus": 2})
async def test_what_does_not_fit_is_refused_before_a_byte_is_copied(mesh):
    """Y10: targets of a reader; parts of ranks that contradict each other; names that cannot be published."""
    ranks = await mesh.spawn("ranks", Rank)
    one, other = ranks.slice(gpus=0), ranks.slice(gpus=1)
    weights = publication_of(await ranks.publication.call())
    alone = publication_of([await one.publication.call_one()])

    def vector(first: bool, size: int = 4, dtype: Any = torch.float32) -> ShardOf:
        return ShardOf(torch.arange(size).to(dtype), size=[size], start=[0], is_first=first)

    await one.publish.call_one(1, a=vector(True), b=vector(True), c=vector(True), d=vector(True))
    async with alone.pin() as snapshot:
        assert snapshot.is_whole
        assert snapshot.entry("a") == TensorEntry("a", "torch", "float32", (4,), 0, 0)
        fits = torch.zeros(4)
        for target, error, text in (
            ({"a": fits, "e": torch.zeros(4)}, KeyError, r"no tensor 'e'; it has 4: a, b, c, \.\.\."),
            ({"a": fits, "b": torch.zeros(5)}, ValueError, r"size that was published, \(4,\)"),
            ({"a": fits, "b": torch.zeros(4, dtype=torch.int64)}, ValueError, "able to hold float32, got torch.int64"),
            ({"a": fits, "b": [1, 2, 3, 4]}, TypeError, "must be a tensor"),
        ):
            with pytest.raises(error, match=text):
                await snapshot.read_into(target)
        assert not fits.any()
        with pytest.raises(KeyError, match="no tensor 'e'"):
            snapshot.entry("e")
    for version, parts in enumerate(
        (
            {"b": vector(False)},
            {"a": vector(False), "b": vector(False)},
            {"a": vector(False, 5)},
            {"a": vector(False, dtype=torch.float64)},
        ),
        start=2,
    ):
        await one.publish.call_one(version, a=vector(True))
        await other.publish.call_one(version, **parts)
        with pytest.raises(ProtocolError, match=r"all ranks must publish the same tensor '[ab]'"):
            async with weights.pin():
                pass
    here = ShardPublisher()
    for name in (1, "trimesh/layout"):
        with pytest.raises(TypeError, match="names of published tensors must be strings, and not 'trimesh/layout'"):
            await here.publish({name: torch.ones(1)})
    assert await here.publish({"a": torch.ones(1)}) == 1, "no actor, so no replica"
    await here.aclose()
    with pytest.raises(trio.ClosedResourceError):
        await here.publish({"a": torch.ones(1)})
    await other.publish.call_one(9, a=torch.zeros(4), b=vector(True))
    assert await other.publish.call_one(10) == 10, "nothing, and so no replica"


@simulate(seeds=1, per_host={"gpus": 2})
async def test_mistakes_with_publications_are_errors_that_say_so(mesh):
    """Y10, Y12, Y13: of a program, and of a peer that sends a handle."""
    ranks = await mesh.spawn("ranks", Rank)
    handles = await ranks.publication.call()
    one, other = handles.values()
    weights, elastic = publication_of(handles), elastic_publication(ranks)
    for mistake, error, text in (
        (Publication, TypeError, "must be opened"),
        (lambda: ShardPublisher(retain=limits.PUBLISHED_SLOTS_MAX), ValueError, "retain must be 1 to"),
        (lambda: elastic_publication(mesh), TypeError, "takes a mesh of actors"),
        (lambda: elastic_publication(ranks, "handle"), AttributeError, "handle"),
        (lambda: elastic.shard(gpus=0), trimesh.ShapeError, "no fixed ranks"),
        (lambda: weights.shard(ranks=0), trimesh.ShapeError, "ranks"),
        (lambda: open_relays(one, mesh), TypeError, "takes a publication"),
        (lambda: open_relays(weights, ranks), TypeError, "takes a mesh of processes"),
        (lambda: open_relays(weights, mesh, fan_out=0), ValueError, "at least 1, got 0"),
    ):
        with pytest.raises(error, match=text):
            mistake()
    assert weights.shard({"gpus": 0}, gpus=1) == weights.shard({"gpus": 1}) == weights.shard(gpus=1) == other
    async with open_relays(weights, mesh, fan_out=1) as relayed:
        for handle, wrong in (
            (weights, [(None,), ([one, other],), (handles.map(lambda one: 1),)]),
            (relayed, [(one, [one]), (weights, (one, other)), (weights, [one, 1])]),
            (elastic, [(mesh, "publication"), (ranks, 1)]),
        ):
            rebuild, args = handle.__reduce__()
            assert repr(rebuild(*args)) == repr(handle)
            for values in wrong:
                with pytest.raises(ProtocolError, match="must be named by"):
                    rebuild(*values)
