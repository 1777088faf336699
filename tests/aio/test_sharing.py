"""Actors of a name, processes that are shared, and handlers of failures, from asyncio (K04) and in it (K05)."""

from __future__ import annotations

import asyncio

import pytest
import trio
from tests.aio.engines import Engine
from tests.aio.loops import Attempt
from tests.conformance.probe import Probe

import trimesh
from trimesh import Failure, Isolate, ProcDied, context, endpoint, leaves, this_host

pytestmark = pytest.mark.real


class Asker(trimesh.aio.Actor):
    """Spawns on the processes that it runs in."""

    @endpoint
    async def pid_of(self, name: str) -> int:
        one = await context().procs.get_or_spawn(name, Probe)
        return await one.pid.call_one()

    @endpoint
    async def ranks_of_own(self) -> list[int]:
        async with context().procs.spawn("own", Probe) as own:
            return list((await own.rank.call()).values())

    @endpoint
    async def ask_for_another_class(self, name: str) -> None:
        await context().procs.get_or_spawn(name, Asker)


def test_actor_of_a_name_is_one(run) -> None:
    """M9, K04: for tasks that ask at the same time, too."""

    async def main() -> None:
        async with trimesh.aio.spawn_procs({"gpus": 2}) as procs:
            ones = await asyncio.gather(*(procs.get_or_spawn("one", Probe) for _ in range(5)))
            assert len({await one.pid.call_one() for one in ones}) == 1
            with pytest.raises(TypeError, match="is of class Probe, got Asker"):
                await procs.get_or_spawn("one", Asker)

    run(main)


async def test_asyncio_actors_ask_for_actors_of_a_name() -> None:
    """M2, M9, K05: all get the one of the mesh; a block of theirs owns what they spawn there."""
    async with this_host().spawn_procs({"gpus": 2}, shared=True) as procs:
        askers = await procs.spawn("askers", Asker)
        assert len({*(await askers.pid_of.call("one")).values()}) == 1
        assert (await askers.slice(gpus=0).ranks_of_own.call_one()) == [0, 1]
        with pytest.raises(TypeError, match="is of class Probe, got Asker"):
            await askers.slice(gpus=1).ask_for_another_class.call_one("one")


async def test_asyncio_actor_is_one_of_a_name() -> None:
    """M9, K05: as any actor."""
    async with this_host().spawn_procs({"gpus": 2}, shared=True) as procs:
        first = await procs.get_or_spawn("asker", Asker)
        second = await procs.get_or_spawn("asker", Asker)
        assert await first.pid_of.call_one("x") == await second.pid_of.call_one("x")


def test_handler_takes_a_death(run) -> None:
    """P5, K04: the body goes on; the call that was under way raises the death."""

    async def main() -> None:
        asked: list[Failure] = []

        def handler(failure: Failure) -> bool:
            asked.append(failure)
            return True

        async with trimesh.aio.spawn_procs({"gpus": 2}) as procs:
            probes = await procs.spawn("probes", Probe)
            async with procs.on_failure(handler):
                held = Attempt(probes.slice(gpus=1).hold.call_one())
                await probes.slice(gpus=1).wait.call_one("hold")
                await procs.kill([{"gpus": 1}])
                assert isinstance(await held.over(), ProcDied)
                assert [failure.points for failure in asked] == [({"gpus": 1},)]
                assert (await probes.alive().rank.call()).values() == (0,)

    run(main)


def test_error_of_a_handler_cancels_the_body(run) -> None:
    """P5, K04: its block raises it, and the failure is not handled."""

    async def main() -> None:
        def handler(failure: Failure) -> bool:
            raise LookupError("handler")

        with pytest.raises(ExceptionGroup) as caught:
            async with trimesh.aio.spawn_procs({"gpus": 1}, supervision=Isolate()) as procs, procs.on_failure(handler):
                await procs.kill([{"gpus": 0}])
                await asyncio.Event().wait()
        assert "handler" in [str(leaf) for leaf in leaves(caught.value)]

    run(main)


async def test_handler_is_asked_of_failures_of_asyncio_actors() -> None:
    """P5, E10, K05: of a broadcast, say, that has no caller; the mesh goes on."""
    asked: list[Failure] = []
    has_come = trio.Event()

    def handler(failure: Failure) -> bool:
        asked.append(failure)
        has_come.set()
        return True

    async with this_host().spawn_procs({"gpus": 2}) as procs:
        engines = await procs.spawn("engines", Engine)
        async with procs.on_failure(handler):
            await engines.slice(gpus=1).fail.broadcast()
            await has_come.wait()
        assert await engines.slice(gpus=0).square.call_one(3) == 9
    [failure] = asked
    assert failure.points == ({"gpus": 1},)
    assert "engine trouble" in str(failure.reason)
