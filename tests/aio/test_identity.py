"""Tasks and context variables of asyncio actors: each call has its own, and the next call finds nothing of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import anyio
import anyio.lowlevel
import pytest
import trio

import trimesh
from trimesh import endpoint, this_host

pytestmark = pytest.mark.real

colour: ContextVar[str] = ContextVar("colour", default="none")


def running_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


class Ego(trimesh.aio.Actor):
    """Looks at the task that it runs in."""

    def __init__(self) -> None:
        self.states: WeakKeyDictionary[asyncio.Task[Any], str] = WeakKeyDictionary()
        self.tasks: list[asyncio.Task[Any]] = []
        self.is_full = asyncio.Event()
        self.is_over = asyncio.Event()
        self.has_begun = asyncio.Event()
        self.kept: set[asyncio.Task[Any]] = set()

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        colour.set("of lifespan")
        yield

    # ---- identity ----------------------------------------------------------------------------------------------------

    @endpoint(concurrency=2)
    async def meet(self) -> bool:
        """Wait for another call, with awaits of each kind in between; return whether the task stayed the same."""
        before = running_task()
        self.tasks.append(before)
        if len(self.tasks) == 2:
            self.is_full.set()
        await self.is_full.wait()
        same = [running_task() is before]
        await asyncio.sleep(0)
        same.append(running_task() is before)
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(0))
        same.append(running_task() is before)
        await asyncio.to_thread(lambda: None)
        same.append(running_task() is before)
        await self._step()
        same.append(running_task() is before)
        return all(same)

    async def _step(self) -> None:
        await asyncio.wait_for(asyncio.sleep(0), 10)

    @endpoint
    async def count_met(self) -> int:
        return len({id(task) for task in self.tasks})

    @endpoint
    async def call_on(self, other: Ego) -> bool:
        """Return whether the task stays the same across calls to another actor."""
        before = running_task()
        await other.state.call_one("elsewhere")
        return running_task() is before

    # ---- state by task -----------------------------------------------------------------------------------------------

    @endpoint
    async def state(self, value: str) -> str | None:
        """Set the state of the running task; return what it was."""
        found = self.states.get(running_task())
        self.states[running_task()] = value
        await asyncio.sleep(0)
        assert self.states[running_task()] == value
        return found

    @endpoint
    async def notice_end(self) -> None:
        running_task().add_done_callback(lambda _: self.is_over.set())

    @endpoint(concurrency=2, group="watch")
    async def wait_over(self) -> None:
        await self.is_over.wait()

    @endpoint
    async def rename_task(self, new: str | None = None) -> str:
        """Return the name of the task, then change it."""
        found = running_task().get_name()
        if new is not None:
            running_task().set_name(new)
        return found

    # ---- scopes ------------------------------------------------------------------------------------------------------

    @endpoint
    async def expire(self) -> str:
        try:
            async with asyncio.timeout(0):
                await asyncio.Event().wait()
        except TimeoutError:
            return "expired"
        return "not expired"

    @endpoint
    async def outlive_timeout(self) -> None:
        """Leave a timeout that would expire later than the call."""
        async with asyncio.timeout(0.05):
            await asyncio.sleep(0)

    @endpoint
    async def fail_group(self) -> str:
        async def fail() -> None:
            raise LookupError("child")

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(fail())
                await asyncio.Event().wait()
        except* LookupError:
            pass
        return "failed"

    @endpoint
    async def cancel_scope(self) -> bool:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await anyio.sleep_forever()
        return scope.cancelled_caught

    @endpoint
    async def move_on(self) -> bool:
        with anyio.move_on_after(0.001) as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(anyio.sleep_forever)
                await anyio.sleep_forever()
        return scope.cancelled_caught

    @endpoint(concurrency=2, group="hold")
    async def hold_in_scopes(self) -> None:
        with anyio.CancelScope():
            async with asyncio.timeout(1000), asyncio.TaskGroup() as group:
                group.create_task(asyncio.Event().wait())
                self.has_begun.set()
                await anyio.sleep_forever()

    @endpoint(concurrency=2, group="watch")
    async def wait_begun(self) -> None:
        await self.has_begun.wait()

    @endpoint
    async def look(self) -> dict[str, Any]:
        """Return what a call finds of calls before it."""
        await asyncio.sleep(0)
        await anyio.lowlevel.checkpoint()
        return {
            "cancelling": running_task().cancelling(),
            "deadline": anyio.current_effective_deadline(),
            "state": self.states.get(running_task()),
        }

    @endpoint(concurrency=2, group="hold")
    async def look_there(self) -> dict[str, Any]:
        return await Ego.look(self)

    # ---- cancels of its own ------------------------------------------------------------------------------------------

    @endpoint
    async def cancel_itself(self) -> None:
        running_task().cancel()
        await asyncio.sleep(0)

    @endpoint
    async def cancel_itself_and_catch(self, times: int, *, uncancels: bool) -> str:
        for _ in range(times):
            running_task().cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        for _ in range(times if uncancels else 0):
            running_task().uncancel()
        return "caught"

    @endpoint
    async def cancel_itself_and_return(self) -> str:
        running_task().cancel()
        return "returned"

    @endpoint
    async def cancel_itself_and_fail(self) -> None:
        running_task().cancel()
        raise LookupError("failed")

    @endpoint
    async def be_cancelled_by_a_task(self) -> None:
        mine = running_task()

        async def cancel() -> None:
            mine.cancel("by a task of the call")

        self.kept = {asyncio.create_task(cancel())}
        await asyncio.Event().wait()

    @endpoint
    async def cancel_later(self, turns: int) -> str:
        """Leave a callback behind that cancels the task of this call when it has ended."""
        mine, loop = running_task(), asyncio.get_running_loop()

        def cancel(left: int) -> None:
            if left:
                loop.call_soon(cancel, left - 1)
            else:
                mine.cancel()

        loop.call_soon(cancel, turns)
        return "left"

    # ---- context variables -------------------------------------------------------------------------------------------

    @endpoint
    async def paint(self, new: str) -> str:
        found = colour.get()
        colour.set(new)
        await asyncio.sleep(0)
        assert colour.get() == new
        return found

    @endpoint
    def paint_at_once(self, new: str) -> str:
        found = colour.get()
        colour.set(new)
        return found

    @endpoint(thread=True)
    def paint_in_thread(self, new: str) -> str:
        found = colour.get()
        colour.set(new)
        return found

    @endpoint
    async def paint_items(self, new: str) -> AsyncGenerator[str, None]:
        yield colour.get()
        colour.set(new)
        yield colour.get()
        await asyncio.sleep(0)
        yield colour.get()

    @endpoint
    async def paint_in_task(self, new: str) -> list[str]:
        async def child() -> str:
            found = colour.get()
            colour.set("of the child")
            return found

        colour.set(new)
        found = await asyncio.create_task(child())
        return [found, colour.get()]


CLEAN = {"cancelling": 0, "deadline": float("inf"), "state": None}


async def check_clean(ego: Ego) -> None:
    for _ in range(3):
        assert await ego.look.call_one() == CLEAN


# ---- identity --------------------------------------------------------------------------------------------------------


async def test_calls_that_run_at_once_have_two_tasks_and_each_keeps_its_own() -> None:
    """K05: `asyncio.current_task()` is the same across awaits, groups, threads and calls, and another one beside it."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        ego = await procs.spawn("ego", Ego)
        found: list[bool] = []

        async def meet() -> None:
            found.append(await ego.meet.call_one())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(meet)
            nursery.start_soon(meet)
        assert found == [True, True]
        assert await ego.count_met.call_one() == 2
        other = await procs.spawn("other", Ego)
        assert await ego.call_on.call_one(other)


