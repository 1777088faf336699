"""Handles that travel, and actors that own (API 1; rules C5, M3, M5, M7)."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import pytest
import trio
from tests.conformance.meshes import Backend, attempt, member, only_real
from tests.conformance.probe import Probe

import trimesh
from trimesh import Actor, ActorMesh, MeshErrorGroup, MeshStopped, ProcDied, endpoint, this_host, this_proc


class Counter(Actor):
    """Counts."""

    def __init__(self, start: int = 0) -> None:
        self.value = start

    @endpoint
    async def add(self, by: int = 1) -> int:
        self.value += by
        return self.value

    @endpoint
    async def add_twice(self, by: int) -> int:
        await self.add(by)
        return await self.add(by)

    @endpoint
    async def value_of_class(self) -> str:
        return type(self).__qualname__


class Doubling(Counter):
    """Overrides an endpoint and calls the one that it overrides."""

    @endpoint
    async def add(self, by: int = 1) -> int:
        return await super().add(2 * by)


class Holder(Actor):
    """Keeps a handle."""

    def __init__(self, handle: Any = None) -> None:
        self.handle = handle

    @endpoint
    async def keep(self, handle: Any) -> None:
        self.handle = handle

    @endpoint
    async def give(self) -> Any:
        return self.handle

    @endpoint(concurrency=4)
    async def add(self, by: int) -> list[int]:
        return list((await self.handle.add.call(by)).values())

    @endpoint(concurrency=4)
    async def add_to_slice(self, by: int, selection: dict[str, int]) -> int:
        return await self.handle.slice(**selection).add.call_one(by)

    @endpoint
    async def describe(self) -> tuple[Any, ...]:
        mesh = self.handle
        return mesh.name, dict(mesh.extent), len(mesh), list(mesh.points())

    @endpoint
    async def use_as_mesh(self, what: str) -> None:
        if what == "enter":
            async with self.handle:
                pass
        if what == "spawn":
            self.handle.spawn("x", Counter)
        if what == "await":
            await self.handle


class Peerless(Actor):
    """Calls its own mesh."""

    def __init__(self) -> None:
        self.mesh: Any = None

    @endpoint(concurrency=10)
    async def rank(self) -> int:
        return trimesh.current_rank()

    @endpoint(concurrency=10)
    async def ask_all(self, mesh: Any) -> list[int]:
        await mesh.rank.broadcast()
        return list((await mesh.rank.call()).values())

    @endpoint(concurrency=10)
    async def ask_myself(self, mesh: Any) -> int:
        return await mesh.slice(gpus=trimesh.current_rank()).rank.call_one()


class Owner(Actor):
    """Owns processes of its own for as long as it lives."""

    @endpoint(concurrency=4)
    async def sum(self, values: list[int]) -> int:
        async with this_host().spawn_procs({"n": len(values)}, name="inner") as procs:
            counters = await procs.spawn("counters", Counter)
            total = 0
            for rank, value in enumerate(values):
                total += await counters.slice(n=rank).add.call_one(value)
            return total

    @endpoint(concurrency=4)
    async def lend(self, borrower: Any, value: int) -> int:
        async with this_host().spawn_procs({"n": 1}, name="inner") as procs:
            counters = await procs.spawn("counters", Counter, value)
            return await borrower.borrow.call_one(counters)

    @endpoint(concurrency=4)
    async def borrow(self, counters: Any) -> int:
        return await counters.add.call_one(100)

    @endpoint(concurrency=4)
    async def hold(self, observer: Probe) -> None:
        async with this_host().spawn_procs({"n": 1}, name="inner") as procs:
            probe = await procs.spawn("probe", Probe)
            assert await probe.rank.call_one() == 0
            await observer.note.call_one("holding")
            await probe.hold.call_one()


# ---- plain methods and handles ---------------------------------------------------------------------------------------


async def test_endpoints_are_plain_methods_inside(backend: Backend):
    """C5: also in subclasses, through `super()`."""
    async with backend.procs({"gpus": 1}) as procs:
        counter = await procs.spawn("counter", Counter, 10)
        doubling = await procs.spawn("doubling", Doubling)
        assert await counter.add_twice.call_one(2) == 14
        assert await doubling.add_twice.call_one(2) == 8
        assert await doubling.value_of_class.call_one() == "Doubling"
    local = Doubling(1)
    assert await local.add(2) == 5
    assert await Counter.add(local, 1) == 6


async def test_endpoint_of_a_mesh_is_not_called_directly(backend: Backend):
    """C5: `TypeError` that says what to write."""
    async with backend.procs({"gpus": 1}) as procs:
        counter = await procs.spawn("counter", Counter)
        with pytest.raises(TypeError, match=r"mesh\.add\.call\("):
            counter.add(1)
        with pytest.raises(AttributeError, match=r"no endpoint 'ad'.*add, add_twice"):
            counter.ad  # noqa: B018


@pytest.mark.parametrize(
    "name", ["extent", "slice", "points", "exclude", "flatten", "split", "rename", "alive", "size"]
)
def test_mesh_methods_are_not_those_of_a_live_actor(name: str):
    """C5: `AttributeError` that names what to use."""
    with pytest.raises(AttributeError, match=r"current_point"):
        getattr(Counter(), name)


@pytest.mark.parametrize("name", ["extent", "slice", "points", "alive", "name", "size", "events", "statistics"])
def test_endpoint_names_must_not_collide(name: str):
    """C5: refused when the class is defined."""

    async def method(self: Any) -> None: ...

    method.__name__ = name
    with pytest.raises(TypeError, match=name):
        type("Colliding", (Actor,), {name: endpoint(method)})


# ---- references ------------------------------------------------------------------------------------------------------


async def test_handle_as_an_argument_calls_its_mesh(backend: Backend):
    """API 1: from another process, whole, sliced before and after it was sent."""
    async with backend.procs({"hosts": 2, "gpus": 2}) as procs:
        counters = await procs.spawn("counters", Counter, 10)
        async with backend.procs({"gpus": 1}, name="others") as others:
            holder = await others.spawn("holder", Holder, counters)
            assert await holder.add.call_one(1) == [11] * 4
            assert await holder.add_to_slice.call_one(1, {"hosts": 1, "gpus": 0}) == 12
            name, extent, count, points = await holder.describe.call_one()
            assert (name, extent, count) == ("counters", {"hosts": 2, "gpus": 2}, 4)
            assert points == list(counters.points())
            await holder.keep.call_one(counters.slice(hosts=1))
            assert await holder.add.call_one(1) == [13, 12]
            await holder.keep.call_one(counters.exclude([{"hosts": 0, "gpus": 0}]))
            assert len(await holder.add.call_one(1)) == 3


async def test_handle_that_comes_back_is_a_reference(backend: Backend):
    """API 1: it calls; the owner's own handle is unaffected."""
    async with backend.procs({"gpus": 1}) as procs:
        counters = await procs.spawn("counters", Counter)
        holder = await procs.spawn("holder", Holder, counters)
        back = await holder.give.call_one()
        assert isinstance(back, ActorMesh)
        assert await back.add.call_one(1) == 1
        assert await counters.add.call_one(1) == 2
        assert await pickle.loads(pickle.dumps(counters)).add.call_one(1) == 3
    with pytest.raises((MeshStopped, RuntimeError)):
        await back.add.call_one(1)
    async with backend.procs({"gpus": 1}):
        with pytest.raises((MeshStopped, ProcDied, RuntimeError)) as caught:
            await back.add.call_one(1)
        assert not getattr(caught.value, "maybe_executed", False)


