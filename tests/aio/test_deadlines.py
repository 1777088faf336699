"""Budgets of Trio scopes reach calls that were made in asyncio; its own timeouts are cancels (K04)."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
import trio
from tests.aio.loops import expire
from tests.conformance.probe import Probe

import trimesh
from trimesh import Actor, endpoint
from trimesh._runtime.tasks.crossing import in_trio

pytestmark = pytest.mark.real

BUDGET_SECONDS = 1000.0
"""Of calls that end long before."""


class Clock(Actor):
    """Says how much time it has."""

    @endpoint(concurrency=4)
    async def left(self) -> float:
        return trio.current_effective_deadline() - trio.current_time()

    @endpoint(concurrency=4)
    async def left_within(self, target: Any, seconds: float) -> float:
        with trio.fail_after(seconds):
            return await target.left.call_one()


def test_timeout_of_asyncio_is_no_budget(run):
    """D02, K04: it cannot be seen from outside, so the endpoint has no deadline of its own."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 2}) as procs:
            clocks = await procs.spawn("clocks", Clock)
            async with asyncio.timeout(BUDGET_SECONDS):
                assert (await clocks.left.call()).values() == (math.inf, math.inf)

    run(main)


def test_budget_of_a_scope_travels(run):
    """D02, D03, K04: what runs in Trio for asyncio code has the budget of its scope; a nested call the least."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 2}) as procs:
            clocks = await procs.spawn("clocks", Clock)
            one, other = clocks.slice(gpus=0), clocks.slice(gpus=1)

            async def within(seconds: float, inner: float) -> float:
                with trio.fail_after(seconds):
                    return await one.left_within.call_one(other, inner)

            for outer, inner in ((BUDGET_SECONDS, 10 * BUDGET_SECONDS), (10 * BUDGET_SECONDS, BUDGET_SECONDS)):
                assert 0.5 * BUDGET_SECONDS < await in_trio(within)(outer, inner) <= BUDGET_SECONDS

    run(main)


def test_expired_call_never_starts(run):
    """D04, K04: neither by a timeout of asyncio that is over, nor by a scope of Trio."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            probe = await procs.spawn("probe", Probe)

            async def expired() -> None:
                with trio.move_on_after(0):
                    await probe.note.call_one("never")

            await in_trio(expired)()
            task = asyncio.create_task(probe.note.call_one("never"))
            task.cancel()
            await asyncio.wait([task])
            assert await probe.seen.call_one() == []

    run(main)


def test_shielded_clean_up_outlives_the_timeout(run):
    """D05, D06, K04: a timeout that is over waits for clean-up over there, then it is `TimeoutError`."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            probe = await procs.spawn("probe", Probe)
            timeout = asyncio.timeout(None)

            async def call() -> None:
                async with timeout:
                    await probe.fail_at_gate.call_one(LookupError("not raised"), ranks=[])

            task = asyncio.create_task(call())
            await probe.wait.call_one("at the gate")
            await expire(timeout)
            await probe.note.call_one("asked")  # there and back: the cancel has arrived before
            assert not task.done()
            await probe.open_gate.call_one()
            with pytest.raises(TimeoutError):
                await task

    run(main)
