"""How starts of meshes fail (C07, C08, E11)."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import pytest
import trio
from tests.conformance.meshes import Backend, RealBackend, SimBackend, attempt, only_real, only_sim
from tests.conformance.probe import Probe, Tidy
from tests.conformance.starting import PickyInit, SlowStart
from tests.conformance.supervised import reading, restart

import trimesh
from trimesh import Actor, Died, FailFast, Isolate, MeshErrorGroup, ProcDied, SpawnError, endpoint, this_proc


class FailsSoon(Actor):
    """Rank 0 serves and fails at once; the others never become ready."""

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        if trimesh.current_rank() != 0:
            await trio.sleep_forever()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.fail)
            yield

    async def fail(self) -> None:
        raise KeyError("soon")


@pytest.mark.parametrize("ranks", [[0], [2], [1, 3]])
async def test_init_that_fails_is_raised_where_it_was_spawned(backend: Backend, ranks: list[int]):
    """E11: with its coordinates; the half-built mesh is gone, the processes go on."""
    async with backend.procs({"gpus": 4}) as procs:
        for spawn in ("await", "async with"):
            with pytest.raises(MeshErrorGroup) as caught:
                if spawn == "await":
                    await procs.spawn("picky", PickyInit, ranks, ValueError("picky"))
                else:
                    async with procs.spawn("picky", PickyInit, ranks, ValueError("picky")):
                        raise AssertionError
            assert caught.value.mesh == "picky"
            points = [point["gpus"] for point in trimesh.coords(caught.value)]
            assert points
            assert set(points) <= set(ranks)
            assert all(isinstance(leaf, ValueError) for leaf in trimesh.leaves(caught.value))
        assert list((await (await procs.spawn("probes", Probe)).rank.call()).values()) == [0, 1, 2, 3]


@pytest.mark.parametrize("error", [KeyError("setup"), KeyboardInterrupt("setup"), SystemExit(3)])
async def test_lifespan_that_fails_in_its_set_up_is_raised_where_it_was_spawned(backend: Backend, error: BaseException):
    """E11, E06: the other ranks have cleaned up when it is raised."""
    async with backend.procs() as procs:
        observer = (await procs.spawn("observer", Probe)).slice(gpus=0)
        with pytest.raises(MeshErrorGroup) as caught:
            await procs.spawn("tidy", Tidy, setup_error=error, ranks=[1], tell=observer)
        assert trimesh.coords(caught.value) == [{"gpus": 1}]
        (leaf,) = trimesh.leaves(caught.value)
        assert isinstance(leaf, type(error) if isinstance(error, Exception) else trimesh.RemoteError)
        assert await observer.seen.call_one() == []


async def test_cancel_of_set_up_unwinds_what_was_reached(backend: Backend):
    """C08: the actor never serves."""
    async with backend.procs() as procs:
        observer = (await procs.spawn("observer", Probe)).slice(gpus=0)
        async with trio.open_nursery() as nursery:

            async def spawn() -> None:
                await procs.spawn("slow", SlowStart, observer)

            spawned = attempt(nursery, spawn)
            await observer.wait.call_one("entering", 2)
            spawned.cancel()
        assert spawned.cancelled
        assert sorted(await observer.seen.call_one()) == ["entering"] * 2 + ["unwound"] * 2


class Deaf(Actor):
    """Hears no cancel of its set-up."""

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        if trimesh.current_rank() == 0:
            with trio.CancelScope(shield=True):
                await trio.sleep_forever()
        yield


@only_sim
@pytest.mark.parametrize("policy", [Isolate(), FailFast(), restart()])
async def test_cancel_of_a_spawn_that_a_member_does_not_hear_ends_as_a_cancel(backend: SimBackend, policy: Any):
    """C08, P1: the process is killed when its grace is over; what that means is for the policy to say."""
    is_over = False
    with nullcontext() if not isinstance(policy, FailFast) else pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs(supervision=policy, grace=1) as procs, reading(procs) as log:
            with trio.CancelScope() as scope, trio.move_on_after(1):
                try:
                    await procs.spawn("deaf", Deaf)
                except trio.Cancelled:
                    is_over = True
                    raise
            assert not scope.cancelled_caught
            await log.wait(Died)
            assert [type(event.error) for event in log.of(Died)] == [ProcDied]
            alive = procs.slice(gpus=1) if isinstance(policy, Isolate) else procs
            assert len(await (await alive.spawn("probes", Probe)).rank.call()) == len(alive)
    assert is_over
    if isinstance(policy, FailFast):
        assert caught is not None
        assert [getattr(leaf, "by", leaf) for leaf in trimesh.leaves(caught.value)] == ["grace"]


async def test_member_that_fails_while_others_start_fails_the_spawn(backend: Backend):
    """E11: a rank that served already, and then failed, does not wait for the ranks that are not ready."""
    async with backend.procs() as procs:
        for spawn in ("await", "async with"):
            with pytest.raises(MeshErrorGroup) as caught:
                if spawn == "await":
                    await procs.spawn("soon", FailsSoon)
                else:
                    async with procs.spawn("soon", FailsSoon):
                        raise AssertionError
            assert [str(leaf) for leaf in trimesh.leaves(caught.value)] == ["'soon'"]
            assert trimesh.coords(caught.value) == [{"gpus": 0}]


async def test_process_that_dies_while_actors_start_fails_the_block(backend: Backend):
    """X3, C07: the spawn ends by the cancel of the block, which raises the death."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with (
            this_proc().spawn("observer", Probe) as observer,
            backend.procs() as procs,
            trio.open_nursery() as nursery,
        ):

            async def spawn() -> None:
                await procs.spawn("slow", SlowStart, observer)

            attempt(nursery, spawn)
            await observer.wait.call_one("entering", 2)
            backend.kill(procs, 1)
    assert [type(leaf) for leaf in trimesh.leaves(caught.value)] == [ProcDied]
    assert trimesh.coords(caught.value) == [{"gpus": 1}]


