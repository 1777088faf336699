"""Calls of members to each other while their mesh is being spawned (rules C8, M10)."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio
from tests.conformance.meshes import Backend, SimBackend, member, only_sim
from tests.conformance.nodes import no_deadline

import trimesh
from trimesh import Actor, DeadlockError, MeshErrorGroup, MeshStopped, context, endpoint, limits
from trimesh._runtime.life.current import current_proc


class Greeter(Actor):
    """Calls the last of its mesh from a background task that its `lifespan` starts."""

    def __init__(self, times: int = 1, patience: float = 1000) -> None:
        self.times = times
        self.patience = patience
        self.greeted: list[int] = []
        self.outcomes: list[object] = []
        self.done = trio.Event()

    @contextlib.asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.greet, context(self))
            yield
            nursery.cancel_scope.cancel()

    async def greet(self, here: Any) -> None:
        if here.point["gpus"] == 0:
            last = here.actors.slice(gpus=-1)
            for number in range(self.times):
                with trio.move_on_after(self.patience) as scope:
                    await last.hear.broadcast(number)
                    self.outcomes.append(await last.heard.call_one())
                if scope.cancelled_caught:
                    self.outcomes.append("cancelled")
        self.done.set()

    @endpoint
    async def hear(self, number: int) -> None:
        self.greeted.append(number)

    @endpoint
    async def heard(self) -> list[int]:
        return self.greeted

    @endpoint(concurrency=2)
    async def told(self) -> list[object]:
        await self.done.wait()
        return self.outcomes


@pytest.mark.daily("real")
async def test_call_of_a_member_that_is_still_being_spawned_waits(backend: Backend):
    """M10: it is served when that one is there, after what was sent before it."""
    async with backend.procs({"gpus": 3}) as procs:
        if isinstance(backend, SimBackend):
            backend.lag.links[current_proc().proc_id, member(procs, 2).proc_id] = (1.0, 1.0)
        greeters = await procs.spawn("greeters", Greeter, 3)
        assert await greeters.slice(gpus=0).told.call_one() == [[0], [0, 1], [0, 1, 2]]


@only_sim
async def test_cancelled_call_of_a_member_that_is_being_spawned_ends(backend: SimBackend):
    """M10, C11: at once; it never runs, and messages go on being counted."""
    async with backend.procs({"gpus": 2}) as procs:
        backend.lag.links[current_proc().proc_id, member(procs, 1).proc_id] = (1.0, 1.0)
        greeters = await procs.spawn("greeters", Greeter, 20, 0.25)
        outcomes = await greeters.slice(gpus=0).told.call_one()
        assert outcomes[0] == "cancelled"
        assert outcomes[-1] == [*range(20)]  # a broadcast that has left is not cancelled


class Waiter(Greeter):
    """Is told what becomes of a call to a member that never comes."""

    async def greet(self, here: Any) -> None:
        try:
            await Greeter.greet(self, here)
        except MeshStopped as error:
            self.outcomes.append(str(error))
            self.done.set()


@only_sim
async def test_call_of_a_member_that_does_not_come_is_refused(backend: SimBackend):
    """M10: after `SPAWN_SECONDS`."""
    async with backend.procs({"gpus": 2}) as procs:
        backend.lag.links[current_proc().proc_id, member(procs, 1).proc_id] = (1.0, 3 * limits.SPAWN_SECONDS)
        waiters = await procs.spawn("waiters", Waiter)
        [text] = await waiters.slice(gpus=0).told.call_one()
        assert f"none was spawned within {limits.SPAWN_SECONDS:g} s" in text
        backend.lag.links.clear()
        assert await waiters.slice(gpus=1).heard.call_one() == []


class Mutual(Actor):
    """Calls another member in the first half of its `lifespan`."""

    def __init__(self, by: Any = None) -> None:
        self.by = by

    @contextlib.asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        here = context(self)
        other = here.actors.slice(gpus=(here.point["gpus"] + 1) % here.point.extent.sizes[0])
        await (other.value.call_one() if self.by is None else self.by.ask.call_one(other))
        yield

    @endpoint
    async def value(self) -> int:
        return 1


class Asked(Actor):
    """Calls whom it is told to."""

    @endpoint
    async def ask(self, other: Any) -> int:
        return int(await other.value.call_one())


@pytest.mark.daily("real")
@pytest.mark.parametrize("count", [1, 2])
async def test_lifespans_that_call_each_other_are_a_deadlock(backend: Backend, count: int):
    """C8: so is one that calls its own actor; the spawn fails by the error, which draws the cycle."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs({"gpus": count}) as procs:
            await procs.spawn("mutual", Mutual)
    [error] = [leaf for leaf in trimesh.leaves(caught.value) if isinstance(leaf, DeadlockError)]
    assert [(actor, name) for actor, name, _ in error.cycle][:1] == [("Mutual", "lifespan")]
    assert "lifespan runs, and awaits" in str(error)


async def test_lifespan_that_waits_for_itself_by_another_actor_is_a_deadlock(backend: Backend):
    """C8."""
    async with no_deadline(), backend.procs({"gpus": 1}) as procs:
        asked = await procs.spawn("asked", Asked)
        with pytest.raises(MeshErrorGroup) as caught:
            await procs.spawn("mutual", Mutual, asked)
    assert caught.group_contains(DeadlockError)


class Patient(Mutual):
    """Gives up."""

    @contextlib.asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        with trio.move_on_after(0.25):
            async with Mutual.lifespan(self):
                pass
        yield


async def test_lifespan_whose_own_deadline_ends_its_wait_is_no_deadlock(backend: Backend):
    """C8."""
    async with backend.procs({"gpus": 1}) as procs:
        patient = await procs.spawn("patient", Patient)
        assert await patient.value.call_one() == 1
