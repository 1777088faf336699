"""Actors that are asyncio programs: calls, cancels, deadlines, errors, streams and ends are those of all actors."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from unittest.mock import ANY

import pytest
import trio
from tests.aio.engines import Broken, Budget, Engine, Keeper
from tests.aio.loops import Test
from tests.conformance.probe import Probe
from tests.patience import HANG_SECONDS

import trimesh
from trimesh import MeshErrorGroup, leaves, this_host

pytestmark = pytest.mark.real


async def test_endpoints_run_on_one_asyncio_loop_that_drives_trio():
    """K05: a background task of `lifespan` serves them; plain functions see the loop, threads are threads."""
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        engines = await procs.spawn("engines", Engine)
        probes = await procs.spawn("probes", Probe)  # of the other kind, in the same processes
        assert (await engines.square.call(3)).values() == (9, 9)
        assert (await engines.where.call()).values() == tuple(
            {
                "one loop": True,
                "in Trio": True,
                "main thread": True,
                "rank": rank,
                "shade": "of lifespan",
                "actor": True,
            }
            for rank in range(2)
        )
        assert (await engines.in_thread.call()).values() == (False, False)
        assert (await probes.rank.call()).values() == (0, 1)


async def test_calls_are_started_and_awaited_later():
    """A1, K05: an asyncio actor owns what it starts."""
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        engines = await procs.spawn("engines", Engine)
        probes = await procs.spawn("probes", Probe)
        both = engines.ask_both.call(probes.slice(gpus=0), probes.slice(gpus=1))
        assert (await both).values() == ([0, 1], [0, 1])


@pytest.mark.daily
async def test_calls_are_answered_later():
    """A3, K05: by a callback of the loop, when the endpoint has returned."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        engine = await procs.spawn("engine", Engine)
        assert await engine.answer_later.call_one("late") == "late"


@pytest.mark.daily
async def test_cancel_reaches_the_task_and_is_waited_for():
    """C01, C03, K05: other calls of the same engine go on."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        engine = await procs.spawn("engine", Engine)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.hold.call_one, "other")
            await engine.wait_for.call_one("other")
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as inner:
                    inner.start_soon(lambda: engine.hold.call_one("first", after=20))
                    await engine.wait_for.call_one("first")
                    scope.cancel()
            assert "first cancelled" in await engine.seen_so_far.call_one()
            await engine.open_gate.call_one()
        assert "other cancelled" not in await engine.seen_so_far.call_one()


async def test_deadline_cancels_the_task_and_travels_on():
    """D01, D03, K05: what the engine calls itself has the budget of its caller."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        engine = await procs.spawn("engine", Engine)
        budget = await procs.spawn("budget", Budget)
        limit = trio.CancelScope(deadline=trio.current_time() + HANG_SECONDS)

        async def hold() -> None:
            with limit:
                await engine.hold.call_one("slow")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(hold)
            await engine.wait_for.call_one("slow")
            limit.deadline = trio.current_time()
        assert limit.cancelled_caught
        assert "slow cancelled" in await engine.seen_so_far.call_one()
        with trio.fail_after(1000):
            assert 900 < await engine.remaining_there.call_one(budget) <= 1000
        assert await engine.remaining_there.call_one(budget) == float("inf")


