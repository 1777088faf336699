"""Who is chosen, and what views call (rules M5, M6)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from tests.conformance.meshes import Backend, member
from tests.conformance.probe import Probe
from tests.conformance.supervised import reading, restart

import trimesh
from trimesh import Actor, MeshErrorGroup, MeshStopped, Restarted, Retry, endpoint
from trimesh._runtime.life.current import current_proc


async def test_choose_takes_ties_in_turn(backend: Backend):
    """API 3."""
    async with backend.procs({"gpus": 3}) as procs:
        probes = await procs.spawn("probes", Probe)
        assert [await probes.rank.choose() for _ in range(6)] == [0, 1, 2, 0, 1, 2]
        view = probes.slice(gpus=slice(1, 3))
        assert sorted([await view.rank.choose() for _ in range(4)]) == [1, 1, 2, 2]


async def test_choose_takes_the_least_loaded(backend: Backend):
    """API 3: by the unended calls of this process, whatever their endpoint."""
    async with backend.procs({"gpus": 3}) as procs:
        probes = await procs.spawn("probes", Probe)
        async with trio.open_nursery() as nursery:
            for rank, count in ((0, 2), (2, 1)):
                for _ in range(count):
                    nursery.start_soon(probes.slice(gpus=rank).hold_many.call_one)
                await probes.slice(gpus=rank).wait.call_one("hold", count)
            assert [await probes.rank.choose() for _ in range(3)] == [1, 1, 1]
            nursery.start_soon(probes.slice(gpus=1).hold_many.call_one)
            await probes.slice(gpus=1).wait.call_one("hold")
            assert sorted([await probes.rank.choose() for _ in range(4)]) == [1, 1, 2, 2]
            nursery.cancel_scope.cancel()
        assert sorted([await probes.rank.choose() for _ in range(3)]) == [0, 1, 2]


async def test_choose_spreads_calls_that_start_together(backend: Backend):
    """API 3: each sees those before it."""
    async with backend.procs({"gpus": 4}) as procs:
        probes = await procs.spawn("probes", Probe)
        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(probes.hold_many.choose)
            await probes.wait.call("hold", 2)
            nursery.cancel_scope.cancel()


async def test_choose_leaves_out_the_dead(backend: Backend):
    """API 3, M6: for a holder that knows of the death; with all dead it raises `MeshStopped`."""
    async with backend.procs({"gpus": 1}) as others:
        chooser = await others.spawn("chooser", Chooser)
        keeper = await others.spawn("keeper", Probe)
        async with trio.open_nursery() as nursery:
            with pytest.raises(MeshErrorGroup):
                async with backend.procs({"gpus": 2}) as procs:
                    probes = await procs.spawn("probes", Probe)
                    assert sorted(await chooser.choose.call_one(probes, 4)) == [0, 0, 1, 1]
                    nursery.start_soon(chooser.choose_after_death.call_one, probes, keeper)
                    await keeper.wait.call_one("watching")
                    backend.kill(procs, 1)
                    await trio.sleep_forever()
        with pytest.raises(MeshStopped):
            await chooser.choose.call_one(probes, 1)
        assert await chooser.count_alive.call_one(probes) == 0


class Heir(Actor):
    """Takes its state from a peer after a restart."""

    def __init__(self, retries: int) -> None:
        self.retry = Retry(retries) if retries else None
        self.heritage = 0

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        here = trimesh.context(self)
        if here.incarnation:
            peers = here.actors.exclude([here.point])
            self.heritage = await peers.value.options(retry=self.retry).choose() + 1
        yield

    @endpoint(idempotent=True)
    async def value(self) -> int:
        return self.heritage


@pytest.mark.parametrize("retries", [0, 1])
async def test_choose_waits_for_no_restart_while_another_member_lives(backend: Backend, retries: int):
    """API 3: two members that die together, and ask a peer before they serve, do not wait for each other."""
    async with backend.procs({"gpus": 3}, supervision=restart()) as procs, reading(procs) as log:
        heirs = await procs.spawn("heirs", Heir, retries)
        for rank in (0, 1):
            backend.kill(procs, rank)
        await log.wait(Restarted, 2)
        values = (await heirs.value.call()).values()
        assert values[2] == 0
        assert min(values[:2]) == 1


class Chooser(Actor):
    """Chooses among the members of a mesh elsewhere."""

    @endpoint(concurrency=10)
    async def choose(self, probes: Probe, count: int) -> list[int]:
        return [await probes.rank.choose() for _ in range(count)]

    @endpoint(concurrency=10)
    async def choose_after_death(self, probes: Probe, keeper: Probe) -> None:
        await keeper.note.call_one("watching")
        with pytest.raises(trimesh.ProcDied):
            await probes.slice(gpus=1).hold_many.call_one()
        assert len(probes.alive()) <= 1
        with pytest.raises((MeshStopped, trimesh.RemoteCancelled, trimesh.ProcDied)):
            while True:
                assert await probes.rank.choose() == 0

    @endpoint(concurrency=10)
    async def count_alive(self, probes: Probe) -> int:
        return len(probes.alive())


# ---- empty views -----------------------------------------------------------------------------------------------------


async def test_verbs_on_an_empty_view(backend: Backend):
    """M6: `call` gives an empty ValueMesh, `broadcast` nothing, `choose` and `call_one` `ValueError`."""
    async with backend.procs() as procs:
        probes = await procs.spawn("probes", Probe)
        empties = [probes.slice(gpus=slice(0, 0)), probes.exclude([{"gpus": 0}, {"gpus": 1}])]
        for empty in empties:
            assert len(empty) == 0
            assert list((await empty.rank.call()).items()) == []
            assert list((await empty.rank.call_settled()).items()) == []
            await empty.rank.broadcast()
            empty.rank.broadcast_nowait()
            for verb in ("choose", "call_one"):
                with pytest.raises(ValueError, match="member"):
                    await getattr(empty.rank, verb)()
        with pytest.raises(ValueError, match="exactly one"):
            await probes.rank.call_one()
        assert list((await probes.seen.call()).values()) == [[], []]


async def test_view_of_a_view_calls_its_members(backend: Backend):
    """M5: whatever was sliced, split, flattened and renamed; results are over the extent of the view."""
    async with backend.procs({"hosts": 2, "gpus": 2}) as procs:
        probes = await procs.spawn("probes", Probe)
        ranks = await probes.rank.call()
        assert {tuple(point.items()): rank for point, rank in ranks.items()}[("hosts", 1), ("gpus", 0)] == 2
        assert dict((await probes.slice(hosts=1).rank.call()).extent) == {"gpus": 2}
        assert list((await probes.slice(gpus=1).rank.call()).values()) == [1, 3]
        flat = probes.flatten("ranks")
        assert (await flat.rank.call()).item(ranks=3) == 3
        halves = flat.split(ranks=("dp", "tp"), tp=2).rename(tp="pairs")
        assert (await halves.rank.call()).item(dp=1, pairs=0) == 2
        assert await flat.slice(ranks=2).rank.call_one() == 2
        assert member(probes, 0).pid
        assert current_proc() is not None
