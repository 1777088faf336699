"""Calls that wait for themselves (rule C8)."""

from __future__ import annotations

import pickle
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from tests.conformance.meshes import Backend, RealBackend, SimBackend, attempt, only_real, only_sim
from tests.conformance.nodes import PLACES, Node, answer_of, cross, no_deadline, nodes_in

import trimesh
from trimesh import Actor, DeadlockError, MeshErrorGroup, ProcDied, endpoint, limits

# ---- cycles ----------------------------------------------------------------------------------------------------------


@pytest.mark.daily("real")
async def test_self_call_is_a_deadlock(backend: Backend):
    """C8: an actor that awaits its own endpoint gets the error, which names the cycle; it lives on."""
    async with no_deadline(), backend.procs() as procs:
        nodes = await procs.spawn("nodes", Node)
        one = nodes.slice(gpus=1)
        with pytest.raises(DeadlockError) as caught:
            await one.visit.call_one(one)
        here = {"gpus": 1}
        assert caught.value.cycle == (("Node", "visit", here), ("Node", "visit", here))
        assert "nodes[gpus=1].visit waits for itself" in str(caught.value)
        where = trimesh.origin(caught.value)
        assert where is not None
        assert (where.mesh, where.endpoint, where.point) == ("nodes", "visit", here)
        assert pickle.loads(pickle.dumps(caught.value)).cycle == caught.value.cycle
        assert list((await nodes.ping.call()).values()) == [0, 1]


@only_sim
async def test_deadlock_is_found_at_once(backend: SimBackend):
    """C8: within a blink."""
    async with no_deadline(), backend.procs({"gpus": 1}) as procs:
        node = await procs.spawn("node", Node)
        began = trio.current_time()
        with pytest.raises(DeadlockError):
            await node.visit.call_one(node)
        assert trio.current_time() - began == pytest.approx(limits.DEADLOCK_SEARCH_SECONDS)


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("count", [2, 3])
async def test_ring_is_a_deadlock(backend: Backend, places: str, count: int):
    """C8: A calls B, B calls C, C calls A; the last call gets the error, and the actors serve afterwards."""
    async with no_deadline(), nodes_in(backend, places, count) as nodes:
        with pytest.raises(DeadlockError) as caught:
            await nodes[0].visit.call_one(*nodes[1:], nodes[0])
        assert [name for _, name, _ in caught.value.cycle] == ["visit"] * (count + 1)
        assert await nodes[0].visit_or_less.call_one(*nodes[1:], nodes[0]) == count - 1
        assert await nodes[0].visit.call_one(*nodes[1:]) == count - 1


@pytest.mark.parametrize("places", PLACES)
async def test_crossing_calls_of_independent_callers_are_a_deadlock(backend: Backend, places: str):
    """C8: no call is its own ancestor; one of the two gets the error, the other goes on."""
    async with no_deadline() as nursery, nodes_in(backend, places, 2) as (one, other):
        calls = await cross(nursery, one, other)
        assert sorted([await call.result() for call in calls]) == ["deadlock of 4", "met"]
        assert await one.visit.call_one(other) == 1


async def test_mesh_call_that_includes_oneself_is_a_deadlock(backend: Backend):
    """C8: a call of a mesh waits for all of its ranks; the error is a leaf with coordinates."""
    async with no_deadline(), backend.procs({"gpus": 3}) as procs:
        nodes = await procs.spawn("nodes", Node)
        with pytest.raises(MeshErrorGroup) as caught:
            await nodes.slice(gpus=1).ask_all.call_one(nodes)
        assert [type(leaf) for leaf in trimesh.leaves(caught.value)] == [DeadlockError]
        assert trimesh.coords(caught.value) == [{"gpus": 1}]
        assert await nodes.slice(gpus=1).settle_all.call_one(nodes) == ["NoneType", "DeadlockError", "NoneType"]
        assert await nodes.slice(gpus=1).ask_all.call_one(nodes.exclude([{"gpus": 1}])) == [0, 2]


async def test_all_slots_must_be_held(backend: Backend):
    """C8: with two slots it takes two calls; one of them gets the error."""
    async with no_deadline() as nursery, nodes_in(backend, "own processes", 1) as (node,):
        first = attempt(nursery, node.touch_again.call_one, node)
        await node.wait_entered.call_one(1)
        await node.open_gate.call_one()
        assert await first.result() == "met"
        await node.shut_gate.call_one()
        calls = [attempt(nursery, node.touch_again.call_one, node) for _ in range(2)]
        await node.wait_entered.call_one(3)
        await node.open_gate.call_one()
        assert sorted([await call.result() for call in calls]) == ["deadlock of 2", "met"]


async def test_task_of_an_endpoint_is_part_of_it(backend: Backend):
    """C8: several tasks of one call; only the one that can never go on gets the error."""
    async with no_deadline(), nodes_in(backend, "own processes", 2) as (one, other):
        assert await one.ask_in_tasks.call_one(one, other) == "deadlock of 2 met"


async def test_process_of_a_worker_is_searched_too(backend: Backend):
    """C8, M7: the controller has no link to it before."""
    async with no_deadline(), nodes_in(backend, "own processes", 1) as (one,):
        assert await one.ask_by_child.call_one(one) == "deadlock of 3, 0"


@only_real
async def test_thread_of_an_endpoint_is_part_of_it(backend: RealBackend):
    """C8, C4: a call back into Trio, too."""
    async with no_deadline(), nodes_in(backend, "own processes", 1) as (one,):
        assert await one.ask_in_thread.call_one(one) == "deadlock of 2"


# ---- no cycles -------------------------------------------------------------------------------------------------------


