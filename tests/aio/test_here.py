"""Asyncio actors of the program's own process: their loop is in a thread, and no process is started (K05).

Some tests have it in the main thread, as workers do: then it drives Trio.
"""

from __future__ import annotations

import asyncio
import gc
import math
import signal
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, nullcontext, suppress
from contextvars import Context, ContextVar
from functools import partial
from types import FrameType
from typing import Any

import pytest
import sniffio
import trio
from tests.aio.test_deadlines import Clock
from tests.conformance.probe import Probe
from tests.patience import HANG_SECONDS

import trimesh
import trimesh.blocking as tb
from trimesh import RemoteCancelled, TrimeshInternalError, endpoint, leaves, this_proc
from trimesh._runtime.life import current_proc
from trimesh._transport.native.transport import NativeTransport
from trimesh.aio.actor import MainLoop, find_steps, lease_main_loop, lease_thread
from trimesh.aio.asyncio_work import block_in_asyncio, items_from_asyncio

NOTES: list[str] = []
"""What the actors do: they are in this process."""

LIMIT_SECONDS = 1_000.0

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
    async def hold_after_a_call(self, other: Probe) -> None:
        await asyncio.sleep(0)
        await other.rank.call_one()
        await self.hold("cancel")

    @endpoint
    async def cancel_itself(self) -> None:
        raise asyncio.CancelledError

    @endpoint
    async def ask(self, other: Probe) -> list[Any]:
        first = await other.note.call_one("asked")
        async with other.rank.stream() as items:
            return [first, *[item async for _, item in items]]

    @endpoint
    async def left(self, clock: Clock, way: str) -> float:
        """Return the time that a call has to end."""
        match way:
            case "task":
                return await asyncio.create_task(self._left(clock))
            case "started":
                return await clock.left.call_one.start()
            case "limit":
                async with trimesh.aio.fail_after(LIMIT_SECONDS):
                    return await clock.left.call_one()
            case _:
                return await self._left(clock)

    async def _left(self, clock: Clock) -> float:
        return await clock.left.call_one()

    @endpoint
    async def limited(self, other: Probe) -> str:
        try:
            async with trimesh.aio.fail_after(0):
                await other.hold.call_one("limited")
        except TimeoutError as error:
            return str(error)
        return "not cut"

    @endpoint
    async def nest(self, *, holds: bool) -> int:
        async with this_proc().spawn("inner", Probe) as inner:
            if holds:
                try:
                    self.note("begun")
                    await asyncio.Event().wait()
                finally:
                    await asyncio.sleep(0)
                    self.note("unwound")
            return await inner.rank.call_one()

    @endpoint
    async def hold_there(self, other: Probe) -> None:
        self.note("call begun")
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

    @endpoint
    async def leave_things(self) -> list[str]:
        """Leave what the end of the loop ends; return the names of the thread, and of the library that is seen."""
        loop = asyncio.get_running_loop()
        self.kept_generator = self._generate()
        await anext(self.kept_generator)
        self.kept = loop.create_task(self._run(), context=Context())
        if threading.current_thread() is threading.main_thread():
            loop.add_signal_handler(signal.SIGUSR1, print)
        library = sniffio.current_async_library()
        thread = await loop.run_in_executor(None, threading.current_thread)
        return [thread.name, library]

    async def _generate(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            await asyncio.sleep(0)
            self.note("generator closed")

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
    async def stop_the_loop(self, how: str) -> None:
        async def leave() -> None:
            raise SystemExit(3)

        if how == "stop":
            self.loop.call_soon(self.loop.stop)
        else:
            self.kept = asyncio.create_task(leave())
        await asyncio.Event().wait()


@pytest.fixture(autouse=True)
def _no_notes() -> None:
    NOTES.clear()


@asynccontextmanager
async def actors_in(place: str) -> AsyncGenerator[None, None]:
    """Have the loop of actors in a thread, or in the main thread: that of asyncio, or uvloop."""
    async with this_proc().spawn("holder", Probe):
        if place == "thread":
            yield
            return
        proc, steps = current_proc(), find_steps()
        assert steps is not None
        assert isinstance(proc.transport, NativeTransport)
        loop = proc.above[MainLoop] = MainLoop(proc.transport, steps)
        loop.open()
        try:
            with pytest.MonkeyPatch.context() as patch:
                if place == "uvloop":
                    uvloop: Any = pytest.importorskip("uvloop", reason="uvloop is not installed")
                    patch.setattr(asyncio, "new_event_loop", uvloop.new_event_loop)
                leased = await lease_main_loop(proc)  # before it has started
            assert leased is loop
            await loop.release()
            yield
        finally:
            await loop.release()


@pytest.fixture(params=["thread", "main", "uvloop"])
async def loop_in(request: pytest.FixtureRequest) -> AsyncGenerator[str, None]:
    """Where the loop of actors is."""
    async with actors_in(request.param):
        yield request.param


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


async def test_errors_are_those_of_the_endpoint(loop_in: str) -> None:
    """K05, NA-4: a cancel of its own is an error, too; the actor goes on."""
    async with this_proc().spawn("engine", Engine) as engine:
        with pytest.raises(LookupError, match="of the endpoint"):
            await engine.fail.call_one()
        with pytest.raises((RuntimeError, RemoteCancelled), match=r"must not raise asyncio\.CancelledError unless"):
            await engine.cancel_itself.call_one()
        assert await engine.inline.call_one(1) == 2


@pytest.mark.parametrize("outcome", ["cancel", "value", "error"])
async def test_cancel_reaches_the_task_once_and_is_waited_for(outcome: str, loop_in: str) -> None:
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


async def test_cancel_of_the_endpoint_cancels_its_call_to_another_actor(loop_in: str) -> None:
    """NA-3: which has ended when the endpoint goes on."""
    async with this_proc().spawn("probe", Probe) as probe, this_proc().spawn("engine", Engine) as engine:
        assert await engine.ask.call_one(probe) == ["asked", 0]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.hold_there.call_one, probe)
            await probe.wait.call_one("there")
            nursery.cancel_scope.cancel()
        assert NOTES == ["call begun", "call ended"]
        assert await engine.inline.call_one(1) == 2