@pytest.mark.daily("real")
async def test_workers_call_each_other(backend: Backend):
    """API 1: both ways at once, over links made on demand."""
    async with backend.procs({"gpus": 3}) as procs:
        counters = await procs.spawn("counters", Counter)
        holders = await procs.spawn("holders", Holder, counters)
        async with trio.open_nursery() as nursery:
            for rank in range(3):
                for target in range(3):
                    nursery.start_soon(holders.slice(gpus=rank).add_to_slice.call_one, 1, {"gpus": target})
        assert list((await counters.add.call(0)).values()) == [3, 3, 3]


async def test_actor_calls_its_own_mesh(backend: Backend):
    """API 1: messages to its own process take the same road as all others, casts included."""
    async with backend.procs({"gpus": 3}) as procs:
        peers = await procs.spawn("peers", Peerless)
        assert list((await peers.ask_all.call(peers)).values()) == [[0, 1, 2]] * 3
        assert list((await peers.ask_myself.call(peers)).values()) == [0, 1, 2]


@pytest.mark.parametrize("what", ["enter", "spawn", "await"])
async def test_reference_owns_nothing(backend: Backend, what: str):
    """API 1: it cannot be entered, awaited or spawned on."""
    async with backend.procs({"gpus": 1}) as procs:
        counters = await procs.spawn("counters", Counter)
        holder = await procs.spawn("holder", Holder, counters)
        with pytest.raises((TypeError, AttributeError)):
            await holder.use_as_mesh.call_one(what)
        assert await counters.add.call_one(1) == 1


