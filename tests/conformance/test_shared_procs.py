"""Processes that are shared: actors of others on them, and actors by name (rules M2, M9)."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import trio
from tests.conformance.meshes import Backend, attempt, kinds
from tests.conformance.probe import Probe
from tests.conformance.supervised import kill_and_wait, reading, restart

import trimesh
from trimesh import Actor, Isolate, MeshErrorGroup, MeshStopped, ProcDied, ProcMesh, context, endpoint, leaves


class Broken(Actor):
    """Cannot be made on one of the processes."""

    def __init__(self) -> None:
        if trimesh.current_rank() == 1:
            raise LookupError("no such device")


class Helper(Actor):
    """Works for whoever has spawned it."""

    def __init__(self, base: int = 0, log: Any = None) -> None:
        self.base = base
        self.log = log

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            if self.log is not None:
                with trio.CancelScope(shield=True):
                    await self.log.note.call(("ended", self.base, trimesh.current_rank()))

    @endpoint
    async def add(self, number: int) -> int:
        self.base += number
        return self.base

    @endpoint
    async def note_later(self, text: str) -> None:
        await trio.sleep(0.01)
        await self.log.note.call((text, trimesh.current_rank()))

    @endpoint
    async def fail(self) -> None:
        raise ArithmeticError("of a helper")

    @endpoint
    async def pid(self) -> int:
        return os.getpid()


class Boss(Actor):
    """Spawns on processes that it does not own."""

    @endpoint
    async def total(self, procs: ProcMesh | None, log: Any = None) -> list[int]:
        where = context().procs if procs is None else procs
        async with where.spawn("helpers", Helper, 10, log) as helpers:
            await helpers.add.call(1)
            found = list((await helpers.add.call(1)).values())
            if log is not None:
                await helpers.note_later.broadcast("sent before the end")
        return found

    @endpoint
    async def hold(self, log: Any, procs: ProcMesh | None) -> None:
        async with (procs or context().procs).spawn("helpers", Helper, 7, log) as helpers:
            await helpers.add.call(1)
            await log.note.call("held")
            await trio.sleep_forever()

    @endpoint
    async def outlast(self) -> list[str]:
        async with context().procs.spawn("helpers", Helper) as helpers:
            pass
        with pytest.raises(MeshErrorGroup) as caught:
            await helpers.add.call(1)
        return [type(leaf).__name__ for leaf in leaves(caught.value)]

    @endpoint
    async def fails(self, way: str) -> tuple[list[str], list[Any]]:
        with pytest.raises(MeshErrorGroup) as caught:
            cls: Any = Broken if way == "start" else Helper
            async with context().procs.spawn("helpers", cls) as helpers:
                await helpers.slice(gpus=1).fail.broadcast()
                await trio.sleep_forever()
        found = list(leaves(caught.value))
        return [type(leaf).__name__ for leaf in found], [dict(trimesh.origin(leaf).point or {}) for leaf in found]

    @endpoint
    async def refused(self, procs: Any) -> list[str]:
        texts: list[str] = []
        for way in ("spawn", "await", "get"):
            try:
                if way == "spawn":
                    async with procs.spawn("helpers", Helper):
                        pass
                elif way == "await":
                    await procs.spawn("helpers", Helper)
                else:
                    await procs.get_or_spawn("helper", Helper)
            except RuntimeError as error:
                texts.append(str(error))
        return texts

    @endpoint
    async def forge(self, procs: Any) -> list[str]:
        """Claim that processes are shared which are not."""
        texts: list[str] = []
        procs._shared_by = msgspec.structs.replace(procs._info, is_shared=True)
        try:
            async with procs.spawn("helpers", Helper):
                pass
        except* RuntimeError as group:
            texts += [str(leaf) for leaf in leaves(group)]
        try:
            await procs.get_or_spawn("helper", Helper)
        except RuntimeError as error:
            texts.append(str(error))
        return texts

    @endpoint(concurrency=8)
    async def named(self, name: str, base: int) -> tuple[int, int]:
        one = await context().procs.get_or_spawn(name, Helper, base)
        return await one.add.call_one(1), await one.pid.call_one()

    @endpoint
    async def named_otherwise(self, name: str) -> str:
        try:
            await context().procs.get_or_spawn(name, Probe)
        except TypeError as error:
            return str(error)
        return ""

    @endpoint
    async def hold_named(self, name: str) -> Any:
        return await context().procs.get_or_spawn(name, Helper)


async def test_actor_spawns_beside_itself_and_owns_what_it_spawns(backend: Backend):
    """M9, M3: messages that it has sent run to their end as its block is left; then nothing is left."""
    async with backend.procs({"gpus": 2}, shared=True) as procs:
        log = await procs.slice(gpus=0).spawn("log", Probe)
        boss = await procs.slice(gpus=0).spawn("boss", Boss)
        assert await boss.total.call_one(None, log) == [12, 12]
        seen = await log.seen.call_one()
        assert sorted(seen[:2]) == [("sent before the end", 0), ("sent before the end", 1)]
        assert sorted(seen[2:]) == [("ended", 12, 0), ("ended", 12, 1)]
        assert await boss.total.call_one(procs.slice(gpus=1)) == [12]
        assert await boss.outlast.call_one() == ["MeshStopped", "MeshStopped"]


async def test_cancel_of_the_borrower_ends_what_is_lent(backend: Backend):
    """M9, C01: the clean-up over there has run when the call has been cancelled."""
    async with backend.procs({"gpus": 2}, shared=True) as procs, trio.open_nursery() as nursery:
        log = await procs.slice(gpus=0).spawn("log", Probe)
        boss = await procs.slice(gpus=0).spawn("boss", Boss)
        held = attempt(nursery, boss.hold.call, log, None)
        await log.wait.call("held")
        held.cancel()
        await held.over.wait()
        assert sorted((await log.seen.call_one())[1:]) == [("ended", 8, 0), ("ended", 8, 1)]


async def test_death_of_the_borrower_ends_what_is_lent(backend: Backend):
    """M9: the owner of the processes goes on."""
    async with (
        backend.procs({"gpus": 2}, shared=True) as procs,
        backend.procs({"n": 1}, name="others", supervision=Isolate()) as others,
        trio.open_nursery() as nursery,
    ):
        log = await procs.slice(gpus=0).spawn("log", Probe)
        boss = await others.spawn("boss", Boss)
        held = attempt(nursery, boss.hold.call, log, procs)
        await log.wait.call("held")
        backend.kill(others, 0)
        for rank in range(2):
            await log.wait.call(("ended", 8, rank))
        with pytest.raises(MeshErrorGroup):
            await held.result()


async def test_failures_of_borrowed_actors_are_the_borrowers(backend: Backend):
    """M9, E10, E11: of the start, and of a broadcast; the owner's block goes on."""
    async with backend.procs({"gpus": 2}, shared=True) as procs:
        boss = await procs.slice(gpus=0).spawn("boss", Boss)
        assert await boss.fails.call_one("start") == (["LookupError"], [{"gpus": 1}])
        assert await boss.fails.call_one("broadcast") == (["ArithmeticError"], [{"gpus": 1}])
        assert await boss.total.call_one(None) == [12, 12]