async def test_state_that_is_kept_by_task_is_that_of_one_call() -> None:
    """K05: libraries keep weak references to `current_task()`; the next call finds none of theirs."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        ego = await procs.spawn("ego", Ego)
        for number in range(5):
            assert await ego.state.call_one(f"of call {number}") is None
        await check_clean(ego)


async def test_done_callback_of_the_task_is_called_when_the_call_ends() -> None:
    """K05: while the actor, and its other calls, go on."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        ego = await procs.spawn("ego", Ego)
        await ego.notice_end.call_one()
        await ego.wait_over.call_one()
        await check_clean(ego)


async def test_name_of_the_task_is_that_of_one_call() -> None:
    """K05: what a call names its task is not the name of the next one's."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        ego = await procs.spawn("ego", Ego)
        await ego.rename_task.call_one("mine")
        assert await ego.rename_task.call_one() != "mine"


# ---- scopes ----------------------------------------------------------------------------------------------------------


async def test_scopes_inside_of_an_endpoint_leave_nothing_to_the_next_call() -> None:
    """K05: `asyncio.timeout`, `TaskGroup`, anyio's scopes and groups, each of which has cancelled the task."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        ego = await procs.spawn("ego", Ego)
        for _ in range(3):
            assert await ego.expire.call_one() == "expired"
            await check_clean(ego)
            await ego.outlive_timeout.call_one()
            await check_clean(ego)
            assert await ego.fail_group.call_one() == "failed"
            await check_clean(ego)
            assert await ego.cancel_scope.call_one()
            await check_clean(ego)
            assert await ego.move_on.call_one()
            await check_clean(ego)


