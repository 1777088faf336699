"""Which block owns a mesh, and what that means for starts (rules M1, M2, M7)."""

from __future__ import annotations

import pytest
import trio
from tests.conformance.meshes import Backend, SimBackend, attempt, member, only_sim
from tests.conformance.probe import Probe, Tidy
from tests.conformance.starting import SlowStart

import trimesh
from trimesh import Actor, MeshStopped, endpoint, this_host


async def test_reference_does_not_adopt(backend: Backend):
    """M2: a handle on processes that came from elsewhere owns nothing."""

    async with backend.procs() as procs:
        probes = await procs.spawn("probes", Spawner)
        with pytest.raises(RuntimeError, match="reference"):
            await probes.slice(gpus=0).spawn_there.call_one(procs)


class Spawner(Actor):
    """Tries to spawn on what it is given."""

    @endpoint
    async def spawn_there(self, procs: trimesh.ProcMesh) -> None:
        assert dict(procs.extent) == {"gpus": 2}
        await procs.spawn("stolen", Probe)


async def test_block_that_stops_takes_no_new_meshes(backend: Backend):
    """M2: neither by `await` nor by `async with`, from the moment at which its body has ended."""
    async with backend.procs() as observers:
        observer = (await observers.spawn("observer", Probe)).slice(gpus=0)
        async with trio.open_nursery() as nursery, backend.procs() as procs:
            await procs.spawn("tidy", Tidy, tell=observer)
            gate = await procs.spawn("gate", Probe)
            attempt(nursery, gate.slice(gpus=0).wait_for_gate.call_one)
            await gate.slice(gpus=0).wait.call_one("gate")

            async def spawn_late() -> None:
                await trio.testing.wait_all_tasks_blocked()
                with pytest.raises(RuntimeError, match="begun to stop"):
                    await procs.spawn("late", Probe)
                with pytest.raises(RuntimeError, match="begun to stop"):
                    async with procs.spawn("late", Probe):
                        raise AssertionError
                nursery.cancel_scope.cancel()

            nursery.start_soon(spawn_late)
        with pytest.raises(RuntimeError, match="begun to stop"):
            await procs.spawn("late", Probe)
        with pytest.raises(RuntimeError, match="begun to stop"):
            async with procs.spawn("late", Probe):
                raise AssertionError


async def test_spawn_that_is_under_way_when_the_block_stops_leaves_nothing(backend: Backend):
    """M2: the block does not wait for it, nor forget it."""
    async with backend.procs() as observers:
        observer = (await observers.spawn("observer", Probe)).slice(gpus=0)
        async with trio.open_nursery() as nursery:
            async with backend.procs() as procs:

                async def spawn() -> None:
                    await procs.spawn("slow", SlowStart, observer)

                late = attempt(nursery, spawn)
                await observer.wait.call_one("entering", 2)
            with pytest.raises(RuntimeError, match="begun to stop"):
                await late.result()
        assert sorted(await observer.seen.call_one()) == ["entering"] * 2 + ["unwound"] * 2


async def test_meshes_of_a_warm_host_belong_to_its_block(backend: Backend):
    """M2, O1: awaited process meshes are adopted by the block of the host, entered ones are their own."""
    del backend
    async with this_host().warm() as host:
        first = await host.spawn_procs({"gpus": 1}, name="first")
        probes = await first.spawn("probes", Probe)
        async with host.spawn_procs({"gpus": 2}, name="second") as second:
            others = await second.spawn("others", Probe)
            assert list((await others.rank.call()).values()) == [0, 1]
        assert await probes.rank.call_one() == 0
        with pytest.raises(MeshStopped):
            await others.rank.choose()


@only_sim
async def test_processes_are_not_those_of_others(backend: SimBackend):
    """M1: two meshes of one block have processes of their own."""
    async with backend.procs() as one, backend.procs() as other:
        pids = {member(mesh, rank).pid for mesh in (one, other) for rank in range(2)}
        assert len(pids) == 4


async def test_nested_meshes_work_at_depth_four(backend: Backend):
    """M7: `this_host()` in a worker starts processes of that worker."""
    async with backend.procs({"level": 1}) as procs:
        nests = await procs.spawn("nests", Deep)
        assert await nests.slice(level=0).dig.call_one(3) == [0, 1, 2, 3]


class Deep(Actor):
    """Owns processes that own processes."""

    @endpoint
    async def dig(self, depth: int) -> list[int]:
        if depth == 0:
            return [0]
        async with this_host().spawn_procs({"level": 1}, name=f"level{depth}") as procs:
            deeper = await procs.spawn("nests", Deep)
            return [*await deeper.dig.call_one(depth - 1), depth]


async def test_failure_deep_down_comes_up_level_by_level(backend: Backend):
    """M7, E04: an error at depth 3 goes through every block and call on its way, and keeps its type and place."""
    async with backend.procs({"level": 1}) as procs:
        nests = await procs.spawn("nests", DeepFailure)
        with pytest.raises(ExceptionGroup) as caught:
            await nests.dig.call(3)
    (leaf,) = trimesh.leaves(caught.value)
    assert isinstance(leaf, ZeroDivisionError)
    assert trimesh.origin(leaf).mesh == "bottom"


class DeepFailure(Actor):
    """Fails at the bottom."""

    @endpoint
    async def dig(self, depth: int) -> None:
        if depth == 0:
            raise ZeroDivisionError
        async with this_host().spawn_procs({"level": 1}) as procs:
            deeper = await procs.spawn("bottom" if depth == 1 else "nests", DeepFailure)
            await deeper.dig.call(depth - 1)