async def test_owner_who_does_not_share_is_asked_in_vain(backend: Backend):
    """M9, M2: at the handle and, whoever asks, at the owner; what is borrowed cannot be awaited."""
    async with backend.procs({"gpus": 2}) as procs:
        boss = await procs.slice(gpus=0).spawn("boss", Boss)
        texts = await boss.refused.call_one(procs)
        assert len(texts) == 3
        assert all("shared=True" in text for text in texts)
        forged = await boss.forge.call_one(procs)
        assert len(forged) == 2
        assert all("from another process needs a shared mesh of processes" in text for text in forged)
    async with backend.procs({"gpus": 2}, shared=True) as procs:
        boss = await procs.slice(gpus=0).spawn("boss", Boss)
        [text] = await boss.refused.call_one(procs)
        assert "async with procs.spawn" in text


async def test_borrowed_actors_end_with_the_processes(backend: Backend):
    """M9: the owner leaves its block while an endpoint still borrows: that is cancelled with the block."""
    with trio.move_on_after(30):
        async with backend.procs({"gpus": 2}, shared=True) as procs, trio.open_nursery() as nursery:
            log = await procs.slice(gpus=0).spawn("log", Probe)
            boss = await procs.slice(gpus=0).spawn("boss", Boss)
            nursery.start_soon(boss.hold.call, log, None)
            await log.wait.call("held")
            nursery.cancel_scope.cancel()
        return
    raise AssertionError("the block did not end")


