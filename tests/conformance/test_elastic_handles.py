"""Handles on meshes that are resized: in other processes, and those that follow (`options(members="follow")`)."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import trio
from tests.conformance.meshes import Backend, attempt, member
from tests.conformance.supervised import Ledger

import trimesh
from trimesh import Isolate, MembershipChanged, MeshErrorGroup, MeshStopped, endpoint, leaves
from trimesh._runtime.life.current import current_proc
from trimesh.ids import ProcId

SHAPE = {"replica": 2, "gpus": 2}


class Away(Ledger):
    """Uses a handle in another process."""

    def __init__(self) -> None:
        super().__init__()
        self.mesh: Any = None

    @endpoint
    async def keep(self, mesh: Any) -> None:
        self.mesh = mesh

    @endpoint
    async def ranks(self) -> list[int]:
        return [*(await self.mesh.rank.call()).values()]

    @endpoint
    async def followed(self) -> list[int]:
        return [*(await self.mesh.rank.options(members="follow").call()).values()]

    @endpoint
    async def look_again(self) -> dict[str, int]:
        self.mesh = await trimesh.current_view(self.mesh)
        return dict(self.mesh.extent)

    @endpoint(group="watch", concurrency=100)
    async def wait_gone(self, proc_ids: list[int]) -> None:
        """Return when the ends of processes are known here."""
        while any(current_proc().death_of(ProcId(one)) is None for one in proc_ids):  # noqa: ASYNC110
            await trio.sleep(0.001)

    @endpoint
    async def look(self) -> int:
        return len(await trimesh.current_view(self.mesh))


async def test_other_processes_learn_who_has_left_and_who_has_come(backend: Backend):
    """P6: their old handles raise, too; the owner tells what there is now."""
    async with (
        backend.procs({"gpus": 1}, name="home") as home,
        backend.procs(SHAPE, supervision=Isolate()) as procs,
    ):
        ledgers = await procs.spawn("ledgers", Ledger)
        away = await home.spawn("away", Away)
        await away.keep.call_one(ledgers)
        assert await away.ranks.call_one() == [0, 1, 2, 3]
        await procs.resize(replica=3)
        assert await away.ranks.call_one() == [0, 1, 2, 3]
        assert await away.look_again.call_one() == {"replica": 3, "gpus": 2}
        assert await away.ranks.call_one() == [0, 1, 2, 3, 4, 5]
        grown = await trimesh.current_view(ledgers)
        await procs.resize(replica=1)
        # A call that is sent before the ends of the processes are known there is told how they have ended.
        await away.wait_gone.call_one([int(member(grown, rank).proc_id) for rank in range(2, 6)])
        for _ in range(2):
            with pytest.raises(MeshErrorGroup) as caught:
                await away.ranks.call_one()
            assert {type(leaf) for leaf in leaves(caught.value)} == {MembershipChanged}
            assert sorted(point.rank for point in trimesh.coords(caught.value)) == [2, 3, 4, 5]
        assert await away.look_again.call_one() == {"replica": 1, "gpus": 2}
        assert await away.ranks.call_one() == [0, 1]
        await procs.resize(replica=2)
        assert await away.look_again.call_one() == SHAPE
        assert await away.ranks.call_one() == [0, 1, 2, 3]
        await away.keep.call_one(await trimesh.current_view(ledgers))
        assert await away.ranks.call_one() == [0, 1, 2, 3]


async def test_endpoint_follows_the_mesh(backend: Backend):
    """P6: verbs mean the members that are there when they are taken; of a part, those that have not left."""
    async with backend.procs(SHAPE, supervision=Isolate()) as procs:
        ledgers = await procs.spawn("ledgers", Ledger)
        every = ledgers.rank.options(members="follow")
        leads = ledgers.slice(gpus=1).rank.options(members="follow")
        part = ledgers.slice(replica=1).rank.options(members="follow", abandon_after=1.0)
        await procs.resize(replica=3)
        values = await every.call()
        assert dict(values.extent) == {"replica": 3, "gpus": 2}
        assert [*values.values()] == list(range(6))
        assert [*(await leads.call()).values()] == [1, 3, 5]
        assert [*(await part.call()).values()] == [2, 3]
        await procs.resize(replica=1)
        assert [*(await every.call()).values()] == [0, 1]
        assert [outcome.value for outcome in (await leads.call_settled()).values()] == [1]
        assert await leads.call_one() == 1
        assert len(await part.call()) == 0
        assert await every.choose() in (0, 1)
        assert await every.call_reduced(operator.add)() == 1
        assert [*(await every.call.start()).values()] == [0, 1]
        await ledgers.bump.options(members="follow").broadcast()
        ledgers.bump.options(members="follow").broadcast_nowait()
        async with every.stream() as results:
            assert sorted([value async for _, value in results]) == [0, 1]
        async with ledgers.note.options(members="follow").map(range(4)) as notes:
            assert sorted([value async for _, value in notes]) == [0, 1, 2, 3]
        assert [*(await ledgers.bump.options(members="follow").call()).values()] == [3, 3]
        with pytest.raises(MeshErrorGroup) as caught:
            await ledgers.rank.options(members="seen").call()
        assert {type(leaf) for leaf in leaves(caught.value)} == {MembershipChanged}
        wrong: Any = "all"
        with pytest.raises(ValueError, match="follow"):
            every.options(members=wrong)


async def test_endpoint_follows_in_other_processes_what_is_known_there(backend: Backend):
    """P6, M3: who has come, or left, once the owner was asked; nothing once it is stopped, of which the owner keeps a
    handle."""
    async with (
        backend.procs({"gpus": 1}, name="home") as home,
        backend.procs({"replica": 2}, supervision=Isolate()) as procs,
    ):
        ledgers = await procs.spawn("ledgers", Ledger)
        away = await home.spawn("away", Away)
        await away.keep.call_one(ledgers)
        for size, before in ((3, [0, 1]), (1, [0, 1, 2])):
            if size > 2:
                await procs.resize(replica=size)
                assert await away.followed.call_one() == before
            else:
                assert await away.followed.call_one() == before
                await procs.resize(replica=size)
            assert await away.look.call_one() == size
            assert await away.followed.call_one() == list(range(size))
        await procs.stop()
        with pytest.raises(MeshStopped, match="ledgers has been stopped"):
            await away.look.call_one()
        assert len(ledgers) == 2


async def test_following_calls_beside_changes_end_well(backend: Backend):
    """P6: whatever is called of a mesh that breathes, `choose` finds one who stays."""
    async with backend.procs({"replica": 1}, supervision=Isolate()) as procs, trio.open_nursery() as nursery:
        ledgers = await procs.spawn("ledgers", Ledger)
        stop = trio.Event()

        async def call() -> int:
            count = 0
            while not stop.is_set():
                try:
                    await ledgers.rank.options(members="follow").choose()
                except MembershipChanged:
                    await trio.lowlevel.checkpoint()
                count += 1
            return count

        callers = [attempt(nursery, call) for _ in range(3)]
        for size in (3, 1, 2, 1):
            await procs.resize(replica=size)
        stop.set()
        assert all([await caller.result() for caller in callers])