async def test_cancel_passes_through_an_engine_once():
    """K05: the task of the engine sees one cancel, after what it has called has unwound."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        engine = await procs.spawn("engine", Engine)
        probe = await procs.spawn("probe", Probe)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.hold_there.call_one, probe)
                await probe.wait.call_one("hold")
                scope.cancel()
        assert await probe.seen.call_one() == ["hold", ANY, "hold cancelled"]
        assert await engine.seen_so_far.call_one() == ["there", "back 1"]


async def test_value_wins_over_the_cancel():
    """K05"""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        engine = await procs.spawn("engine", Engine)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.swallow.call_one)
                await engine.wait_for.call_one("swallow")
                scope.cancel()
        assert await engine.square.call_one(2) == 4  # the slot is free again


async def test_errors_carry_the_traceback_of_the_endpoint():
    """E01, K05: an exit, or a cancel that the engine has made up, is an error of the call, and the engine goes on."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        engine = await procs.spawn("engine", Engine)
        with pytest.raises(ValueError, match="engine trouble") as caught:
            await engine.fail.call_one()
        text = "".join(traceback.format_exception(caught.value))
        assert "in fail\n" in text
        assert "asyncio_work.py" not in text
        with pytest.raises(RuntimeError, match=r"cancel_itself\(\) must not raise asyncio.CancelledError"):
            await engine.cancel_itself.call_one()
        with pytest.raises(BaseException, match="3") as stopped:
            await engine.exit.call_one()
        assert not isinstance(stopped.value, trio.Cancelled)
        assert await engine.square.call_one(5) == 25


async def test_generators_stream_and_close():
    """K05: one task runs a generator, so that scopes of asyncio hold around its `yield`."""
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        engines = await procs.spawn("engines", Engine)
        first, second = engines.slice(gpus=0), engines.slice(gpus=1)
        async with first.numbers.stream(5) as items:
            assert [number async for _, number in items] == [0, 1, 2, 3, 4]
        async with first.numbers.stream(10_000) as items:
            async for _, number in items:
                if number == 3:
                    break
        assert (await first.seen_so_far.call_one()).count("numbers over") == 2
        async with second.numbers_of.stream(first, 4) as items:
            assert [number async for _, number in items] == [0, 10, 20, 30]


@pytest.mark.daily
async def test_failure_of_lifespan_ends_the_actor():
    """K05: what a task group of `lifespan` raises goes to the owner; calls that run are told."""
    with pytest.raises(BaseExceptionGroup) as caught:
        async with this_host().spawn_procs({"gpus": 1}) as procs:
            broken = await procs.spawn("broken", Broken)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(broken.wait_forever.call_one)
                await broken.cause_trouble.call_one()
    assert any(isinstance(error, LookupError) for error in leaves(caught.value))


async def test_failure_of_init_is_raised_by_spawn():
    """K05"""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        with pytest.raises(MeshErrorGroup) as caught:
            await procs.spawn("broken", Broken, now=True)
        assert any(isinstance(error, ValueError) for error in leaves(caught.value))
        engine = await procs.spawn("engine", Engine)
        assert await engine.square.call_one(4) == 16


async def test_tasks_left_behind_end_with_their_actor():
    """K05: an actor that shares the loop goes on."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        stays = await procs.spawn("stays", Engine)
        async with trimesh.open_channel(str, capacity=4) as (port, notes):
            async with procs.spawn("goes", Engine) as goes:
                await goes.report_end_to.call_one(port)
                await stays.leave_behind.call_one("kept")
            assert await notes.receive() == "unwound"
        assert "kept ended" not in await stays.seen_so_far.call_one()
        assert await stays.square.call_one(6) == 36


async def test_arguments_are_the_actor_s_own():
    """K05: nothing else keeps the port that it was made with."""
    async with trimesh.open_channel(int, capacity=4) as (port, receiver), this_host().spawn_procs({"gpus": 2}) as procs:
        keepers = await procs.spawn("keepers", Keeper, port)
        await port.aclose()
        await keepers.send_and_drop.call(1)
        assert [item async for item in receiver] == [1, 1]


def test_engines_of_an_asyncio_program(run: Callable[[Test], None]) -> None:
    """K04, K05: called from asyncio, which runs in asyncio."""

    async def main() -> None:
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            engine = await procs.spawn("engine", Engine)
            assert await engine.square.call_one(7) == 49
            limit = asyncio.timeout(HANG_SECONDS)

            async def hold() -> None:
                async with limit:
                    await engine.hold.call_one("short")

            held = asyncio.create_task(hold())
            await engine.wait_for.call_one("short")
            limit.reschedule(asyncio.get_running_loop().time())
            with pytest.raises(TimeoutError):
                await held
            assert "short cancelled" in await engine.seen_so_far.call_one()

    run(main)
