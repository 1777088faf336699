"""What dumps, snapshots and searches for deadlocks show of asyncio actors (M4, Q1, C8)."""

from __future__ import annotations

import asyncio
import io
import re
import time
from typing import Any

import pytest
import trio
from tests.aio.loops import run_as_host

import trimesh
from trimesh import DeadlockError, endpoint

pytestmark = pytest.mark.real


class Looped(trimesh.aio.Actor):
    """Waits for others from asyncio."""

    def __init__(self) -> None:
        self.is_asked = asyncio.Event()
        self.gate = asyncio.Event()

    @endpoint(concurrency=8, group="watch")
    async def wait_asked(self) -> None:
        await self.is_asked.wait()

    @endpoint(concurrency=8, group="watch")
    async def open_gate(self) -> None:
        self.gate.set()

    @endpoint
    async def ask(self, others: list[Any], way: str = "await") -> int:
        if not others:
            return 0
        self.is_asked.set()
        await self.wait_for_gate()
        return await self.pass_on(others, way)

    async def wait_for_gate(self) -> None:
        await self.gate.wait()

    async def pass_on(self, others: list[Any], way: str) -> int:
        if way == "gather":
            return sum(await asyncio.gather(self.call(others), asyncio.sleep(0, 0)))
        if way == "group":
            async with asyncio.TaskGroup() as group:
                task = group.create_task(self.call(others))
            return task.result()
        return await self.call(others)

    async def call(self, others: list[Any]) -> int:
        found: int = await others[0].ask.call_one(others[1:])
        return found

    @endpoint
    async def block(self, seconds: float) -> None:
        for _ in range(int(seconds * 100)):  # in slices: a signal may reach another thread, and this one notices then
            time.sleep(0.01)  # noqa: ASYNC251 - it is what this test is about


class Plain(trimesh.Actor):
    """The same in Trio."""

    def __init__(self) -> None:
        self.is_asked = trio.Event()
        self.gate = trio.Event()

    @endpoint(concurrency=8, group="watch")
    async def wait_asked(self) -> None:
        await self.is_asked.wait()

    @endpoint(concurrency=8, group="watch")
    async def open_gate(self) -> None:
        self.gate.set()

    @endpoint
    async def ask(self, others: list[Any], way: str = "await") -> int:
        if not others:
            return 0
        self.is_asked.set()
        await self.gate.wait()
        found: int = await others[0].ask.call_one(others[1:])
        return found


def dumped() -> str:
    out = io.StringIO()
    trimesh.dump(out)
    return out.getvalue()


def test_dump_shows_where_code_of_an_asyncio_actor_is():
    """M4: the frames of the endpoint, not those of the loop."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            one = await procs.spawn("one", Looped)
            call = asyncio.create_task(one.ask.call_one([one]))
            await one.wait_asked.call()
            text = dumped()
            call.cancel()
            await asyncio.wait([call])
        assert re.search(r"\.ask runs, .*\n.*locks\.py.*\n.* in wait_for_gate\n.* in ask\n", text), text
        assert "a slot of an actor" not in text

    run_as_host(main)


def test_dump_shows_subtasks_that_an_endpoint_waits_for():
    """M4: the tasks of a gather are below the call."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 2}) as procs:
            one, other = [await procs.slice(gpus=rank).spawn(f"actor{rank}", Looped) for rank in range(2)]
            await one.open_gate.call()
            call = asyncio.create_task(one.ask.call_one([other, one], "gather"))
            await other.wait_asked.call()
            text = dumped()
            call.cancel()
            await asyncio.wait([call])
        assert re.search(
            r"\.ask runs, .*\n.* in pass_on\n.* in ask\n +its task (Task-\d+|None):\n.* in call\n", text
        ), text

    run_as_host(main)


def test_dump_shows_the_stack_of_a_blocked_loop():
    """M4: the main thread is not free while code of an asyncio actor blocks it."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            one = await procs.spawn("one", Looped)
            call = asyncio.create_task(one.block.call_one(1.0))
            text = ""
            while " in block\n" not in text and not call.done():
                text = dumped()
                await asyncio.sleep(0.02)  # another process begins
            await call
        assert re.search(r"Stack .*\n.* in block\n", text), text

    run_as_host(main)


@pytest.mark.parametrize("way", ["await", "gather", "group"])
@pytest.mark.parametrize("kinds", ["LL", "LP", "LPL"])
def test_circles_of_both_kinds_of_actors_are_deadlocks(kinds: str, way: str):
    """C8: exactly one of the calls fails, also where a subtask of asyncio waits."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": len(kinds)}) as procs:
            actors = [
                await procs.slice(gpus=rank).spawn(f"actor{rank}", Looped if kind == "L" else Plain)
                for rank, kind in enumerate(kinds)
            ]
            following = [*actors[1:], actors[0]]
            calls = [
                asyncio.create_task(actor.ask.call_one([other], way))
                for actor, other in zip(actors, following, strict=True)
            ]
            for actor in actors:
                await actor.wait_asked.call()
            for actor in actors:
                await actor.open_gate.call()
            results = await asyncio.gather(*calls, return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        assert len(errors) == 1
        error = errors[0].exceptions[0] if isinstance(errors[0], BaseExceptionGroup) else errors[0]
        assert isinstance(error, DeadlockError) or "waits for itself" in str(error)
        assert str(error).count("runs, and awaits") == len(kinds)

    run_as_host(main)


def test_chain_of_asyncio_actors_is_no_deadlock():
    """C8: calls that only wait for each other in a row all end."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 3}) as procs:
            actors = [await procs.slice(gpus=rank).spawn(f"actor{rank}", Looped) for rank in range(3)]
            for actor in actors:
                await actor.open_gate.call()
            calls = [
                asyncio.create_task(actors[0].ask.call_one([*actors[1:]], way)) for way in ("await", "gather", "group")
            ]
            assert await asyncio.gather(*calls) == [0, 0, 0]

    run_as_host(main)
