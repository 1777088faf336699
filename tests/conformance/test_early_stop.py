"""`procs.stop`: a mesh that ends before its block."""

from __future__ import annotations

import math

import pytest
import trio
from tests.conformance.meshes import Backend, SimBackend, kinds, only_sim
from tests.conformance.probe import Probe, Tidy
from tests.conformance.supervised import restart

import trimesh
from trimesh import Isolate, MeshErrorGroup, MeshStopped, this_proc


async def test_mesh_is_stopped_before_its_block(backend: Backend):
    """M3: accepted messages run to their end, actors clean up, calls are refused; the block goes on."""
    async with this_proc().spawn("observer", Probe) as observer, backend.procs(supervision=restart()) as procs:
        probes = await procs.spawn("probes", Probe)
        await procs.spawn("tidy", Tidy, tell=observer)
        async with procs.events() as events:
            await probes.note.broadcast("accepted")
            await procs.stop()
            assert [type(event).__name__ async for event in events] == ["Started", "Started"]
        assert sorted(await observer.seen.call_one()) == ["clean 0", "clean 1", "cleaning 0", "cleaning 1"]
        with pytest.raises(MeshErrorGroup) as caught:
            await probes.rank.call()
        assert set(kinds(caught.value)) == {MeshStopped}
        await procs.stop()
        with pytest.raises(RuntimeError, match="has been stopped"):
            await procs.spawn("late", Probe)
        async with backend.procs({"gpus": 1}, name="others") as others:
            assert await (await others.spawn("probes", Probe)).rank.call_one() == 0


@only_sim
async def test_stop_has_a_grace_of_its_own(backend: SimBackend):
    """M3: who is not done by then is killed, and the stop raises it; the block does not, once more."""
    async with backend.procs(supervision=Isolate(), grace=math.inf) as procs:
        await procs.spawn("slow", Tidy, 60.0, ranks=[1])
        with pytest.raises(MeshErrorGroup) as caught:
            await procs.stop(grace=1)
        assert 1 <= trio.current_time() < 3
    assert [getattr(leaf, "by", leaf) for leaf in trimesh.leaves(caught.value)] == ["grace"]
    assert "grace=1 s" in str(next(trimesh.leaves(caught.value)))


@only_sim
async def test_cancelled_stop_ends_the_mesh_all_the_same(backend: SimBackend):
    """M3: what ran is cancelled; who does not clean up within the grace fails the block."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs() as procs:
            slow = await procs.spawn("slow", Tidy, 60.0, ranks=[1])
            await slow.hold.broadcast()
            with trio.move_on_after(0.5) as scope:
                await procs.stop(grace=1)
            assert scope.cancelled_caught
            assert trio.current_time() < 3
    assert [getattr(leaf, "by", leaf) for leaf in trimesh.leaves(caught.value)] == ["grace"]


@only_sim
async def test_blocks_inside_see_that_their_mesh_has_been_stopped(backend: SimBackend):
    """M2, M3: their calls raise `MeshStopped`, and they are left as any other."""
    async with backend.procs() as procs, procs.spawn("probes", Probe) as probes:
        await procs.stop()
        with pytest.raises(MeshStopped):
            await probes.slice(gpus=0).rank.call_one()


async def test_only_an_owner_stops_all_of_a_mesh(backend: Backend):
    async with backend.procs() as procs:
        with pytest.raises(ValueError, match="part"):
            await procs.slice(gpus=0).stop()
        with pytest.raises(ValueError, match="grace"):
            await procs.stop(grace=-1)
    with pytest.raises(RuntimeError, match="owns"):
        await this_proc().stop()
