"""Versions of the tensors of a mesh that actors elsewhere follow."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is an extra")

import trio  # noqa: E402 - after the skip
from tests.patience import HANG_SECONDS  # noqa: E402
from tests.tensor.test_bulk import PRELOAD  # noqa: E402

import trimesh  # noqa: E402
from trimesh import Actor, MeshErrorGroup, ProcDied, ShapeError, endpoint, limits, this_host  # noqa: E402
from trimesh.rdma.publications.reading import VersionGone  # noqa: E402

pytestmark = [pytest.mark.real, pytest.mark.torch]


def layers() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(7, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 5))


PLAN = {"0.weight": ["tp", None], "0.bias": ["tp"], "2.weight": [None, "tp"], "1.weight": [("dp", "tp")]}


class Generator(Actor):
    """Follows the weights of a module."""

    def __init__(self) -> None:
        self.net = layers()

    @endpoint
    async def follow(self, weights: Any, version: int) -> tuple[int, dict[str, Any], dict[str, Any]]:
        """Return the latest version: as it was read into a module, and by itself."""
        await weights.wait_newer(version)
        async with weights.pin() as snapshot:
            await snapshot.read_into(self.net.state_dict())
            return snapshot.version, dict(self.net.state_dict()), await snapshot.read()

    @endpoint
    async def are_equal(self, weights: Any, rounds: int) -> bool:
        """Read as many versions as there are; tell whether each was of one time."""
        version = 0
        while version < rounds:
            version = await weights.wait_newer(version)
            async with weights.pin() as snapshot:
                version = snapshot.version
                found = await snapshot.read()
            if any(not (tensor == version).all() for tensor in found.values()):
                return False
        return True

    @endpoint
    async def keep(self, weights: Any) -> None:
        async with weights.pin():
            await trio.sleep_forever()


async def test_actors_get_whole_tensors_of_each_version() -> None:
    async with (
        this_host().spawn_procs({"dp": 2, "tp": 2}, preload=PRELOAD) as trainers,
        this_host().spawn_procs({"replica": 2}, name="generators", preload=PRELOAD) as generators,
    ):
        actors = await generators.spawn("generators", Generator)
        net = layers()
        model = trimesh.module_to_mesh(net, trainers, PLAN)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        async with trimesh.publication(model) as weights:
            for number in (1, 2, 3):
                model(trimesh.distribute(torch.randn(8, 7), trainers, ["dp", None])).square().sum().backward()
                optimizer.step()
                assert await weights.publish() == number
                expected = await trimesh.fetch(model.state_dict())
                for version, *states in (await actors.follow.call(weights, number - 1)).values():
                    assert version == number
                    for state in states:
                        assert state.keys() == expected.keys()
                        assert all(state[name].equal(expected[name]) for name in expected)
            async with weights.pin() as snapshot:  # here, too
                with pytest.raises(ValueError, match=r"able to hold float32, got torch.int64"):
                    await snapshot.read_into({"0.weight": torch.empty(300, 7, dtype=torch.int64)})
                with pytest.raises(ValueError, match=r"size that was published, \(300, 7\)"):
                    await snapshot.read_into({"0.weight": torch.empty(7, 300)})
                wide = torch.empty(300, 7, dtype=torch.float64)
                await snapshot.read_into({"0.weight": wide})
                assert wide.equal(expected["0.weight"].double())
                with pytest.raises(KeyError, match="no tensor 'weight'"):
                    await snapshot.read_into({"weight": torch.empty(1)})
                turned = torch.empty(7, 300).t()
                await snapshot.read_into({"0.weight": turned})
                assert turned.equal(expected["0.weight"])
            with pytest.raises(VersionGone):
                async with weights.pin(1):
                    pass
            async with weights.shard(dp=0, tp=1).pin() as part:
                assert (await part.read())["0.weight"].equal(expected["0.weight"][150:])
            with pytest.raises(ShapeError, match="pp"):
                weights.shard(pp=0)
            handle = weights
        with trio.fail_after(HANG_SECONDS), pytest.RaisesGroup(trio.ClosedResourceError, allow_unwrapped=True):
            await handle.wait_newer(3)


@pytest.mark.daily
async def test_versions_are_never_mixed() -> None:
    rounds = 30
    async with (
        this_host().spawn_procs({"gpus": 2}, preload=PRELOAD) as trainers,
        this_host().spawn_procs({"replica": 2}, name="generators", preload=PRELOAD) as generators,
    ):
        actors = await generators.spawn("generators", Generator)
        state = {
            "rows": trimesh.distribute(torch.zeros(300, 100), trainers, ["gpus", None]),
            "columns": trimesh.distribute(torch.zeros(300, 100), trainers, [None, "gpus"]),
            "whole": trimesh.replicate(torch.zeros(10), trainers),
        }
        async with trimesh.publication(state) as weights, trio.open_nursery() as nursery:
            found: list[Any] = []

            async def read() -> None:
                found.extend((await actors.are_equal.call(weights, rounds)).values())

            nursery.start_soon(read)
            for _ in range(rounds):
                for tensor in state.values():
                    tensor.add_(1)
                await weights.publish()
        assert found == [True, True]


@pytest.mark.daily
async def test_tensors_of_each_rank_are_read_by_shard() -> None:
    async with this_host().spawn_procs({"gpus": 2}, preload=PRELOAD) as procs:
        with procs.activate():
            t = torch.ones(3) * procs.rank_tensor("gpus")
        with trio.CancelScope() as scope:
            async with trimesh.publication({"t": t}) as weights:
                assert await weights.publish() == 1
                async with weights.pin() as snapshot:
                    with pytest.raises(TypeError, match=r"on each of 2 ranks.*weights.shard"):
                        await snapshot.read()
                async with weights.shard(gpus=1).pin() as snapshot:
                    assert (await snapshot.read())["t"].tolist() == [1, 1, 1]
                scope.cancel()
        with trio.fail_after(HANG_SECONDS), pytest.raises(trio.ClosedResourceError):
            await weights.wait_newer(1)
        other = procs.slice(gpus=1)
        with other.activate():
            alone = torch.ones(3)
        state = {"t": alone}
        async with trimesh.publication(state, slots=limits.PUBLISHED_SLOTS_MAX) as weights:
            await weights.publish()
            async with weights.pin() as snapshot:
                assert (await snapshot.read())["t"].tolist() == [1, 1, 1]
            state["t"] = t
            with pytest.raises(TypeError, match="on the same ranks"):
                await weights.publish()
        for mistake in ({}, [t], None):
            with pytest.raises(TypeError, match="a module, or a mapping"):
                trimesh.publication(mistake)  # type: ignore[arg-type]
        for name in (1, "trimesh/layout"):
            with pytest.raises(TypeError, match="must be strings, and not 'trimesh/layout'"):
                trimesh.publication({name: t})  # type: ignore[dict-item]
        with pytest.raises(TypeError, match="on a mesh"):
            trimesh.publication({"t": torch.ones(1)})
        with pytest.raises(TypeError, match="on the same ranks"):
            trimesh.publication({"a": t, "b": alone})
        for slots in (1, limits.PUBLISHED_SLOTS_MAX + 1):
            with pytest.raises(ValueError, match="slots must be 2 to"):
                trimesh.publication({"a": t}, slots=slots)


async def test_what_cannot_be_published_is_told_and_the_next_version_can() -> None:
    async with this_host().spawn_procs({"gpus": 2}, preload=PRELOAD) as procs:
        good = trimesh.distribute(torch.ones(4), procs, ["gpus"])
        state = {"t": good}
        async with trimesh.publication(state) as weights:
            assert await weights.publish() == 1
            state["t"] = good[trimesh.replicate(torch.tensor([9]), procs)]  # no such element
            with pytest.raises(MeshErrorGroup) as caught:
                await weights.publish()
            assert all(isinstance(error, IndexError) for error in trimesh.leaves(caught.value))
            async with weights.pin() as snapshot:
                assert snapshot.version == 1
            state["t"] = good + 1
            assert await weights.publish() == 3
            async with weights.pin() as snapshot:
                assert (await snapshot.read())["t"].tolist() == [2, 2, 2, 2]


async def test_death_of_a_rank_ends_the_publication_for_readers() -> None:
    async with (
        this_host().spawn_procs({"gpus": 2}, preload=PRELOAD, supervision=trimesh.Isolate()) as trainers,
        this_host().spawn_procs({"replica": 1}, name="generators", preload=PRELOAD) as generators,
    ):
        actors = await generators.spawn("generators", Generator)
        state = {"t": trimesh.distribute(torch.ones(4), trainers, ["gpus"])}
        async with trimesh.publication(state) as weights:
            await weights.publish()
            with trainers.activate():
                pid = (await trimesh.call_on_shard_and_fetch("os.getpid")).item(gpus=1)
            os.kill(pid, signal.SIGKILL)
            with trio.fail_after(HANG_SECONDS), pytest.raises(ProcDied):
                await actors.follow.call_one(weights, 1)
