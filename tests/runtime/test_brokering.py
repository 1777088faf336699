"""Calls between meshes that have spawners of their own, through the API."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from tests.patience import HANG_SECONDS

from trimesh import Actor, MeshErrorGroup, MeshStopped, ProcDied, current_rank, endpoint, leaves, this_host

pytestmark = pytest.mark.real


class Node(Actor):
    """Calls others, and is called; with `depth` it owns a mesh, whose actors are of its kind."""

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth
        self.inner: Any = None
        self.notes = list[Any]()
        self.is_held = trio.Event()
        self.is_released = trio.Event()

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        if not self.depth:
            yield
            return
        async with this_host().spawn_procs({"k": 1}, name="inner", preload=("wave",)) as procs:
            self.inner = await procs.spawn("inner", Node, self.depth - 1)
            yield

    @endpoint(concurrency=100, group="watch")
    async def who(self) -> tuple[int, int, bool]:
        return os.getpid(), os.getppid(), "wave" in sys.modules

    @endpoint(concurrency=100, group="watch")
    async def handle(self) -> Any:
        return self.inner

    @endpoint(concurrency=100, group="watch")
    async def wait_held(self) -> None:
        await self.is_held.wait()

    @endpoint(concurrency=100, group="watch")
    async def wait_released(self) -> None:
        await self.is_released.wait()

    @endpoint(concurrency=100)
    async def hold(self) -> None:
        self.is_held.set()
        try:
            await trio.sleep_forever()
        finally:
            self.is_released.set()

    @endpoint
    async def note(self, note: Any) -> None:
        self.notes.append(note)

    @endpoint
    async def noted(self) -> list[Any]:
        return self.notes

    @endpoint
    async def send(self, other: Any, count: int) -> None:
        for number in range(count):
            await other.note.broadcast((current_rank(), number))
        await other.noted.call()

    @endpoint(concurrency=100)
    async def ask(self, other: Any) -> list[int]:
        return [pid for pid, _, _ in (await other.who.call()).values()]

    @endpoint(concurrency=100)
    async def try_hold(self, other: Any) -> tuple[str, Any]:
        """Call an endpoint that never ends; return what it came to."""
        try:
            await other.hold.call_one()
        except ProcDied as error:
            return "died", (error.signal, error.reason, error.maybe_executed)
        except MeshStopped:
            return "stopped", None
        return "returned", None


@asynccontextmanager
async def two_meshes(depth: int = 0, size: int = 2) -> AsyncGenerator[tuple[Any, Any], None]:
    """Sibling meshes with spawners of their own."""
    async with (
        this_host().spawn_procs({"n": size}, name="left", preload=("csv",)) as left,
        this_host().spawn_procs({"n": size}, name="right", preload=("colorsys",)) as right,
    ):
        yield await left.spawn("left", Node, depth), await right.spawn("right", Node, depth)


async def pids_of(mesh: Any) -> list[int]:
    return [pid for pid, _, _ in (await mesh.who.call()).values()]


async def test_meshes_with_different_preload_call_each_other() -> None:
    """A trainer calls a generator and the other way round, at the same moment."""
    async with two_meshes() as (left, right):
        assert len({parent for mesh in (left, right) for _, parent, _ in (await mesh.who.call()).values()}) == 2
        seen = dict[str, Any]()

        async def call(name: str, mesh: Any, other: Any) -> None:
            seen[name] = list((await mesh.ask.call(other)).values())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call, "left", left, right)
            nursery.start_soon(call, "right", right, left)

        assert seen == {"left": [await pids_of(right)] * 2, "right": [await pids_of(left)] * 2}


async def test_messages_keep_their_order_through_a_new_link() -> None:
    """Two senders each; the link is made for the first message."""
    async with two_meshes() as (left, right):
        await left.send.call(right, 200)

        for noted in (await right.noted.call()).values():
            for rank in range(2):
                assert [number for sender, number in noted if sender == rank] == list(range(200))


async def test_workers_of_workers_call_across() -> None:
    """Two levels down on either side, and the controller calls all of them."""
    async with two_meshes(depth=2, size=1) as (left, right):
        chains = list[list[Any]]()
        for mesh in (left, right):
            inner = await mesh.handle.call_one()
            chains.append([mesh, inner, await inner.handle.call_one()])
        everyone = [mesh for chain in chains for mesh in chain]
        pids = [(await mesh.who.call_one())[0] for mesh in everyone]
        assert len(set(pids)) == 6

        for mesh in everyone:
            for other, pid in zip(everyone, pids, strict=True):
                assert await mesh.ask.call_one(other) == [pid]


async def test_process_of_a_worker_imports_what_preload_names() -> None:
    """O1: a worker has one spawner for all its meshes, and hands `preload` on to each process."""
    async with this_host().spawn_procs({"n": 1}, preload=("csv",)) as procs:
        outer = await procs.spawn("outer", Node, 1)
        inner = await outer.handle.call_one()

        assert [(await mesh.who.call_one())[2] for mesh in (outer, inner)] == [False, True]


class WarmNode(Actor):
    """Has a warm host inside a worker."""

    @endpoint
    async def are_loaded(self) -> list[bool]:
        async with this_host().warm(preload=("wave",)) as host:
            procs = await host.spawn_procs({"n": 1})
            first = await procs.spawn("first", Node)
            async with host.spawn_procs({"n": 1}) as more:
                second = await more.spawn("second", Node)
                return [(await mesh.who.call_one())[2] for mesh in (first, second)]


async def test_warm_host_in_a_worker_imports_what_preload_names() -> None:
    """O1: for every mesh of its block."""
    async with this_host().spawn_procs({"n": 1}) as procs:
        assert await (await procs.spawn("warm", WarmNode)).are_loaded.call_one() == [True, True]


@pytest.mark.parametrize("is_linked", [True, False], ids=["in a call", "with a new link"])
async def test_killed_callee_gives_the_caller_its_diagnosis(is_linked: bool) -> None:
    """X3: a caller elsewhere gets `ProcDied` from its call, with the signal; its own block goes on."""
    results = list[Any]()

    async def call(caller: Any, target: Any) -> None:
        results.append(await caller.try_hold.call_one(target))

    async with this_host().spawn_procs({"n": 1}, name="left", preload=("csv",)) as left:
        caller = await left.spawn("left", Node)
        async with trio.open_nursery() as nursery:
            with pytest.raises(MeshErrorGroup) as caught:
                async with this_host().spawn_procs({"n": 1}, name="right", preload=("colorsys",)) as right:
                    callee = await right.spawn("right", Node)
                    if is_linked:
                        nursery.start_soon(call, caller, callee)
                        await callee.wait_held.call_one()
                    os.kill((await callee.who.call_one())[0], signal.SIGKILL)
                    await trio.sleep_forever()
            if not is_linked:
                await call(caller, callee)
        assert len(await pids_of(caller)) == 1

    assert [leaf.signal for leaf in leaves(caught.value) if isinstance(leaf, ProcDied)] == [signal.SIGKILL]
    assert results == [("died", (signal.SIGKILL, "killed", is_linked))]


async def test_killed_worker_of_a_worker_gives_the_caller_its_diagnosis() -> None:
    """Its death ends the blocks above it, and their spawner; the caller still learns how it died."""
    results = list[Any]()

    async def call(caller: Any, target: Any) -> None:
        results.append(await caller.try_hold.call_one(target))

    async with this_host().spawn_procs({"n": 1}, name="left", preload=("csv",)) as left:
        caller = await left.spawn("left", Node)
        async with trio.open_nursery() as nursery:
            with pytest.raises(MeshErrorGroup):
                async with this_host().spawn_procs({"n": 1}, name="right", preload=("colorsys",)) as right:
                    callee = await (await right.spawn("right", Node, 1)).handle.call_one()
                    nursery.start_soon(call, caller, callee)
                    await callee.wait_held.call_one()
                    os.kill((await callee.who.call_one())[0], signal.SIGKILL)
                    await trio.sleep_forever()

    assert results == [("died", (signal.SIGKILL, "killed", True))]


async def test_killed_caller_lets_the_callee_s_endpoint_go() -> None:
    """What a dead process had asked for is cancelled."""
    async with this_host().spawn_procs({"n": 1}, name="right", preload=("colorsys",)) as right:
        callee = await right.spawn("right", Node)
        with pytest.raises(MeshErrorGroup):
            async with this_host().spawn_procs({"n": 1}, name="left", preload=("csv",)) as left:
                caller = await left.spawn("left", Node)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(caller.try_hold.call_one, callee)
                    await callee.wait_held.call_one()
                    os.kill((await caller.who.call_one())[0], signal.SIGKILL)
        with trio.fail_after(HANG_SECONDS):
            await callee.wait_released.call_one()


@pytest.mark.parametrize("is_linked", [True, False])
async def test_mesh_whose_block_has_ended_is_stopped_for_callers_elsewhere(is_linked: bool) -> None:
    """M3: no death, whether they had a link or not."""
    async with this_host().spawn_procs({"n": 1}, name="left", preload=("csv",)) as left:
        caller = await left.spawn("left", Node)
        async with this_host().spawn_procs({"n": 1}, name="right", preload=("colorsys",)) as right:
            callee = await right.spawn("right", Node)
            if is_linked:
                await caller.ask.call_one(callee)

        assert await caller.try_hold.call_one(callee) == ("stopped", None)


async def test_killed_spawner_of_the_callee_is_a_death_for_the_caller() -> None:
    """Z05: within moments, without a diagnosis."""
    results = list[Any]()

    async def call(caller: Any, target: Any) -> None:
        results.append(await caller.try_hold.call_one(target))

    async with this_host().spawn_procs({"n": 1}, name="left", preload=("csv",)) as left:
        caller = await left.spawn("left", Node)
        async with trio.open_nursery() as nursery:
            with pytest.raises(MeshErrorGroup):
                async with this_host().spawn_procs({"n": 1}, name="right", preload=("colorsys",)) as right:
                    callee = await right.spawn("right", Node)
                    nursery.start_soon(call, caller, callee)
                    await callee.wait_held.call_one()
                    os.kill((await callee.who.call_one())[1], signal.SIGKILL)
                    await trio.sleep_forever()

    assert results == [("died", (None, "lost", True))]