async def test_cancel_comes_after_a_call_that_has_ended(loop_in: str) -> None:
    """NA-2: which has had a cancel function of its own."""
    async with this_proc().spawn("probe", Probe) as probe, this_proc().spawn("engine", Engine) as engine:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.hold_after_a_call.call_one, probe)
            await engine.noted.call_one("begun")
            nursery.cancel_scope.cancel()
        assert NOTES == ["begun", "hold_after_a_call() was cancelled", "unwound"]


async def test_calls_that_have_ended_leave_no_cycle(loop_in: str) -> None:
    """K05: of an error, or a cancel, its traceback and the frames of the endpoint, with all that they refer to."""
    async with this_proc().spawn("engine", Engine) as engine:
        await end_calls(engine)
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            await end_calls(engine)
            gc.collect()
            frames = {one.f_code.co_qualname for one in gc.garbage if isinstance(one, FrameType)}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert [name for name in frames if name.startswith(("Engine.", "AsyncioWork", "SlotCall", "StandIn"))] == []


async def end_calls(engine: Any) -> None:
    """Make calls that end by an error, by a cancel, by both, and by neither."""
    with pytest.raises(LookupError):
        await engine.fail.call_one()
    for outcome in ("value", "cancel", "error"):
        NOTES.clear()
        with suppress(BaseExceptionGroup):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.hold.call_one, outcome)
                await engine.noted.call_one("begun")
                nursery.cancel_scope.cancel()
    with suppress(LookupError, BaseExceptionGroup):
        async with engine.count.stream(3, fails_at=2) as items:
            async for _ in items:
                pass


