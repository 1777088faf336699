"""Calls that asyncio code starts and awaits later: whose deadline they have, what cancels them (rule A1, K04, K05)."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
import trio
from tests.aio.loops import Attempt
from tests.aio.test_deadlines import Clock
from tests.conformance.probe import Probe
from tests.patience import HANG_SECONDS

import trimesh
from trimesh import MeshErrorGroup, RemoteCancelled, StartedCall, endpoint, leaves, this_host

pytestmark = pytest.mark.real

BUDGET_SECONDS = 10 * HANG_SECONDS
"""Of calls that end long before."""


class Driver(trimesh.aio.Actor):
    """Starts calls to others, from asyncio."""

    def __init__(self) -> None:
        self.kept: StartedCall[Any] | None = None

    @endpoint
    async def left(self, clock: Clock, *, in_task: bool = False) -> float:
        """Say how much time a started call has."""

        async def start() -> StartedCall[float]:
            return clock.left.call_one.start()

        started = await asyncio.create_task(start()) if in_task else await start()
        return await started

    @endpoint
    async def keep(self, probe: Probe, name: str) -> None:
        self.kept = getattr(probe, name).call_one.start()

    @endpoint
    async def start_and_hold(self, probe: Probe) -> None:
        self.kept = probe.hold.call_one.start()
        await asyncio.Event().wait()

    @endpoint
    async def hold_in_group(self, probe: Probe) -> None:
        async with asyncio.TaskGroup() as group:
            probe.hold.call_one.start_in(group)
            probe.hold_many.call_one.start_in(group, "many")

    @endpoint
    async def collect(self) -> Any:
        assert self.kept is not None
        return await self.kept


async def test_started_call_has_the_deadline_of_the_endpoint() -> None:
    """A1, D03, K05: not where another task of asyncio has started it, as for what that awaits."""
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        driver = await procs.slice(gpus=0).spawn("driver", Driver)
        clock = await procs.slice(gpus=1).spawn("clock", Clock)
        with trio.fail_after(BUDGET_SECONDS):
            assert 0.5 * BUDGET_SECONDS < await driver.left.call_one(clock) <= BUDGET_SECONDS
            assert await driver.left.call_one(clock, in_task=True) == math.inf
        assert await driver.left.call_one(clock) == math.inf


async def test_cancel_of_the_endpoint_cancels_what_it_has_started() -> None:
    """A1, C01, K05: it has unwound over there when the handle says so."""
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        driver = await procs.slice(gpus=0).spawn("driver", Driver)
        probe = await procs.slice(gpus=1).spawn("probe", Probe)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(driver.start_and_hold.call_one, probe)
            await probe.wait.call_one("hold")
            nursery.cancel_scope.cancel()
        with pytest.raises(RemoteCancelled):
            await driver.collect.call_one()
        assert "hold cancelled" in await probe.seen.call_one()


async def test_started_call_outlives_an_endpoint_that_has_returned() -> None:
    """A1, K05: it belongs to the actor, which awaits it later; the actor's end cancels it."""
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        probe = await procs.slice(gpus=1).spawn("probe", Probe)
        async with procs.slice(gpus=0).spawn("driver", Driver) as driver:
            await driver.keep.call_one(probe, "wait_for_gate")
            await probe.wait.call_one("gate")
            await probe.open_gate.call_one()
            assert await driver.collect.call_one() == "gate"
            await driver.keep.call_one(probe, "hold")
            await probe.wait.call_one("hold")
        assert "hold cancelled" in await probe.seen.call_one()


@pytest.mark.daily
async def test_calls_of_a_task_group_are_cancelled_with_it() -> None:
    """A1, C01, K05: the group waits until all of them have unwound."""
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        driver = await procs.slice(gpus=0).spawn("driver", Driver)
        probe = await procs.slice(gpus=1).spawn("probe", Probe)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(driver.hold_in_group.call_one, probe)
            await probe.wait.call_one("many")
            nursery.cancel_scope.cancel()
        seen = await probe.seen.call_one()
        assert "many cancelled" in seen


