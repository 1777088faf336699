"""Storms of cancels and deadlines: 13,000 calls that are cut at drawn moments, each with one outcome (K04, K05)."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import trio
from tests.aio.counted import SLOTS, AsyncioCounted, TrioCounted
from tests.aio.loops import Test
from tests.aio.storm import AT_ONCE, ROUNDS, Storm, TrioStorm, check, check_idle

import trimesh
from trimesh import this_host

pytestmark = pytest.mark.real


@pytest.mark.parametrize("ways", ["cancels", "deadlines"])
@pytest.mark.parametrize("target", [TrioCounted, AsyncioCounted])
@pytest.mark.parametrize("place", ["apart", "together"])
def test_calls_that_are_cut_at_any_moment_have_one_outcome(
    run: Callable[[Test], None], place: str, target: Any, ways: str
) -> None:
    """C01, C02, C03, C11, S02, D01, K04, K05: what began has ended, and nothing is under way after the storm."""

    async def main() -> None:
        async with trimesh.aio.spawn_procs({"gpus": 2}) as procs:
            actor = await procs.slice(gpus=0).spawn("actor", target)
            relay = await procs.slice(gpus=int(place == "apart")).spawn("relay", AsyncioCounted)
            before = (await relay.tally.call_one()).tasks
            storm = Storm(actor, relay, Random(f"{place} {target.__name__} {ways}"))

            await storm.run(getattr(storm, ways))

            assert {"value", "cancelled"} == set(storm.outcomes.values())
            tally = await actor.tally.call_one()
            check(storm.outcomes, tally)
            assert tally.cancelled
            tally = await relay.tally.call_one()
            check(storm.outcomes, tally, storm.relayed)
            assert tally.tasks <= before + 3 * SLOTS  # of slots, not of calls
            check_idle(actor, relay)
            assert await actor.one_by_one.call_one(0) == 0

    run(main)


@pytest.mark.parametrize("seed", [1, 2])
async def test_scopes_of_trio_that_end_at_any_moment_end_the_tasks_of_asyncio_actors(seed: int) -> None:
    """C01, C02, D01, D02, S02, K05: budgets and cancels reach asyncio actors, through each other, too."""
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        actor = await procs.slice(gpus=0).spawn("actor", AsyncioCounted)
        relay = await procs.slice(gpus=1).spawn("relay", AsyncioCounted)
        storm = TrioStorm(actor, relay, Random(seed))

        for first in range(0, ROUNDS * AT_ONCE, AT_ONCE):
            async with trio.open_nursery() as nursery:
                for number in range(first, first + AT_ONCE):
                    nursery.start_soon(storm.call, number)

        assert {"value", "cancelled"} == set(storm.outcomes.values())
        check(storm.outcomes, await actor.tally.call_one())
        check_idle(actor, relay)
        tally = await relay.tally.call_one()
        assert tally.returned | tally.cancelled == set(tally.begun)
        assert tally.unclean == []
        assert await actor.one_by_one.call_one(-1) == -1
