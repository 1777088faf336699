"""Restarts that wait for themselves: members that are lost together and call each other as they begin again (C8)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from tests.conformance.meshes import Backend, RealBackend, only_real, only_sim
from tests.conformance.nodes import no_deadline
from tests.conformance.supervised import reading, remake, restart

import trimesh
from trimesh import Actor, DeadlockError, MeshErrorGroup, Restarted, RestartLimit, context, endpoint, this_proc


class Heir(Actor):
    """A replacement begins with what it inherits: from the next member, unless a subclass says otherwise."""

    def __init__(self, *, may_be_alone: bool = True, book: Any = None) -> None:
        self.may_be_alone = may_be_alone
        self.book = book
        self.state = "new"

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None]:
        if context(self).incarnation:
            try:
                self.state = "heir of " + await self.inherit()
            except* DeadlockError:
                if not self.may_be_alone:
                    raise
                self.state = "alone"
        async with trio.open_nursery() as self.nursery:
            yield
            self.nursery.cancel_scope.cancel()

    async def inherit(self) -> str:
        return await self.inherit_from(context(self).actors)

    async def inherit_from(self, others: Any) -> str:
        point = context(self).point
        return str(await others.slice(gpus=(point["gpus"] + 1) % point.extent.sizes[0]).value.call_one())

    @endpoint
    async def value(self) -> str:
        return self.state

    @endpoint
    async def fail_later(self) -> None:
        async def fail() -> None:
            raise KeyError("background")

        self.nursery.start_soon(fail)


class Book(Actor):
    """Knows actors that are spawned later, and asks them."""

    def __init__(self) -> None:
        self.known: Any = None

    @endpoint
    async def put(self, actors: Any) -> None:
        self.known = actors

    @endpoint
    async def actors(self) -> Any:
        return self.known

    @endpoint
    async def ask(self) -> str:
        return str(await self.known.value.call_one())


@pytest.mark.daily("real")
@pytest.mark.parametrize("count", [2, 3])
async def test_one_of_the_replacements_that_call_each_other_gets_the_error(backend: Backend, count: int):
    """C8: it may begin by itself; then the others go on."""
    async with no_deadline(), backend.procs({"gpus": count}, supervision=restart()) as procs, reading(procs) as log:
        heirs = await procs.spawn("heirs", Heir)
        for rank in range(count):
            backend.kill(procs, rank)
        await log.wait(Restarted, count)
        states = sorted((await heirs.value.call()).values())
        assert states == sorted("heir of " * depth + "alone" for depth in range(count))


async def test_actors_that_are_remade_without_their_processes_are_a_deadlock_too(backend: Backend):
    """C8."""
    async with no_deadline(), backend.procs() as procs:
        heirs = await procs.supervised(remake()).spawn("heirs", Heir)
        async with reading(heirs) as log:
            await heirs.fail_later.call()
            await log.wait(Restarted, 2)
        assert sorted((await heirs.value.call()).values()) == ["alone", "heir of alone"]


async def test_restarts_that_stay_a_deadlock_end_the_mesh_by_it(backend: Backend):
    """C8, R03: with the cycle in the text."""
    async with no_deadline():
        with pytest.raises(MeshErrorGroup) as caught:
            async with backend.procs(supervision=restart(intensity=3, period=1000)) as procs:
                await procs.spawn("heirs", Heir, may_be_alone=False)
                for rank in range(2):
                    backend.kill(procs, rank)
                await trio.sleep_forever()
    [error] = trimesh.leaves(caught.value)
    assert isinstance(error, RestartLimit)
    assert "lifespan waits for itself" in str(error)


class HeirOfLater(Heir):
    """Inherits from actors that are spawned, and made again, after it."""

    async def inherit(self) -> str:
        return await self.inherit_from(await self.book.actors.call_one())


class Later(Actor):
    """Has a value at once."""

    @endpoint
    async def value(self) -> str:
        return "later"


async def test_later_actors_of_the_same_processes_are_waited_for_too(backend: Backend):
    """C8: they are made again when the earlier ones have been."""
    async with (
        this_proc().spawn("book", Book) as book,
        no_deadline(),
        backend.procs(supervision=restart()) as procs,
        reading(procs) as log,
    ):
        heirs = await procs.spawn("heirs", HeirOfLater, book=book)
        await book.put.call_one(await procs.spawn("later", Later))
        for rank in range(2):
            backend.kill(procs, rank)
        await log.wait(Restarted, 2)
        assert sorted((await heirs.value.call()).values()) == ["alone", "heir of later"]


class HeirOfBook(Heir):
    """Lets an actor of the owner ask."""

    async def inherit(self) -> str:
        return str(await self.book.ask.call_one())


@only_real
async def test_actor_of_the_owner_that_waits_for_a_restart_that_waits_for_it(backend: RealBackend):
    """C8: its own call fails. (The simulated world has a deadline, which its own waits have, too.)"""
    async with (
        this_proc().spawn("book", Book) as book,
        no_deadline(),
        backend.procs({"gpus": 1}, supervision=restart()) as procs,
        reading(procs) as log,
    ):
        heir = await procs.spawn("heir", HeirOfBook, book=book)
        await book.put.call_one(heir)
        backend.kill(procs, 0)
        await log.wait(Restarted)
        assert await book.ask.call_one() == "alone"


async def call(other: Any) -> str:
    [value] = (await other.value.call()).values()
    return str(value)


async def choose(other: Any) -> str:
    return str(await other.value.choose())


async def started(other: Any) -> str:
    async with trio.open_nursery() as nursery:
        return str(await other.value.call_one.start_in(nursery))


async def mapped(other: Any) -> str:
    async with other.echo.map(["mapped"]) as results:
        return str([value async for value in results])


async def streamed(other: Any) -> str:
    async with other.values.stream() as values:
        return str([value async for _, value in values])


VERBS: dict[str, Callable[[Any], Awaitable[str]]] = {
    one.__name__: one for one in (call, choose, started, mapped, streamed)
}


class HeirByVerb(Heir):
    """Inherits by another verb."""

    def __init__(self, verb: str) -> None:
        super().__init__()
        self.verb = verb

    async def inherit(self) -> str:
        here = context(self)
        return await VERBS[self.verb](here.actors.slice(gpus=1 - here.point["gpus"]))

    @endpoint
    async def echo(self, value: str) -> str:
        return value

    @endpoint
    async def values(self) -> AsyncGenerator[str]:
        yield self.state


@only_sim
@pytest.mark.parametrize("verb", VERBS)
async def test_every_verb_gets_the_error(backend: Backend, verb: str):
    """C8."""
    async with no_deadline(), backend.procs(supervision=restart()) as procs, reading(procs) as log:
        heirs = await procs.spawn("heirs", HeirByVerb, verb)
        for rank in range(2):
            backend.kill(procs, rank)
        await log.wait(Restarted, 2)
        assert "alone" in (await heirs.value.call()).values()


class HeirOfFirst(Heir):
    """Only the others inherit, from the first."""

    async def inherit(self) -> str:
        if context(self).point["gpus"] == 0:
            await trio.sleep(0.05)
            return "nobody"
        return str(await context(self).actors.slice(gpus=0).value.call_one())


async def test_replacement_may_wait_for_another_that_waits_for_none(backend: Backend):
    """C8: no false alarm."""
    async with no_deadline(), backend.procs({"gpus": 3}, supervision=restart()) as procs, reading(procs) as log:
        heirs = await procs.spawn("heirs", HeirOfFirst, may_be_alone=False)
        for rank in range(3):
            backend.kill(procs, rank)
        await log.wait(Restarted, 3)
        assert (await heirs.value.call()).values() == ("heir of nobody", *["heir of heir of nobody"] * 2)