async def test_borrowed_actors_are_restarted_with_their_process(backend: Backend):
    """M9, R01: by the policy of the processes, for whoever has borrowed them."""
    async with (
        backend.procs({"gpus": 2}, shared=True, supervision=restart()) as procs,
        reading(procs) as log,
        backend.procs({"n": 1}, name="others") as others,
    ):
        borrower = await others.spawn("borrower", Borrower, procs)
        assert await borrower.add.call_one(1) == [2, 2]
        await kill_and_wait(backend, procs, log, 1)
        await add_nothing_until_it_answers(borrower)
        assert await borrower.add.call_one(1) == [3, 2]


async def add_nothing_until_it_answers(borrower: Borrower) -> None:
    """A call that leaves before the borrower has heard of the death is in flight to the dead one (R09)."""
    has_answered = False
    while not has_answered:
        try:
            await borrower.add.call_one(0)
            has_answered = True
        except* ProcDied:
            pass


class Borrower(Actor):
    """Borrows for as long as it lives."""

    def __init__(self, procs: ProcMesh) -> None:
        self.procs = procs
        self.helpers: Any = None

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        async with self.procs.spawn("helpers", Helper, 1) as self.helpers:
            yield

    @endpoint
    async def add(self, number: int) -> list[int]:
        return list((await self.helpers.add.call(number)).values())


@pytest.mark.daily("real")
async def test_all_who_ask_for_a_name_get_one_actor(backend: Backend):
    """M9: at the same time, from the owner and from members; it belongs to the block of the processes."""
    async with backend.procs({"gpus": 3}, shared=True) as procs:
        bosses = await procs.spawn("bosses", Boss)
        found: list[int] = []

        async def ask_here() -> None:
            one = await procs.get_or_spawn("store", Helper, 100)
            assert not one.extent
            found.append(await one.add.call_one(1))

        async def ask_there() -> None:
            found.extend(number for number, _ in (await bosses.named.call("store", 100)).values())

        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(ask_here)
                nursery.start_soon(ask_there)
        assert sorted(found) == list(range(101, 109))
        other = await bosses.slice(gpus=2).named.call_one("other", 0)
        assert other[0] == 1
        handle = await bosses.slice(gpus=1).hold_named.call_one("store")
        assert await handle.add.call_one(1) == 109


async def test_another_class_of_that_name_is_refused(backend: Backend):
    """M9: in words, here and there."""
    async with backend.procs({"gpus": 2}, shared=True) as procs:
        bosses = await procs.spawn("bosses", Boss)
        await procs.get_or_spawn("store", Helper)
        with pytest.raises(TypeError, match="'store' of procs is of class Helper, got Probe"):
            await procs.get_or_spawn("store", Probe)
        assert "is of class Helper, got Probe" in await bosses.slice(gpus=1).named_otherwise.call_one("store")


async def test_name_is_free_again_when_its_actor_is_gone_or_was_not_made(backend: Backend):
    """M9: a spawn that fails is the asker's; one that has ended with its process is made on another."""
    async with backend.procs({"gpus": 2}, shared=True, supervision=Isolate()) as procs, reading(procs) as log:
        with pytest.raises(MeshErrorGroup) as caught:
            await procs.slice(gpus=slice(1, 2)).get_or_spawn("store", Refusing)
        assert kinds(caught.value) == [LookupError]
        one = await procs.get_or_spawn("store", Helper)
        assert await one.add.call_one(1) == 1
        backend.kill(procs, 0)
        await log.wait(trimesh.Died)
        two = await procs.get_or_spawn("store", Helper)
        assert await two.add.call_one(1) == 1


class Refusing(Actor):
    """Is never made."""

    def __init__(self) -> None:
        raise LookupError("refuses")


async def test_named_actor_ends_with_the_block_of_the_processes(backend: Backend):
    """M9."""
    async with backend.procs({"gpus": 1}, shared=True) as procs:
        boss = await procs.spawn("boss", Boss)
        handle = await boss.hold_named.call_one("store")
        await procs.stop()
        with pytest.raises(MeshStopped):
            await handle.add.call_one(1)
        with pytest.raises(RuntimeError):
            await procs.get_or_spawn("store", Helper)