async def test_cancel_of_the_caller_unwinds_the_scopes_and_leaves_nothing_to_the_next_call() -> None:
    """C01, C03, K05: through a group, a timeout and a scope of anyio."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        ego = await procs.spawn("ego", Ego)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ego.hold_in_scopes.call_one)
            await ego.wait_begun.call_one()
            nursery.cancel_scope.cancel()
        for _ in range(3):
            assert await ego.look_there.call_one() == CLEAN
        await check_clean(ego)


# ---- cancels of its own ----------------------------------------------------------------------------------------------


async def test_call_that_cancels_itself_fails_and_leaves_the_next_call_alone() -> None:
    """C03, K05: `CancelledError` without a cancel of the caller is an error, whoever has asked for it."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        ego = await procs.spawn("ego", Ego)
        for _ in range(3):
            with pytest.raises(RuntimeError, match=r"cancel_itself\(\) must not raise asyncio.CancelledError"):
                await ego.cancel_itself.call_one()
            await check_clean(ego)
            with pytest.raises(RuntimeError, match=r"be_cancelled_by_a_task\(\) must not raise"):
                await ego.be_cancelled_by_a_task.call_one()
            await check_clean(ego)


@pytest.mark.parametrize("uncancels", [True, False])
@pytest.mark.parametrize("times", [1, 3])
async def test_call_that_catches_its_own_cancel_returns_and_leaves_the_next_call_alone(
    times: int, uncancels: bool
) -> None:
    """C03, K05: with `uncancel()` and without."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        ego = await procs.spawn("ego", Ego)
        for _ in range(3):
            assert await ego.cancel_itself_and_catch.call_one(times, uncancels=uncancels) == "caught"
            await check_clean(ego)


async def test_cancel_that_a_call_leaves_open_does_not_reach_the_next_call() -> None:
    """C03, K05: asked for at its last step, which asyncio takes for the end of the task, or after its end."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        ego = await procs.spawn("ego", Ego)
        for turns in range(10):
            with suppress(RuntimeError):  # the cancel is that of the call, if it is heard at all
                assert await ego.cancel_itself_and_return.call_one() == "returned"
            await check_clean(ego)
            with pytest.raises((LookupError, RuntimeError)):
                await ego.cancel_itself_and_fail.call_one()
            await check_clean(ego)
            assert await ego.cancel_later.call_one(turns) == "left"
            await check_clean(ego)


async def test_error_of_a_call_that_has_cancelled_itself_is_its_outcome() -> None:
    """E08, K05: a cancel request that is never delivered masks nothing, as in asyncio."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        ego = await procs.spawn("ego", Ego)
        with pytest.raises(LookupError, match="failed"):
            await ego.cancel_itself_and_fail.call_one()
        await check_clean(ego)


# ---- context variables -----------------------------------------------------------------------------------------------


async def test_context_variables_of_a_call_are_not_seen_by_the_next_one() -> None:
    """K05: those that `lifespan` has set are seen by each call, of each kind."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        ego = await procs.spawn("ego", Ego)
        for _ in range(3):
            assert await ego.paint.call_one("red") == "of lifespan"
            assert await ego.paint_at_once.call_one("blue") == "of lifespan"
            assert await ego.paint_in_thread.call_one("green") == "of lifespan"
            assert await ego.paint_in_task.call_one("white") == ["white", "white"]
            async with ego.paint_items.stream("black") as items:
                assert [item async for _, item in items] == ["of lifespan", "black", "black"]
        assert await ego.paint.call_one("red") == "of lifespan"
