"""Streams and maps that wait for themselves (rule C8)."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from tests.conformance.meshes import Backend
from tests.conformance.nodes import Node, no_deadline, nodes_in

from trimesh import DeadlockError, limits


async def test_consumer_that_calls_whom_it_takes_from_is_in_a_deadlock(backend: Backend):
    """C8: a caller outside of any actor waits for the slot of a stream that only it can make go on."""
    number = 3 * limits.STREAM_WINDOW
    async with no_deadline(), nodes_in(backend, "own processes", 1) as (one,):
        came = 0
        async with one.count.stream(number) as results:
            async for _ in results:
                came += 1
                if came == 1:
                    with pytest.raises(DeadlockError) as caught:
                        await one.ping.call_one()
                    assert [name for _, name, _ in caught.value.cycle] == ["count", "ping"]
        assert came == number


async def test_stream_that_ends_by_itself_is_no_deadlock(backend: Backend):
    """C8: it is not ahead of its window, so the slot gets free."""
    number = limits.STREAM_WINDOW // 2
    async with no_deadline(), nodes_in(backend, "own processes", 1) as (one,), one.count.stream(number) as results:
        assert await one.ping.call_one() == 0
        assert len([value async for value in results]) == number


async def test_stream_with_another_consumer_is_no_deadlock(backend: Backend):
    """C8: another task takes the items, though late."""
    number = 3 * limits.STREAM_WINDOW

    async def take(results: Any) -> None:
        await trio.sleep(4 * limits.DEADLOCK_SEARCH_SECONDS)
        assert len([value async for value in results]) == number

    async with (
        no_deadline(),
        nodes_in(backend, "own processes", 1) as (one,),
        one.count.stream(number) as results,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(take, results)
        assert await one.ping.call_one() == 0


@pytest.mark.parametrize("verb", ["count", "stream", "map"])
async def test_results_of_oneself_are_a_deadlock(backend: Backend, verb: str):
    """C8: an endpoint waits for the next result of itself; those of others come first."""
    async with no_deadline(), backend.procs({"gpus": 3}) as procs:
        nodes = await procs.spawn("nodes", Node)
        one = nodes.slice(gpus=1)
        run = {
            "count": lambda whom: one.count_all.call_one(whom, 5),
            "stream": one.stream_pings.call_one,
            "map": lambda whom: one.map_pings.call_one(whom, 5),
        }[verb]
        assert await run(one) == (0, "deadlock")
        came, said = await run(nodes)
        assert said == "deadlock"
        assert came <= (10 if verb == "count" else 5)
        came, said = await run(nodes.exclude([{"gpus": 1}]))
        assert said == "all"
        assert await one.ping.call_one() == 1
