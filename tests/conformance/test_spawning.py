"""How meshes start (rules M1, M5, M6, M7)."""

from __future__ import annotations

import gc
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from tests.conformance.meshes import Backend, SimBackend, only_sim
from tests.conformance.probe import Notes, Probe
from tests.conformance.starting import PickyInit

import trimesh
from trimesh import Actor, ShapeError, endpoint, limits, this_host, this_proc


class Where(Actor):
    """Says where it was made."""

    def __init__(self) -> None:
        self.made = (trimesh.current_point(), trimesh.current_rank(), trimesh.current_size())

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        self.entered = trimesh.current_point()
        yield

    @endpoint
    async def where(self) -> tuple[Any, ...]:
        context = trimesh.context()
        return (
            *self.made,
            self.entered,
            trimesh.current_point(),
            context.mesh,
            context.endpoint,
            context.actor is self,
        )


# ---- readiness -----------------------------------------------------------------------------------------------------


@pytest.mark.daily("sim-typed")
@pytest.mark.daily("real")
async def test_mesh_is_ready_when_spawned(backend: Backend):
    """M1, M5: every member has run `__init__` and entered `lifespan`, and knows its coordinates in all of them."""
    async with backend.procs({"hosts": 2, "gpus": 2}) as procs:
        places = await procs.spawn("places", Where)
        for point, place in (await places.where.call()).items():
            rank = point["hosts"] * 2 + point["gpus"]
            assert place == (point, rank, 4, point, point, "places", "where", True)


async def test_mesh_of_one_process_needs_no_dimension(backend: Backend):
    """M6: an extent may be empty; the mesh has one member then."""
    async with backend.procs({}) as procs:
        assert dict(procs.extent) == {}
        probe = await procs.spawn("probe", Probe)
        assert await probe.rank.call_one() == 0
        assert list((await probe.rank.call()).values()) == [0]


@pytest.mark.parametrize("sizes", [{"gpus": 0}, {"gpus": -1}, {"gpus": 2, "hosts": 0}])
async def test_size_must_be_positive(backend: Backend, sizes: dict[str, int]):
    """M6: refused at the call, before anything starts."""
    with pytest.raises(ShapeError, match=r"0|-1"):
        backend.procs(sizes)


async def test_actor_mesh_on_a_view_has_the_extent_of_the_view(backend: Backend):
    """M5: coordinates inside are those of the actor mesh as spawned."""
    async with backend.procs({"hosts": 2, "gpus": 2}) as procs:
        places = await procs.slice(hosts=1).spawn("places", Where)
        assert dict(places.extent) == {"gpus": 2}
        assert [place[0] for place in (await places.where.call()).values()] == [{"gpus": 0}, {"gpus": 1}]
        sparse = await procs.exclude([{"hosts": 0, "gpus": 1}]).spawn("sparse", Where)
        assert len(sparse) == 3
        assert [place[1] for place in (await sparse.where.call()).values()] == [0, 2, 3]


async def test_spawn_copies_its_arguments(backend: Backend):
    """M7, V1: also into this very process."""
    secret = [1]
    error = ValueError(secret)
    async with backend.procs({"gpus": 1}) as procs, this_proc().spawn("here", PickyInit, [5], error) as here:
        there = await procs.spawn("there", PickyInit, [5], error)
        secret.append(2)
        assert await here.rank.call_one() == await there.rank.call_one() == 0


# ---- use of the object -----------------------------------------------------------------------------------------------


async def test_spawning_is_used_once(backend: Backend):
    """M1: by `await` or `async with`, one of them, once."""
    async with backend.procs({"gpus": 1}) as procs:
        spawning = procs.spawn("probes", Probe)
        await spawning
        with pytest.raises(RuntimeError, match="once"):
            await spawning
        with pytest.raises(RuntimeError, match="once"):
            async with spawning:
                raise AssertionError
        entered = procs.spawn("probes", Probe)
        async with entered as probes:
            with pytest.raises(RuntimeError, match="once"):
                await entered
            assert await probes.rank.call_one() == 0