@pytest.mark.daily
def test_task_group_owns_what_is_started_in_it(run) -> None:
    """A1, K04: it waits for the call; an error fails it at once, a call that was cancelled does not."""

    async def main() -> None:
        async with trimesh.aio.spawn_procs({"gpus": 2}) as procs:
            probes = await procs.spawn("probes", Probe)
            async with asyncio.TaskGroup() as group:
                first = probes.wait_for_gate.call.start_in(group, "first")
                cut = probes.slice(gpus=0).hold.call_one.start_in(group)
                await probes.wait.call("first")
                cut.cancel("enough")
                await probes.open_gate.call()
            assert first.done
            assert cut.was_cut
            assert (await first).values() == ("first", "first")
            with pytest.raises(RemoteCancelled, match="enough"):
                await cut

            async def together() -> None:
                async with asyncio.TaskGroup() as group:
                    probes.slice(gpus=0).hold_many.call_one.start_in(group, "beside")
                    await probes.slice(gpus=0).wait.call_one("beside")
                    probes.fail.call.start_in(group, ValueError("no"), [1])
                    await asyncio.Event().wait()

            error = await Attempt(together()).over()
            assert isinstance(error, ExceptionGroup)
            assert [str(leaf) for leaf in leaves(error)] == ["no"]
            assert "beside cancelled" in await probes.slice(gpus=0).seen.call_one()

    run(main)


@pytest.mark.daily
def test_task_group_that_is_closed_takes_no_call(run) -> None:
    """A1, K04: nor does what is no group; nothing of it stays."""

    async def main() -> None:
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            probe: Any = await procs.spawn("probe", Probe)
            async with asyncio.TaskGroup() as group:
                pass
            with pytest.raises(RuntimeError):
                probe.hold.call_one.start_in(group)
            with pytest.raises(TypeError, match=r"asyncio\.TaskGroup"):
                probe.hold.call_one.start_in(probe)
            assert await probe.note.call_one("alive") == "alive"

    run(main)


def test_block_in_asyncio_owns_what_its_body_starts(run) -> None:
    """A1, E01, K04: left by an error it cancels that; a timeout of asyncio around the start does not."""

    async def main() -> None:
        with pytest.raises(MeshErrorGroup) as caught:
            async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
                probe = await procs.spawn("probe", Probe)
                clock = await procs.spawn("clock", Clock)
                async with asyncio.timeout(BUDGET_SECONDS):
                    assert await clock.left.call_one.start() == math.inf
                held = probe.hold.call_one.start()
                await probe.wait.call_one("hold")
                raise ValueError("body")
        assert [str(leaf) for leaf in leaves(caught.value)] == ["body"]
        with pytest.raises(RemoteCancelled):
            async with trimesh.aio.open_trio():
                await held

    run(main)


async def test_deadline_of_the_block_around_asyncio_is_that_of_the_call() -> None:
    """A1, D03, K04: a mesh in asyncio code, inside of an endpoint that has a budget."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        nested = await procs.spawn("nested", Nested)
        with trio.fail_after(BUDGET_SECONDS):
            assert 0.5 * BUDGET_SECONDS < await nested.left_in_a_mesh.call_one() <= BUDGET_SECONDS


class Nested(trimesh.aio.Actor):
    """Has a mesh of its own."""

    @endpoint
    async def left_in_a_mesh(self) -> float:
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            clock = await procs.spawn("clock", Clock)
            return await clock.left.call_one.start()


@pytest.mark.daily
async def test_thread_is_told_what_to_write() -> None:
    """A1, K06: a call cannot be started in a thread, whose task would have to wait for it."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        probe = await procs.spawn("probe", Probe)
        with pytest.raises(RuntimeError, match=r"from_thread.*submit"):
            await trio.to_thread.run_sync(probe.rank.call_one.start)
        assert await probe.rank.call_one() == 0