async def test_cancel_at_any_turn_is_not_lost(loop_in: str) -> None:
    """NA-1: what has begun has ended."""
    async with this_proc().spawn("probe", Probe) as probe, this_proc().spawn("engine", Engine) as engine:
        with trio.fail_after(HANG_SECONDS):
            for turns in range(24):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(engine.hold_there.call_one, probe)
                    for _ in range(turns):
                        await trio.lowlevel.checkpoint()
                    nursery.cancel_scope.cancel()
                assert await engine.inline.call_one(turns) == turns + 1
            # A loop in a thread may be too slow for so few turns: one more call has surely come there.
            already = (await probe.seen.call_one()).count("there")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.hold_there.call_one, probe)
                await probe.wait.call_one("there", already + 1)
                nursery.cancel_scope.cancel()
        assert ["call begun", "call ended"] * (len(NOTES) // 2) == NOTES
        assert NOTES
        seen = await probe.seen.call_one()
        assert seen.count("there") == seen.count("there cancelled") > 0


async def test_time_of_the_caller_is_that_of_the_calls_of_its_endpoint(loop_in: str) -> None:
    """D03, K05, NA-3: not in another task of asyncio; a limit in it may be earlier."""
    async with this_proc().spawn("clock", Clock) as clock, this_proc().spawn("engine", Engine) as engine:
        found = {way: await engine.left.call_one(clock, way) for way in ("", "started", "task")}
        assert found == dict.fromkeys(found, math.inf)
        assert 0 < await engine.left.call_one(clock, "limit") <= LIMIT_SECONDS
        with trio.fail_after(2 * LIMIT_SECONDS):
            for way in ("", "started"):
                assert LIMIT_SECONDS < await engine.left.call_one(clock, way) <= 2 * LIMIT_SECONDS
            assert await engine.left.call_one(clock, "task") == math.inf
            assert 0 < await engine.left.call_one(clock, "limit") <= LIMIT_SECONDS
    async with this_proc().spawn("probe", Probe) as probe, this_proc().spawn("engine", Engine) as engine:
        assert await engine.limited.call_one(probe) == "the time limit of 0 s is over"
        assert "limited" not in await probe.seen.call_one()


async def test_block_in_an_endpoint_is_left_with_it(loop_in: str) -> None:
    """K05, NA-3: by its end, or a cancel of the caller."""
    async with this_proc().spawn("engine", Engine) as engine:
        assert await engine.nest.call_one(holds=False) == 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(engine.nest.call_one, holds=True))
            await engine.noted.call_one("begun")
            nursery.cancel_scope.cancel()
        assert NOTES == ["begun", "unwound"]
        assert await engine.nest.call_one(holds=False) == 0


async def test_generators_stream_until_they_end_or_are_left(loop_in: str) -> None:
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


@pytest.mark.parametrize("error", [None, LookupError("on the way out")], ids=["quiet", "error"])
@pytest.mark.parametrize("place", ["thread", "main"])
async def test_generator_that_is_closed_has_ended(place: str, error: Exception | None) -> None:
    """NA-1, NA-2: an error that it raises then is raised here."""

    async def generate() -> AsyncGenerator[int, None]:
        try:
            yield 1
            yield 2
        finally:
            await asyncio.sleep(0)
            NOTES.append("closed")
            if error is not None:
                raise error

    async with actors_in(place):
        loop = await (lease_main_loop if place == "main" else lease_thread)(current_proc())
        assert loop is not None
        try:
            items = items_from_asyncio(loop, generate, "generate()")
            assert await anext(items) == 1
            with nullcontext() if error is None else pytest.raises(LookupError, match="on the way out"):
                await items.aclose()
            assert NOTES == ["closed"]
        finally:
            await loop.release()


@pytest.mark.parametrize("place", ["thread", "main"])
async def test_block_that_is_cancelled_has_been_left(place: str) -> None:
    """NA-1: and the cancel goes on."""

    @asynccontextmanager
    async def block() -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            await asyncio.sleep(0)
            NOTES.append("left")

    async with actors_in(place):
        loop = await (lease_main_loop if place == "main" else lease_thread)(current_proc())
        assert loop is not None
        try:
            with trio.CancelScope() as scope:
                async with block_in_asyncio(loop, block(), "block"):
                    scope.cancel()
                    await trio.lowlevel.checkpoint()
                NOTES.append("behind it")
            assert scope.cancelled_caught
            assert NOTES == ["left"]
        finally:
            await loop.release()


async def test_tasks_that_are_left_end_with_their_actor(loop_in: str) -> None:
    """K05: they are cancelled and awaited."""
    async with this_proc().spawn("other", Engine) as other:
        async with this_proc().spawn("engine", Engine) as engine:
            await engine.leave_a_task.call_one()
        assert NOTES == ["left", "its actor has ended"]
        assert await other.inline.call_one(1) == 2