async def test_unused_spawning_warns_with_its_line(backend: Backend):
    """M1."""
    async with backend.procs({"gpus": 1}) as procs:
        with pytest.warns(RuntimeWarning, match=r"spawn\('probes', Probe\).*test_spawning\.py:\d+.*never started"):
            procs.spawn("probes", Probe)
            gc.collect()
    with pytest.warns(RuntimeWarning, match=r"spawn_procs.*test_spawning\.py:\d+"):
        this_host().spawn_procs({"gpus": 1})
        gc.collect()


async def test_attribute_of_a_spawning_says_to_await(backend: Backend):
    """M1."""
    async with backend.procs({"gpus": 1}) as procs:
        spawning = procs.spawn("probes", Probe)
        with pytest.raises(AttributeError, match="await"):
            spawning.rank  # noqa: B018 - the access is the test
        await spawning


async def test_awaiting_without_an_owner_says_what_to_write(backend: Backend):
    """API 1: `await this_host().spawn_procs(...)` and `await this_proc().spawn(...)` have no owning block."""
    del backend
    with pytest.raises(RuntimeError, match=r"async with this_host\(\)\.spawn_procs"):
        await this_host().spawn_procs({"gpus": 1})
    with pytest.raises(RuntimeError, match=r"async with this_proc\(\)\.spawn"):
        await this_proc().spawn("probe", Probe)


def test_hosts_resolve_outside_of_a_run():
    """M7: both start nothing, and can be called outside of `trio.run`."""
    assert len(this_host()) == len(this_proc()) == 1
    assert dict(this_host().extent) == dict(this_proc().extent) == {}


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), (([1], ValueError(), 3), {}), (([1],), {"other": 1}), (([1], 2), {"ranks": []})]
)
async def test_arguments_of_the_actor_are_bound_at_the_caller(backend: Backend, args: Any, kwargs: Any):
    """API 3: `TypeError` where the mistake is, before anything is sent."""
    async with backend.procs({"gpus": 1}) as procs:
        with pytest.raises(TypeError, match="PickyInit"):
            procs.spawn("picky", PickyInit, *args, **kwargs)


async def test_spawn_takes_actor_classes_only(backend: Backend):
    """API 1."""
    async with backend.procs({"gpus": 1}) as procs:
        with pytest.raises(TypeError, match="Actor"):
            procs.spawn("dict", dict)  # type: ignore[type-var]


def test_notes_wait():
    """The probe's notes wake whoever waits for them, in any order."""

    async def main() -> None:
        notes = Notes()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(notes.wait, "b", 2)
            notes.add("a")
            notes.add("b")
            notes.add("b")
        await notes.wait("a")

    trio.run(main)


@pytest.mark.parametrize(
    ("name", "error"), [(3, TypeError), (None, TypeError), ("", ValueError), ("x" * 201, ValueError)]
)
async def test_name_must_be_a_short_string(backend: Backend, name: Any, error: type[Exception]):
    """API 1: it is in most messages to people."""
    with pytest.raises(error, match="name of a mesh"):
        this_host().spawn_procs({"gpus": 1}, name=name)
    with pytest.raises(error, match="name of a mesh"):
        this_proc().spawn(name, Probe)
    async with backend.procs({"gpus": 1}, name="x" * 200) as procs:
        probe = await procs.spawn("\N{SNOWMAN}" * 200, Probe)
        with pytest.raises(KeyError) as caught:
            await probe.fail.call_one(KeyError("long"))
        assert len(trimesh.origin(caught.value).mesh) == 200


async def long_setup() -> None:
    await trio.sleep(10 * limits.SPAWN_SECONDS)


@only_sim
async def test_setup_may_take_long(backend: SimBackend):
    """API 1: it may load a model; only the start of the process itself is bounded."""
    async with backend.procs({"gpus": 2}, setup=long_setup) as procs:
        assert trio.current_time() == 10 * limits.SPAWN_SECONDS
        await procs.spawn("probes", Probe)
