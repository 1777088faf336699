"""Asyncio actors of the program's own process: their loop is in a thread, and no process is started (K05)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import pytest
import trio
from tests.conformance.probe import Probe

import trimesh
import trimesh.blocking as tb
from trimesh import RemoteCancelled, TrimeshInternalError, endpoint, leaves, this_proc

NOTES: list[str] = []
"""What the actors do: they are in this process."""

shade: ContextVar[str] = ContextVar("shade", default="none")


class Engine(trimesh.aio.Actor):
    """Does as it is told.

    Args:
        fails_in: Where it raises an error: "init", "entering" or "leaving".
    """

    def __init__(self, fails_in: str = "") -> None:
        self.fails_in = fails_in
        self.loop = asyncio.get_running_loop()
        self.changed = asyncio.Event()
        self.fail_in("init")

    def fail_in(self, place: str) -> None:
        if self.fails_in == place:
            raise LookupError(f"in {place}")

    def note(self, text: str) -> None:
        NOTES.append(text)
        self.changed.set()

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        shade.set("of lifespan")
        self.fail_in("entering")
        async with asyncio.TaskGroup() as group:
            self.group = group
            try:
                yield
            finally:
                self.note("left")
        self.fail_in("leaving")

    @endpoint
    async def where(self) -> tuple[bool, bool, str]:
        await asyncio.sleep(0)
        is_main = threading.current_thread() is threading.main_thread()
        return asyncio.get_running_loop() is self.loop, is_main, shade.get()

    @endpoint
    def inline(self, number: int) -> int:
        return number + 1

    @endpoint(group="noted")
    async def noted(self, text: str) -> None:
        while text not in NOTES:
            self.changed.clear()
            await self.changed.wait()

    @endpoint
    async def fail(self) -> None:
        await asyncio.sleep(0)
        raise LookupError("of the endpoint")

    @endpoint
    async def hold(self, outcome: str) -> str:
        self.note("begun")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            self.note(str(error))
            for _ in range(3):
                await asyncio.sleep(0)
            self.note("unwound")
            if outcome == "error":
                raise LookupError("on the way out") from None
            if outcome == "cancel":
                raise
        return outcome

    @endpoint
    async def cancel_itself(self) -> None:
        raise asyncio.CancelledError

    @endpoint
    async def ask(self, other: Probe) -> list[Any]:
        first = await other.note.call_one("asked")
        async with other.rank.stream() as items:
            return [first, *[item async for _, item in items]]

    @endpoint
    async def hold_there(self, other: Probe) -> None:
        try:
            await other.hold.call_one("there")
        finally:
            self.note("call ended")

    @endpoint
    async def count(self, number: int, fails_at: int = -1) -> AsyncGenerator[int, None]:
        try:
            for at in range(number):
                if at == fails_at:
                    raise LookupError("of the generator")
                await asyncio.sleep(0)
                yield at
            if number == 0:
                self.note("begun")
                await asyncio.Event().wait()
        finally:
            self.note("closed")

    @endpoint
    async def leave_a_task(self) -> None:
        self.kept = asyncio.create_task(self._run())
        await asyncio.sleep(0)

    async def _run(self) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            self.note(str(error))
            raise

    @endpoint
    async def break_lifespan(self) -> None:
        async def fail() -> None:
            raise KeyError("of a task")

        self.group.create_task(fail())
        await asyncio.Event().wait()

    @endpoint
    async def stop_the_loop(self) -> None:
        self.loop.call_soon(self.loop.stop)
        await asyncio.Event().wait()


@pytest.fixture(autouse=True)
def _no_notes() -> None:
    NOTES.clear()


def loops() -> int:
    """Return the number of threads that run a loop of actors."""
    return sum("_wait_thread" in thread.name for thread in threading.enumerate())


async def test_actors_share_a_loop_in_a_thread() -> None:
    """LH-1: the last one ends it; their endpoints have the context of `lifespan`."""
    for _ in range(2):
        async with this_proc().spawn("one", Engine) as one:
            assert await one.where.call_one() == (True, False, "of lifespan")
            assert loops() == 1
            async with this_proc().spawn("two", Engine) as two:
                assert await two.inline.call_one(1) == 2
                assert loops() == 1
            assert await one.inline.call_one(2) == 3
        assert NOTES == ["left", "left"]
        assert loops() == 0
        NOTES.clear()


def test_script_has_asyncio_actors() -> None:
    """K06: whose Trio has a thread of its own."""
    with tb.this_proc().spawning("one", Engine) as one:
        assert one.where.call_one() == (True, False, "of lifespan")


async def test_errors_are_those_of_the_endpoint() -> None:
    """K05, NA-4: a cancel of its own is an error, too; the actor goes on."""
    async with this_proc().spawn("engine", Engine) as engine:
        with pytest.raises(LookupError, match="of the endpoint"):
            await engine.fail.call_one()
        with pytest.raises((RuntimeError, RemoteCancelled), match=r"must not raise asyncio\.CancelledError unless"):
            await engine.cancel_itself.call_one()
        assert await engine.inline.call_one(1) == 2


@pytest.mark.parametrize("outcome", ["cancel", "value", "error"])
async def test_cancel_reaches_the_task_once_and_is_waited_for(outcome: str) -> None:
    """NA-1, NA-2: an error on the way out wins over the cancel."""
    async with this_proc().spawn("engine", Engine) as engine:
        found: list[BaseException] = []
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.hold.call_one, outcome)
                await engine.noted.call_one("begun")
                nursery.cancel_scope.cancel()
        except* LookupError as group:
            found += leaves(group)
        assert [str(error) for error in found] == ["on the way out"] * (outcome == "error")
        assert NOTES == ["begun", "hold() was cancelled", "unwound"]
        assert await engine.inline.call_one(1) == 2


async def test_cancel_of_the_endpoint_cancels_its_call_to_another_actor() -> None:
    """NA-3: which has ended when the endpoint goes on."""
    async with this_proc().spawn("probe", Probe) as probe, this_proc().spawn("engine", Engine) as engine:
        assert await engine.ask.call_one(probe) == ["asked", 0]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.hold_there.call_one, probe)
            await probe.wait.call_one("there")
            nursery.cancel_scope.cancel()
        assert NOTES == ["call ended"]
        assert await engine.inline.call_one(1) == 2


async def test_generators_stream_until_they_end_or_are_left() -> None:
    """K05: an error comes after the items; who leaves early closes them, in a cancel, too."""
    async with this_proc().spawn("engine", Engine) as engine:
        async with engine.count.stream(3) as items:
            assert [item async for _, item in items] == [0, 1, 2]
        found: list[int] = []
        with pytest.RaisesGroup(LookupError, flatten_subgroups=True, allow_unwrapped=True):
            async with engine.count.stream(3, fails_at=2) as items:
                async for _, item in items:
                    found.append(item)
        assert found == [0, 1]
        async with engine.count.stream(1_000_000) as items:
            assert (await anext(items))[1] == 0
        assert NOTES == ["closed"] * 3
        async with trio.open_nursery() as nursery:

            async def wait_for_an_item() -> None:
                async with engine.count.stream(0) as items:
                    await anext(items)

            nursery.start_soon(wait_for_an_item)
            await engine.noted.call_one("begun")
            nursery.cancel_scope.cancel()
        assert [*["closed"] * 3, "begun", "closed"] == NOTES


async def test_tasks_that_are_left_end_with_their_actor() -> None:
    """K05: they are cancelled and awaited."""
    async with this_proc().spawn("other", Engine) as other:
        async with this_proc().spawn("engine", Engine) as engine:
            await engine.leave_a_task.call_one()
        assert NOTES == ["left", "its actor has ended"]
        assert await other.inline.call_one(1) == 2


@pytest.mark.parametrize("place", ["init", "entering", "leaving"])
async def test_error_while_an_actor_begins_or_ends_is_raised_by_its_block(place: str) -> None:
    with pytest.RaisesGroup(
        pytest.RaisesExc(LookupError, match=f"in {place}"), flatten_subgroups=True, allow_unwrapped=True
    ):
        async with this_proc().spawn("engine", Engine, place):
            NOTES.append("body")
    assert (["body", "left"] if place == "leaving" else []) == NOTES
    assert loops() == 0


async def test_error_of_a_task_of_lifespan_ends_the_actor() -> None:
    """K05: the block raises it; its calls end."""
    with pytest.raises(BaseExceptionGroup) as caught:
        async with this_proc().spawn("engine", Engine) as engine:
            await engine.break_lifespan.call_one()
    assert KeyError in {type(leaf) for leaf in leaves(caught.value)}
    assert NOTES == ["left"]
    async with this_proc().spawn("again", Engine) as again:
        assert await again.inline.call_one(1) == 2


async def test_loop_that_ends_by_itself_fails_its_users() -> None:
    """LH-3: the next actor has a new one."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - alone, or in a group
        async with this_proc().spawn("engine", Engine) as engine:
            await engine.stop_the_loop.call_one()
    assert {type(leaf) for leaf in leaves(caught.value)} == {TrimeshInternalError}
    assert "the asyncio loop of this process has ended" in str(next(leaves(caught.value)))
    async with this_proc().spawn("again", Engine) as again:
        assert await again.inline.call_one(1) == 2