async def broken_setup() -> None:
    if trimesh.current_rank() == 1:
        raise LookupError("setup")


def note_setup() -> None:
    os.environ["TRIMESH_TEST_SETUP"] = str(trimesh.current_rank())


async def test_setup_that_fails_is_raised_by_spawn_procs(backend: Backend):
    """E11: with its coordinates, and nothing left."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs({"gpus": 3}, setup=broken_setup):
            raise AssertionError
    assert [type(leaf) for leaf in trimesh.leaves(caught.value)] == [LookupError]
    assert trimesh.coords(caught.value) == [{"gpus": 1}]


class Environment(Actor):
    """Reads the environment of its process."""

    @endpoint
    async def get(self, name: str) -> str | None:
        return os.environ.get(name)


@only_real
async def test_setup_and_env_come_before_actors(backend: RealBackend):
    """API 1: `setup` may be a plain function; `env` a function of the point."""
    async with backend.procs(setup=note_setup, env=lambda point: {"TRIMESH_TEST_ENV": str(point["gpus"])}) as procs:
        environments = await procs.spawn("environments", Environment)
        assert list((await environments.get.call("TRIMESH_TEST_SETUP")).values()) == ["0", "1"]
        assert list((await environments.get.call("TRIMESH_TEST_ENV")).values()) == ["0", "1"]


async def test_env_that_fails_is_raised_by_spawn_procs(backend: Backend):
    """E11: an error of the caller's own function, with the point that it was asked for."""

    def env(point: trimesh.Point) -> dict[str, str]:
        if point["gpus"] == 1:
            raise LookupError("env")
        return {}

    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs({"gpus": 3}, env=env):
            raise AssertionError
    (leaf,) = trimesh.leaves(caught.value)
    assert isinstance(leaf, LookupError)
    where = trimesh.origin(leaf)
    assert where is not None
    assert where.pid is None  # os.kill takes 0 for the caller's own process group


@only_real
async def test_interpreter_that_is_missing_is_a_spawn_error(backend: RealBackend):
    """E11: one for each point, nothing left."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs(python="/nonexistent/python"):
            raise AssertionError
    assert {type(leaf) for leaf in trimesh.leaves(caught.value)} == {SpawnError}
    assert trimesh.coords(caught.value)


class NeverYields(Actor):
    """Its lifespan ends before it has begun."""

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        if trimesh.current_rank() < 0:
            yield


class YieldsTwice(Actor):
    """Its lifespan does not end."""

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        yield
        yield


async def test_lifespan_that_does_not_yield_once_is_an_error(backend: Backend):
    """E07, E11: of the spawn, or of the clean-up."""
    async with backend.procs() as procs:
        with pytest.raises(MeshErrorGroup, match="could not be spawned") as caught:
            await procs.spawn("never", NeverYields)
        assert {str(leaf) for leaf in trimesh.leaves(caught.value)} == {"generator didn't yield"}
        with pytest.raises(MeshErrorGroup) as caught:
            async with procs.spawn("twice", YieldsTwice):
                pass
        assert [str(leaf) for leaf in trimesh.leaves(caught.value)] == ["generator didn't stop"] * 2