async def test_actor_of_this_process_is_called_from_elsewhere(backend: Backend):
    """M7: `this_proc()` actors take messages of other processes."""
    async with (
        this_proc().spawn("here", Counter) as here,
        backend.procs({"gpus": 2}) as procs,
    ):
        holders = await procs.spawn("holders", Holder, here)
        assert sorted(total for (total,) in (await holders.add.call(1)).values()) == [1, 2]
        assert await here.add.call_one(1) == 3


# ---- actors that own -------------------------------------------------------------------------------------------------


async def test_actors_own_meshes(backend: Backend):
    """M7: processes of a worker live and end within its block."""
    async with backend.procs({"gpus": 2}) as procs:
        owners = await procs.spawn("owners", Owner)
        assert list((await owners.sum.call([1, 2, 3])).values()) == [6, 6]


async def test_mesh_of_a_worker_is_called_by_another_worker(backend: Backend):
    """M7, API 1: a handle on processes that the controller does not know."""
    async with backend.procs({"gpus": 2}) as procs:
        owners = await procs.spawn("owners", Owner)
        first, second = owners.slice(gpus=0), owners.slice(gpus=1)
        async with trio.open_nursery() as nursery:
            forth = attempt(nursery, first.lend.call_one, second, 1)
            back = attempt(nursery, second.lend.call_one, first, 2)
        assert (forth.value, back.value) == (101, 102)


async def test_cancel_reaches_processes_of_a_worker(backend: Backend):
    """C01, M7: down to the grandchild; nothing of it is left."""
    async with this_proc().spawn("observer", Probe) as observer, backend.procs({"gpus": 1}) as procs:
        owner = await procs.spawn("owner", Owner)
        async with trio.open_nursery() as nursery:
            held = attempt(nursery, owner.hold.call_one, observer)
            await observer.wait.call_one("holding")
            held.cancel()
        assert held.cancelled
        assert await owner.sum.call_one([1]) == 1


async def test_death_of_an_owner_takes_its_processes_along(backend: Backend):
    """M7: the block of the controller raises the death of its own process, once."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with this_proc().spawn("observer", Probe) as observer, backend.procs({"gpus": 1}) as procs:
            owner = await procs.spawn("owner", Owner)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(owner.hold.call_one, observer)
                await observer.wait.call_one("holding")
                backend.kill(procs, 0)
                await trio.sleep_forever()
    assert [type(leaf) for leaf in trimesh.leaves(caught.value)] == [trimesh.ProcDied]
    assert member(procs, 0).pid == trimesh.origin(next(trimesh.leaves(caught.value))).pid


# ---- handles of other programs ---------------------------------------------------------------------------------------


USE = """
import pickle, sys, trio
from trimesh import this_host

async def main():
    handle = pickle.loads(bytes.fromhex(sys.argv[1]))
    print(handle.extent, len(handle.slice(gpus=0)))
    async with this_host().spawn_procs({}):
        for use in (handle.rank.call, handle.rank.choose, handle.rank.broadcast):
            try:
                await use()
            except RuntimeError as error:
                print(type(error).__name__, error)
        pickle.dumps(handle)

trio.run(main)
"""


@only_real
async def test_handle_of_another_program_is_refused_in_words(backend: Backend):
    """C5: it would never reach the processes, which live on; what needs none of them works."""
    async with backend.procs() as procs:
        probes = await procs.spawn("probes", Probe)
        arguments = [sys.executable, "-c", USE, pickle.dumps(probes).hex()]
        done = await trio.run_process(arguments, capture_stdout=True)
        lines = done.stdout.decode().splitlines()
        assert lines[0] == "Extent(gpus=2) 1"
        assert len(lines) == 4
        for line in lines[1:]:
            assert line.startswith("RuntimeError a handle works only in the program that spawned the mesh")
            assert "the handle on 'probes' came from another program" in line
        assert [*(await probes.rank.call()).values()] == [0, 1]