@pytest.mark.parametrize("place", ["init", "entering", "leaving"])
async def test_error_while_an_actor_begins_or_ends_is_raised_by_its_block(place: str, loop_in: str) -> None:
    with pytest.RaisesGroup(
        pytest.RaisesExc(LookupError, match=f"in {place}"), flatten_subgroups=True, allow_unwrapped=True
    ):
        async with this_proc().spawn("engine", Engine, place):
            NOTES.append("body")
    assert (["body", "left"] if place == "leaving" else []) == NOTES
    assert loops() == 0


async def test_lifespan_is_left_when_its_block_is_cancelled(loop_in: str) -> None:
    """K05: before the block has ended; its error on the way out is raised."""
    with trio.CancelScope() as scope:
        async with this_proc().spawn("engine", Engine):
            scope.cancel()
            await trio.sleep_forever()
    assert NOTES == ["left"]
    with (
        pytest.RaisesGroup(
            pytest.RaisesExc(LookupError, match="in leaving"), flatten_subgroups=True, allow_unwrapped=True
        ),
        trio.CancelScope() as scope,
    ):
        async with this_proc().spawn("engine", Engine, "leaving"):
            scope.cancel()
            await trio.sleep_forever()
    assert NOTES == ["left"] * 2


async def test_error_of_a_task_of_lifespan_ends_the_actor(loop_in: str) -> None:
    """K05: the block raises it; its calls end."""
    with pytest.raises(BaseExceptionGroup) as caught:
        async with this_proc().spawn("engine", Engine) as engine:
            await engine.break_lifespan.call_one()
    assert KeyError in {type(leaf) for leaf in leaves(caught.value)}
    assert NOTES == ["left"]
    async with this_proc().spawn("again", Engine) as again:
        assert await again.inline.call_one(1) == 2


@pytest.mark.parametrize("place", ["thread", "main"])
async def test_end_of_the_loop_is_that_of_asyncio(place: str) -> None:
    """LH-1: of tasks, async generators and the executor; signals are those of Trio again."""

    def wakeup() -> int:
        found = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(found)
        return found

    before = wakeup()
    async with actors_in(place), this_proc().spawn("engine", Engine) as engine:
        thread, library = await engine.leave_things.call_one()
        assert sniffio.current_async_library() == "trio"
        assert library == "asyncio"
    assert sorted(NOTES) == ["", "generator closed", "left"]
    assert thread not in [one.name for one in threading.enumerate()]
    assert wakeup() == before
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    assert sniffio.current_async_library() == "trio"
    with trio.open_signal_receiver(signal.SIGUSR1) as signals:
        signal.raise_signal(signal.SIGUSR1)
        assert await anext(signals) == signal.SIGUSR1


def test_error_of_trio_itself_is_raised_by_its_run() -> None:
    """LH-3: also while the loop of actors drives it."""

    async def fail() -> None:
        raise KeyError("of a system task")

    async def program() -> None:
        async with actors_in("main"):
            trio.lowlevel.spawn_system_task(fail)
            await trio.sleep_forever()

    with pytest.raises(trio.TrioInternalError):
        trio.run(program)


async def test_error_of_a_slot_is_raised_in_its_task() -> None:
    """LH-3: and the loop serves on."""

    async def serve() -> None:
        await trio.lowlevel.checkpoint()
        raise LookupError("of the slot")

    async with actors_in("main"):
        loop: MainLoop = current_proc().above[MainLoop]
        with pytest.raises(LookupError, match="of the slot"):
            await loop.serve_slot(serve)
        async with this_proc().spawn("engine", Engine) as engine:
            assert await engine.inline.call_one(1) == 2


@pytest.mark.parametrize("how", ["stop", "exit"])
async def test_loop_that_ends_by_itself_fails_its_users(how: str, loop_in: str) -> None:
    """LH-3: the next actor has a new one."""
    raised: list[type[BaseException]] = []
    with pytest.raises(Exception) as caught:  # noqa: PT011 - alone, or in a group
        async with this_proc().spawn("engine", Engine) as engine, this_proc().spawn("idle", Engine):
            try:
                await engine.stop_the_loop.call_one(how)
            except BaseException as error:
                raised.append(type(error))
                raise
    assert raised == [TrimeshInternalError]
    assert {type(leaf) for leaf in leaves(caught.value)} == {TrimeshInternalError}
    assert "the asyncio loop of this process has ended" in str(next(leaves(caught.value)))
    async with this_proc().spawn("again", Engine) as again:
        assert await again.inline.call_one(1) == 2
