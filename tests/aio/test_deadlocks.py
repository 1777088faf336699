"""Deadlocks whose callers are tasks of asyncio (C8, K04), and the one kind that is not seen from there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.conformance.probe import Probe

import trimesh
import trimesh.aio
from trimesh import DeadlockError, Restart, Restarted, endpoint, limits

pytestmark = pytest.mark.real

LATER_SECONDS = 4 * limits.DEADLOCK_SEARCH_SECONDS
"""By then a search would have said something."""


class Asker(Probe):
    """Asks another one while it holds its own slot."""

    @endpoint
    async def ask(self, other: Any) -> int:
        self.notes.add("asked")
        await self.gate.wait()
        answer: int = await other.rank.call_one()
        return answer

    @endpoint
    async def count(self, end: int) -> AsyncGenerator[int, None]:
        for number in range(end):
            yield number


def test_crossing_calls_of_two_tasks_are_a_deadlock(run):
    """C8: exactly one of them fails, with the cycle; the other one goes on."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 2}) as procs:
            askers = await procs.spawn("askers", Asker)
            one, two = (askers.slice(gpus=rank) for rank in range(2))
            calls = [asyncio.create_task(asker.ask.call_one(other)) for asker, other in ((one, two), (two, one))]
            await askers.wait.call("asked")
            await askers.open_gate.call()
            await asyncio.wait(calls)
            errors = [call.exception() for call in calls]
            (error,) = [error for error in errors if error is not None]
            assert isinstance(error, DeadlockError)
            assert [name for _, name, _ in error.cycle][-1] == "rank"
            (other,) = [call.result() for call in calls if call.exception() is None]
            assert other == errors.index(error)  # it has asked the one that failed, which is free again

    run(main)


class Heir(trimesh.aio.Actor):
    """A replacement begins with the state of the other member, or alone if that waits for it."""

    def __init__(self) -> None:
        self.state = "new"

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None]:
        here = trimesh.context(self)
        if here.incarnation:
            try:
                self.state = "heir of " + await here.actors.slice(gpus=1 - here.point["gpus"]).value.call_one()
            except DeadlockError:
                self.state = "alone"
        yield

    @endpoint
    async def value(self) -> str:
        return self.state


def test_replacements_in_asyncio_that_call_each_other_are_a_deadlock():
    """C8, K05."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 2}, supervision=Restart()) as procs, procs.events() as events:
            heirs = await procs.spawn("heirs", Heir)
            await procs.kill([{"gpus": 0}, {"gpus": 1}])
            restarted = 0
            async for event in events:
                restarted += isinstance(event, Restarted)
                if restarted == 2:
                    break
            assert sorted((await heirs.value.call()).values()) == ["alone", "heir of alone"]

    asyncio.run(main())


def test_consumer_that_calls_whom_it_takes_from_waits_until_it_is_cancelled(run):
    """C8, from Trio only: here any task of the loop might yet take the items, so nobody can say that none will."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            one = await procs.spawn("one", Asker)
            end = 3 * limits.STREAM_WINDOW
            came = 0
            async with one.count.stream(end) as results:
                async for _ in results:
                    came += 1
                    if came == 1:
                        with pytest.raises(TimeoutError):
                            async with asyncio.timeout(LATER_SECONDS):
                                await one.rank.call_one()
            assert came == end
            assert await one.rank.call_one() == 0

    run(main)


def test_stream_that_another_task_takes_from_is_no_deadlock(run):
    """C8: the task that has opened it waits for the slot, and another one takes the items, though late."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            one = await procs.spawn("one", Asker)
            end = 3 * limits.STREAM_WINDOW

            async def take(results: Any) -> int:
                await asyncio.sleep(LATER_SECONDS)
                return len([value async for value in results])

            async with one.count.stream(end) as results:
                taking = asyncio.create_task(take(results))
                assert await one.rank.call_one() == 0
                assert await taking == end

    run(main)