async def test_wait_with_a_deadline_ends_by_it(backend: Backend):
    """C8: it is no deadlock, be the deadline the endpoint's own or its caller's."""
    async with no_deadline(), nodes_in(backend, "own processes", 1) as (one,):
        assert await one.wait_for_me.call_one(one, 0.3) == "too late"
        with trio.move_on_after(0.3) as scope:
            await one.visit.call_one(one)
        assert scope.cancelled_caught
        assert await one.ping.call_one() == 0


@only_sim
async def test_cancelled_wait_is_no_deadlock(backend: SimBackend):
    """C8: a caller who gives up in time gets its own cancel, and the actor is free."""
    async with no_deadline() as nursery, nodes_in(backend, "own processes", 2) as (one, other):
        calls = await cross(nursery, one, other)
        calls[0].cancel()
        assert await calls[1].result() == "met"
        await calls[0].over.wait()
        assert calls[0].cancelled


async def test_long_queues_are_no_deadlock(backend: Backend):
    """C8: actors that are slow, and wait for slow ones, are merely slow."""
    async with no_deadline() as nursery, nodes_in(backend, "own processes", 3) as (one, two, three):
        calls = [
            attempt(nursery, first.relay.call_one, second, 0.002)
            for _ in range(20)
            for first, second in ((one, two), (two, three), (one, three), (one, None), (two, None), (three, None))
        ]
        assert sum([await call.result() for call in calls]) == 20 * (3 * 2 + 3 * 1)


async def test_task_that_outlives_the_endpoint_is_no_part_of_it(backend: Backend):
    """C8: what an endpoint has started in a nursery of `lifespan` waits for the endpoint, not the other way round."""
    async with no_deadline(), backend.procs({"gpus": 1}) as procs:
        host = await procs.spawn("host", Background)
        await host.begin.call_one(host, 4 * limits.DEADLOCK_SEARCH_SECONDS)
        assert await host.said.call_one() == "met"


class Background(Actor):
    """Has a nursery of its own."""

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None]:
        async with trio.open_nursery() as self.nursery:
            self.answer = ""
            self.answered = trio.Event()
            yield
            self.nursery.cancel_scope.cancel()

    async def ask(self, me: Any) -> None:
        self.answer = await answer_of(me.ping)
        self.answered.set()

    @endpoint
    async def begin(self, me: Any, seconds: float) -> None:
        self.nursery.start_soon(self.ask, me)
        await trio.sleep(seconds)

    @endpoint
    async def ping(self) -> None: ...

    @endpoint(group="watch")
    async def said(self) -> str:
        await self.answered.wait()
        return self.answer


# ---- more than calls -------------------------------------------------------------------------------------------------


async def test_start_of_an_actor_can_be_part_of_a_cycle(backend: Backend):
    """C8: an endpoint spawns an actor whose `__init__` half waits for that endpoint's actor."""
    async with no_deadline(), nodes_in(backend, "own processes", 1) as (one,):
        assert await one.spawn_caller.call_one(one) == "deadlock of 3"
        assert await one.ping.call_one() == 0


async def test_broadcast_that_runs_can_hold_the_slot(backend: Backend):
    """C8: no task waits for it, but it waits for itself; its error goes to the owner."""
    with pytest.raises(ExceptionGroup) as caught:
        async with no_deadline(), nodes_in(backend, "own processes", 2) as (one, other):
            await one.visit.broadcast(other, one)
            await trio.sleep_forever()
    assert [type(leaf) for leaf in trimesh.leaves(caught.value)] == [DeadlockError]


@pytest.mark.parametrize("places", PLACES)
async def test_full_mailbox_can_be_part_of_a_cycle(backend: Backend, places: str):
    """C8: one waits for room at the other, which waits for a call to the first."""
    async with no_deadline() as nursery, nodes_in(backend, places, 2) as (one, other):
        assert await one.flood.call_one(one) == "deadlock of 2"
        meeting = attempt(nursery, other.meet.call_one, one)
        await other.wait_entered.call_one(1)
        await one.flood_and_be_asked.call_one(other)
        assert await meeting.result() == "deadlock of 4"
        assert await other.visit.call_one() == 0


# ---- deaths ----------------------------------------------------------------------------------------------------------


async def test_death_in_a_cycle_ends_it(backend: Backend):
    """C8: whoever waits for the dead gets `ProcDied`, or the error of the deadlock that was found first."""
    with pytest.raises(ExceptionGroup) as caught:
        async with no_deadline() as nursery, nodes_in(backend, "own processes", 2) as (one, other):
            calls = await cross(nursery, one, other)
            backend.kill(other, 0)
            for call in calls:
                await call.over.wait()
    assert {type(leaf) for leaf in trimesh.leaves(caught.value)} == {ProcDied}


# ---- a message under way ---------------------------------------------------------------------------------------------


@only_sim
@pytest.mark.parametrize("control", [0.0, 0.001, 0.01, 0.1])
@pytest.mark.parametrize("data", [0.0, 0.003, 0.05])
async def test_slow_links_change_nothing(backend: SimBackend, control: float, data: float):
    """C8: one victim, however long questions, calls and errors travel."""
    async with no_deadline() as nursery, nodes_in(backend, "own processes", 2) as (one, other):
        backend.lag.control, backend.lag.data = control, data
        for _ in range(3):
            calls = [attempt(nursery, one.meet.call_one, other), attempt(nursery, other.meet.call_one, one)]
            for node in (one, other):
                await node.open_gate.call_one()
            results = [await call.result() for call in calls]
            assert results.count("met") >= 1
            assert len(set(results)) <= 2
