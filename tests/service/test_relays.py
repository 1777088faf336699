"""Relays of published weights: each host fetches a version once, and its readers read it there."""

from __future__ import annotations

import pytest
import trio
from tests.patience import HANG_SECONDS

from trimesh import Isolate, ProcDied, jobs, observe
from trimesh.testing import simulate

torch = pytest.importorskip("torch", reason="torch is an extra")

from tests.service.test_weights import ElasticTrainer, Puller, Rank, both, whole  # noqa: E402 - needs torch

from trimesh.service.weights import open_relays, publication_of  # noqa: E402 - needs torch

pytestmark = pytest.mark.torch
LISTENING = {"TRIMESH_RDMA_ADDRESS": "127.0.0.1"}
"""Of processes whose memory those of other hosts read."""


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


async def readers_by_publisher() -> dict[str, set[int]]:
    """Return the ranks of the processes that read, by the actor that publishes."""
    await trio.sleep(1)  # all have subscribed
    seen = await observe.snapshot()
    ranks = {proc.id: proc.point.get("gpus", -1) for proc in seen.procs}
    return {row.member: {ranks[reader] for reader in row.readers} for row in seen.publications}


@simulate(seeds=1, per_host={"gpus": 7}, supervision=Isolate())
async def test_relays_fetch_from_each_other(mesh, faults):
    """Y13: in a tree; from the publisher where the relay above has ended, and when the block was left."""
    ranks = await mesh.slice(gpus=6).spawn("ranks", Rank)
    puller = await mesh.slice(gpus=5).spawn("puller", Puller)
    weights = publication_of([await ranks.publication.call_one()])
    async with open_relays(weights, mesh.slice(gpus=slice(5))) as relayed:
        await ranks.publish.call_one(1, weight=whole(1))
        assert await puller.pull.call_one(relayed, 0) == (1, True)
        found = await readers_by_publisher()
        assert [found.pop(f"weight relays[gpus={rank}]") for rank in range(5)] == [{2, 3, 5}, {4}, set(), set(), set()]
        assert found == {"ranks": {0, 1}}
    with pytest.raises(RuntimeError, match="got a handle on it"):
        await relayed.publish()
    assert relayed.shard(ranks=0) == weights.shard(ranks=0)
    async with open_relays(weights, mesh.slice(gpus=slice(1, 4)), fan_out=1) as relayed:
        await ranks.publish.call_one(2, weight=whole(2))
        assert await puller.pull.call_one(relayed, 1) == (2, True)
        found = await readers_by_publisher()
        assert [found.pop(f"weight relays[gpus={rank}]") for rank in range(3)] == [{2, 5}, {3}, set()]
        faults.kill(mesh.slice(gpus=1))
        for version in (3, 4):
            await ranks.publish.call_one(version, weight=whole(version))
            assert await puller.pull.call_one(relayed, version - 1) == (version, True)
        found = await readers_by_publisher()
        assert (found["weight relays[gpus=1]"], found["ranks"]) == ({3}, {0, 2, 5})
    with trio.fail_after(HANG_SECONDS):
        assert await puller.pull.call_one(relayed, 0) == (4, True)


@pytest.mark.parametrize("late", [1, 2, 3, 5, 7, 9, 11])
@simulate(seeds=1, per_host={"gpus": 3}, supervision=Isolate())
async def test_relay_goes_on_after_versions_that_it_has_missed(mesh, faults, fault_log, late):
    """Y13: whatever it was about to do when the next one came."""
    ranks = await mesh.slice(gpus=2).spawn("ranks", Rank)
    puller = await mesh.slice(gpus=1).spawn("puller", Puller)
    weights = publication_of([await ranks.publication.call_one()])
    async with open_relays(weights, mesh.slice(gpus=0)) as relayed:
        await trio.sleep(1)
        for nth in (late, late + 12):  # when it has published, too
            faults.transfer(mesh.slice(gpus=0), nth=nth).delays(10)
        await ranks.publish.call_one(1, weight=whole(1))
        await trio.sleep(1)
        assert len(fault_log) == 1
        await ranks.publish.call_one(2, weight=whole(2))
        assert (await puller.pull.call_one(relayed, 0))[1], "each version under its own number"
        assert await puller.pull.call_one(relayed, 1) == (2, True)
        await ranks.publish.call_one(3, weight=whole(3))
        assert await puller.pull.call_one(relayed, 2) == (3, True)
        assert await readers_by_publisher() == {"ranks": {0}, "weight relays": {1}}


@pytest.mark.parametrize("ends_by", ["finish", "close"])
@simulate(seeds=1, per_host={"gpus": 3})
async def test_relay_ends_with_its_publisher(mesh, ends_by):
    """Y13: who waits for more is told; of one that has finished, the last version stays."""
    ranks = await mesh.slice(gpus=2).spawn("ranks", Rank)
    puller = await mesh.slice(gpus=1).spawn("puller", Puller)
    weights = publication_of([await ranks.publication.call_one()])
    async with open_relays(weights, mesh.slice(gpus=0)) as relayed:
        await ranks.publish.call_one(1, weight=whole(1))
        assert await puller.pull.call_one(relayed, 0) == (1, True)
        await getattr(ranks, ends_by).call_one()
        with trio.fail_after(HANG_SECONDS), pytest.raises(trio.ClosedResourceError):
            await puller.pull.call_one(relayed, 1)
        if ends_by == "finish":
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
