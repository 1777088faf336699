"""Blocks and work of asyncio tasks in Trio, without processes: order, errors, cancels, time limits (K04)."""

from __future__ import annotations

import asyncio
import contextvars
import math
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing
from tests.aio.loops import LOOPS, Attempt, Test, run_beside_trio, run_in_thread
from tests.conformance.probe import Probe
from tests.noted_blocks import Block, cancellable, nothing, seconds_left
from tests.patience import HANG_SECONDS

import trimesh
from trimesh import limits, this_proc
from trimesh._runtime.tasks import in_trio, in_trio_block, in_trio_now, in_trio_taking, place_outside
from trimesh.aio import fail_after, move_on_after, trio_run
from trimesh.aio.actor import find_steps
from trimesh.errors import TrimeshInternalError

Run = Callable[[Test], None]

LONG_SECONDS = 1_000.0


@pytest.fixture(params=[*LOOPS, "beside"])
def run(request: pytest.FixtureRequest) -> Run:
    """Run a test on one kind of loop, or beside a Trio run of the program."""
    return LOOPS.get(request.param, run_beside_trio)


async def work_until(done: trio.Event, notes: list[Any], outcome: Any = "value") -> Any:
    """Wait; when that is cancelled, return a value or raise an error all the same, after some turns."""
    notes.append("begun")
    try:
        await done.wait()
    except trio.Cancelled:
        with trio.CancelScope(shield=True):
            for _ in range(3):
                await trio.lowlevel.checkpoint()
        notes.append("unwound")
        if outcome is None:
            raise
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


async def begun(notes: list[Any]) -> None:
    while "begun" not in notes:  # noqa: ASYNC110 - whatever has begun it
        await asyncio.sleep(0)


# ---- blocks ----------------------------------------------------------------------------------------------------------


def test_blocks_share_a_run_and_are_left_last_first(run: Run) -> None:
    """K04, BD-1: the run ends with the last one."""
    notes: list[Any] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with in_trio_block(Block("outer", notes)) as outer:
            first = trio_run.find_run(loop)
            assert first is not None
            async with in_trio_block(Block("inner", notes)) as inner:
                notes.append((outer, inner, await in_trio(nothing)()))
            assert trio_run.find_run(loop) is first
            assert await in_trio(nothing)() == 7
        assert trio_run.find_run(loop) is None
        async with trimesh.aio.open_trio():
            assert trio_run.find_run(loop) not in (None, first)

    run(main)
    assert notes == ["enter outer", "enter inner", ("outer", "inner", 7), "leave inner", "leave outer"]


def test_block_that_is_entered_while_the_run_ends_has_a_new_one(run: Run) -> None:
    """RUN-1, K04: once that has ended."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        block = trimesh.aio.open_trio()
        await block.__aenter__()
        first = trio_run.find_run(loop)
        assert first is not None
        leaving = asyncio.create_task(block.__aexit__(None, None, None))
        while not first.is_ending:  # noqa: ASYNC110 - no event says so
            await asyncio.sleep(0)
        async with trimesh.aio.open_trio():
            assert trio_run.find_run(loop) not in (None, first)
            assert leaving.done()
        await leaving

    run(main)


def test_error_of_a_body_passes_through_its_blocks(run: Run) -> None:
    """K04, BD-2: each may suppress it, or raise another."""
    notes: list[Any] = []
    error, failure = ValueError("of the body"), LookupError("on the way out")

    async def main() -> None:
        with pytest.raises(ValueError, match="of the body") as caught:
            async with in_trio_block(Block("a", notes)):
                raise error
        assert caught.value is error
        async with in_trio_block(Block("quiet", notes, suppresses=True)):
            raise error
        async with in_trio_block(Block("idle", notes, suppresses=True)):
            pass
        for of_body in (error, None):
            with pytest.raises(LookupError) as other:
                async with in_trio_block(Block("loud", notes, fails=failure)):
                    if of_body is not None:
                        raise of_body
            assert other.value is failure

    run(main)
    assert [note for note in notes if note.startswith("leave")] == [
        *("leave a by ValueError", "leave quiet by ValueError", "leave idle", "leave loud by ValueError", "leave loud"),
    ]


def test_block_that_cannot_be_entered_leaves_nothing(run: Run) -> None:
    """K04: by its error, or a cancel of the task or of the block around it."""
    notes: list[Any] = []

    @asynccontextmanager
    async def closed() -> AsyncGenerator[None, None]:
        await trio.lowlevel.checkpoint()
        raise OSError("no entry")
        yield

    @asynccontextmanager
    async def slow() -> AsyncGenerator[None, None]:
        notes.append("begun")
        await trio.sleep_forever()
        yield

    async def enter() -> None:
        async with in_trio_block(slow()):
            notes.append("body")

    async def main() -> None:
        with pytest.raises(OSError, match="no entry"):
            async with in_trio_block(closed()):
                notes.append("body")
        attempt = Attempt(enter())
        await begun(notes)
        attempt.task.cancel("by the test")
        error = await attempt.over()
        assert isinstance(error, asyncio.CancelledError)
        assert error.args == ("by the test",)
        async with in_trio_block(cancellable()) as scope:
            attempt = Attempt(enter())
            notes.clear()
            await begun(notes)
            in_trio_now(scope.cancel)()
            await attempt.over()
            assert isinstance(attempt.error, asyncio.CancelledError)
            with pytest.raises(asyncio.CancelledError):
                await asyncio.Event().wait()
            raise ValueError("of the body") if "body" in notes else asyncio.CancelledError

    run(main)
    assert notes == ["begun"]


def test_cancel_of_a_block_in_trio_reaches_its_body_once(run: Run) -> None:
    """CX-3: and is taken back when the block has absorbed it; one of the task itself stays."""
    notes: list[Any] = []

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        async with in_trio_block(cancellable()) as scope:
            in_trio_now(scope.cancel)()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await asyncio.sleep(0)
                notes.append(task.cancelling())
                raise
        assert task.cancelling() == 0
        await asyncio.sleep(0)

        async def body() -> None:
            async with in_trio_block(cancellable()) as scope:
                in_trio_now(scope.cancel)()
                notes.append("begun")
                try:
                    await asyncio.Event().wait()
                finally:
                    asyncio.current_task().cancel("of its own")  # type: ignore[union-attr]

        attempt = Attempt(body())
        assert isinstance(await attempt.over(), asyncio.CancelledError)
        assert attempt.task.cancelling() == 1

    run(main)
    assert notes == [1, "begun"]


def test_token_names_the_run_that_does_the_work() -> None:
    """K04: of a thread that it has not started."""
    threads: list[int] = []

    async def main(token: trio.lowlevel.TrioToken) -> None:
        async with trimesh.aio.open_trio(trio_token=token):
            threads.append(in_trio_now(threading.get_ident)())

    async def program() -> None:
        token = trio.lowlevel.current_trio_token()
        thread = threading.Thread(target=lambda: asyncio.run(main(token)))
        thread.start()
        await trio.to_thread.run_sync(thread.join)
        assert threads == [threading.get_ident()]

    trio.run(program)


def test_loop_that_is_closed_in_a_block_does_not_hold_up_trio() -> None:
    """K04: whose program ends; the next loop has nothing of it."""
    blocks = []

    def enter_and_close() -> None:
        loop = asyncio.new_event_loop()
        blocks.append(trimesh.aio.open_trio())
        loop.run_until_complete(blocks[0].__aenter__())
        loop.close()

    async def program() -> None:
        with trio.fail_after(HANG_SECONDS):
            await trio.to_thread.run_sync(enter_and_close)

    async def main() -> None:
        async with trimesh.aio.open_trio():
            assert list(trio_run._runs) == [asyncio.get_running_loop()]

    trio.run(program)
    asyncio.run(main())
    assert trio_run._runs == {}


def test_error_around_all_blocks_is_raised_by_them(run: Run) -> None:
    """RUN-3: with its cause; the Trio program of another loop goes on."""

    async def fail() -> None:
        raise LookupError("around all")

    async def main() -> None:
        with pytest.raises(TrimeshInternalError, match="has ended") as caught:
            async with trimesh.aio.open_trio():
                found = trio_run.find_run(asyncio.get_running_loop())
                assert found is not None
                assert found.root.nursery is not None
                in_trio_now(found.root.nursery.start_soon)(fail)
                await asyncio.Event().wait()
        assert caught.value.__cause__ is not None
        assert [str(leaf) for leaf in trimesh.leaves(caught.value.__cause__)] == ["around all"]
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    run(main)


# ---- work ------------------------------------------------------------------------------------------------------------


def test_result_of_work_is_that_of_trio(run: Run) -> None:
    """K04: its value or error, with context variables of the task, in the block that the task is in."""
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")

    async def read() -> tuple[str, bool]:
        await trio.lowlevel.checkpoint()
        found = variable.get()
        variable.set("of the work")
        return found, trio.lowlevel.in_trio_task()

    async def fail() -> None:
        await trio.lowlevel.checkpoint()
        raise LookupError("of the work")

    async def wrong() -> str:
        try:
            await foreign()
        except TypeError as error:
            return str(error)
        return "awaited"

    @types.coroutine
    def foreign() -> Generator[object, Any, None]:
        yield "of another library"

    async def main() -> None:
        async with trimesh.aio.open_trio():
            variable.set("of the task")
            assert await in_trio(read)() == ("of the task", True)
            assert variable.get() == "of the task"
            for _ in range(2):
                with pytest.raises(LookupError, match="of the work"):
                    await in_trio(fail)()
            assert await asyncio.gather(*(in_trio(nothing)() for _ in range(3 * limits.SPARE_STAND_INS_MAX))) == [7] * (
                3 * limits.SPARE_STAND_INS_MAX
            )
            assert in_trio_now(trio.lowlevel.in_trio_run)()
            assert not trio.lowlevel.in_trio_task()
            assert "'of another library'" in await in_trio(wrong)()

    run(main)


def test_loop_of_actors_can_drive_only_a_run_that_trio_drives(run: Run) -> None:
    """LH-1: not a guest, whose loop drives it."""

    async def find() -> object:
        await trio.lowlevel.checkpoint()
        return find_steps()

    async def main() -> None:
        assert find_steps() is None
        async with trimesh.aio.open_trio():
            assert find_steps() is None
            assert (await in_trio(find)() is None) is (run is not run_in_thread)

    run(main)


def test_work_waits_until_all_tasks_of_trio_are_blocked(run: Run) -> None:
    """DV-2: though no deadline is near; not while others work."""
    notes: list[Any] = []

    async def work() -> None:
        notes.append("begun")
        for _ in range(5):
            await trio.sleep(0.001)
        notes.append("blocked")
        await trio.sleep_forever()

    async def main() -> None:
        async with trimesh.aio.open_trio():
            attempt = Attempt(in_trio(work)())
            await begun(notes)
            await in_trio(trio.testing.wait_all_tasks_blocked)(0.01)
            assert notes == ["begun", "blocked"]
            attempt.task.cancel()
            await attempt.over()

    run(main)


@pytest.mark.parametrize("taking", [False, True], ids=["run", "take"])
@pytest.mark.parametrize("outcome", [None, "value", LookupError("of the work")], ids=["cancel", "value", "error"])
def test_cancel_of_a_task_cancels_its_work_and_waits_for_its_end(outcome: Any, taking: bool, run: Run) -> None:
    """CX-1, CX-2: an error of the work wins, a value does not; a step that takes something gets it put back."""
    notes, back = list[Any](), list[Any]()

    async def work() -> Any:
        return await work_until(trio.Event(), notes, outcome)

    async def attempt_it() -> Any:
        return await (in_trio_taking(work, back.append) if taking else in_trio(work)())

    async def main() -> None:
        async with trimesh.aio.open_trio():
            attempt = Attempt(attempt_it())
            await begun(notes)
            attempt.task.cancel("by the test")
            await asyncio.sleep(0)
            attempt.task.cancel("again")
            error = await attempt.over()
            assert notes == ["begun", "unwound"]
            if isinstance(outcome, LookupError):
                assert error is outcome
            else:
                assert isinstance(error, asyncio.CancelledError)
                assert error.args == ("by the test",)
            assert await in_trio(nothing)() == 7
        assert back == (["value"] if taking and outcome == "value" else [])

    run(main)


def test_cancel_before_the_work_begins_is_raised_without_it(run: Run) -> None:
    notes: list[Any] = []

    async def work() -> None:
        notes.append("begun")
        await trio.lowlevel.checkpoint()

    async def main() -> None:
        async with trimesh.aio.open_trio():
            await in_trio(nothing)()

            async def cancelled_first() -> None:
                asyncio.current_task().cancel("before")  # type: ignore[union-attr]
                await in_trio(work)()

            error = await Attempt(cancelled_first()).over()
            assert isinstance(error, asyncio.CancelledError)
            assert error.args == ("before",)
            assert await in_trio(nothing)() == 7

    run(main)


def test_cancel_in_trio_cancels_the_task_that_waits_for_work(run: Run) -> None:
    """CX-3: the work sees `trio.Cancelled`, the task its own kind, and its block is over."""
    notes: list[Any] = []

    async def main() -> None:
        async with in_trio_block(cancellable()) as scope:

            async def work() -> None:
                scope.cancel()
                await work_until(trio.Event(), notes, None)

            with pytest.raises(asyncio.CancelledError):
                await in_trio(work)()
            notes.append("caught")
            raise asyncio.CancelledError

    run(main)
    assert notes == ["begun", "unwound", "caught"]


@pytest.mark.parametrize("taking", [False, True], ids=["run", "take"])
def test_cancel_of_a_block_may_come_with_a_result(taking: bool) -> None:
    """CX-2, CX-3: to the loop of another thread, which is busy: then the await of the result raises it.

    So what the body does about the cancel of its block must be around each await.
    """
    notes, back = list[Any](), list[int]()
    gate = threading.Event()

    async def open_gate() -> None:
        for _ in range(10):  # the task of the block has seen the cancel by then
            await trio.lowlevel.checkpoint()
        gate.set()

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        with pytest.raises(LookupError, match="here"):
            async with in_trio_block(cancellable()) as scope:

                async def work() -> int:
                    trio.lowlevel.spawn_system_task(open_gate)
                    scope.cancel()
                    return 7

                asyncio.get_running_loop().call_soon(gate.wait, HANG_SECONDS)
                try:
                    notes.append(await (in_trio_taking(work, back.append) if taking else in_trio(work)()))
                except asyncio.CancelledError:
                    notes.append(task.cancelling())
                    raise LookupError("here") from None
        assert task.cancelling() == 0

    run_in_thread(main)
    assert notes == [1]
    assert back == [7] * taking


def test_closed_coroutine_leaves_its_work_to_trio(run: Run) -> None:
    """K04: it is cancelled, and has unwound when the block is left."""
    notes: list[Any] = []

    async def work() -> None:
        await work_until(trio.Event(), notes, None)

    async def main() -> None:
        async with trimesh.aio.open_trio():
            await in_trio(nothing)()
            coroutine: Any = in_trio(work)()
            coroutine.send(None)
            await begun(notes)
            coroutine.close()
            assert await in_trio(nothing)() == 7

    run(main)
    assert notes == ["begun", "unwound"]


def test_actors_of_the_program_serve_its_asyncio_code(run: Run) -> None:
    """K04: calls at once, streams, cancels and started calls, without a process."""

    async def main() -> None:
        async with this_proc().spawn("probe", Probe) as probe:
            assert await probe.note.call_one(0) == 0
            assert await asyncio.gather(*(probe.note.call_one(n) for n in range(1, 50))) == list(range(1, 50))
            assert await probe.note.call_one.start("started") == "started"
            probe.note.broadcast_nowait("cast")
            await probe.wait.call_one("cast")
            async with probe.rank.stream() as items:
                assert [item async for _, item in items] == [0]
            for turns in range(1, 7):
                attempt = Attempt(probe.hold.call_one(f"held {turns}"))
                for _ in range(turns):
                    await asyncio.sleep(0)
                attempt.task.cancel()
                assert isinstance(await attempt.over(), asyncio.CancelledError)
            async with move_on_after(0.01):
                await probe.hold.call_one("in time")
            seen = await probe.seen.call_one()
            held = [note for note in seen if str(note).startswith(("held", "in time"))]
            assert len(held) == 2 * len({str(note).removesuffix(" cancelled") for note in held})

    run(main)


def test_work_outside_of_blocks_is_refused(run: Run) -> None:
    """K04: in words; what does not wait runs where it is, and there is no place in Trio."""
    with pytest.raises(RuntimeError, match="must be used in a task of asyncio, got code outside of one"):
        trio_run.running_loop()
    assert place_outside() is None

    async def main() -> None:
        if trio_run.find_token() is None:
            with pytest.raises(RuntimeError, match="a loop without an open block: write `async with"):
                await in_trio(nothing)()
        else:
            assert await in_trio(nothing)() == 7  # by the run that started the thread
        assert (in_trio_now(threading.get_ident)() == threading.get_ident()) is (trio_run.find_token() is None)
        assert place_outside() is None

        async def has_place() -> bool:
            return place_outside() is not None

        async with trimesh.aio.open_trio():
            assert (in_trio_now(threading.get_ident)() == threading.get_ident()) is (run is not run_in_thread)
            outer = place_outside()
            async with in_trio_block(cancellable()):
                assert place_outside() not in (None, outer)
            assert place_outside() is outer
            found = asyncio.create_task(has_place(), context=contextvars.Context())  # as a task from before the block
            assert await found

    run(main)


def test_interrupt_may_be_raised_unless_the_run_is_ending() -> None:
    """O6: in the main thread, by the guard around the handler of asyncio, which stays until the main task has ended."""
    armed: list[bool] = []

    async def main() -> None:
        usual = signal.getsignal(signal.SIGINT)
        async with trimesh.aio.open_trio():
            guard = signal.getsignal(signal.SIGINT)
            assert isinstance(guard, trio_run.InterruptGuard)
            async with trimesh.aio.open_trio():
                armed.append(guard.is_armed)
            armed.append(guard.is_armed)

            async def live_on() -> None:
                try:
                    await trio.sleep_forever()
                finally:
                    armed.append(guard.is_armed)

            run = trio_run.find_run(asyncio.get_running_loop())
            assert run is not None
            nursery = run.root.nursery
            assert nursery is not None
            nursery.start_soon(live_on)
            await in_trio(nothing)()
        armed.append(guard.is_armed)
        async with trimesh.aio.open_trio():
            assert signal.getsignal(signal.SIGINT) is guard
        assert signal.getsignal(signal.SIGINT) is guard is not usual

    before = signal.getsignal(signal.SIGINT)
    asyncio.run(main())
    assert armed == [True, True, False, True]
    assert signal.getsignal(signal.SIGINT) is before


def test_interrupt_of_a_loop_without_a_handler_ends_its_blocks() -> None:
    """O6: Trio has its own, which raises it in the task that holds them."""
    notes: list[Any] = []

    async def main() -> None:
        async with in_trio_block(Block("a", notes)):
            signal.raise_signal(signal.SIGINT)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await asyncio.sleep(0)
                notes.append("unwound")
                raise

    loop = asyncio.new_event_loop()
    try:
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(main())
    finally:
        loop.close()
    assert notes == ["enter a", "unwound", "leave a by Cancelled"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert trio_run._runs == {}


def test_interrupt_is_raised_once_and_where_it_breaks_nothing() -> None:
    """O6: not in Trio, nor between two callbacks of asyncio; but where the loop sleeps."""
    notes: list[str] = []
    of_wait: list[Any] = []

    def strike() -> None:
        signal.raise_signal(signal.SIGINT)

    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        select = loop._selector.select

        def selected(timeout: float | None = None) -> Any:
            of_wait.append(sys._getframe(1))
            return select(timeout)

        loop._selector.select = selected
        async with trimesh.aio.open_trio():
            guard: Any = signal.getsignal(signal.SIGINT)
            strike()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.sleep(0)
            in_trio_now(strike)()
            for sleep in (asyncio.sleep, trio.sleep):
                coroutine: Any = sleep(1)
                guard(signal.SIGINT, coroutine.cr_frame)
                coroutine.close()
            notes.append("not yet")
            with pytest.raises(KeyboardInterrupt):
                guard(signal.SIGINT, of_wait[-1])
            strike()
            notes.append("once")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert notes == ["not yet", "once"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupt_after_the_end_of_trio_ends_the_program() -> None:
    """O6: while its main task goes on; then Ctrl-C has its usual handler again."""
    notes: list[str] = []

    async def main() -> None:
        async with trimesh.aio.open_trio():
            pass
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.sleep(0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        notes.append("raised")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    asyncio.run(main())
    assert notes == ["raised"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupt_while_the_run_ends_is_not_raised() -> None:
    """O6, RUN-2: the end is waited for, and the cancel of the first one is the task's."""
    notes: list[str] = []

    async def main() -> None:
        with pytest.raises(asyncio.CancelledError):
            async with trimesh.aio.open_trio():
                guard: Any = signal.getsignal(signal.SIGINT)

                async def live_on() -> None:
                    of_user: Any = nothing()
                    try:
                        await trio.sleep_forever()
                    finally:
                        for _ in range(3):
                            guard(signal.SIGINT, of_user.cr_frame)
                        of_user.close()
                        notes.append("unwound")

                run = trio_run.find_run(asyncio.get_running_loop())
                assert run is not None
                assert run.root.nursery is not None
                run.root.nursery.start_soon(live_on)
                await in_trio(nothing)()
        notes.append("left")

    asyncio.run(main())
    assert notes == ["unwound", "left"]


def test_guard_of_interrupts_serves_the_next_run() -> None:
    """O6: and stays until that is over, too."""

    async def main() -> None:
        async with trimesh.aio.open_trio():
            guard: Any = signal.getsignal(signal.SIGINT)
        async with trimesh.aio.open_trio():
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(asyncio.CancelledError):
                await asyncio.sleep(0)
            with pytest.raises(KeyboardInterrupt):
                guard(signal.SIGINT, None)
            assert signal.getsignal(signal.SIGINT) is guard
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    asyncio.run(main())


def test_descriptor_of_the_program_for_signals_is_kept() -> None:
    """O6: set before a block, or in it."""
    receiver, sender = socket.socketpair()

    def current() -> int:
        found = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(found)
        return found

    async def main() -> None:
        before = current()
        assert before == -1
        async with trimesh.aio.open_trio():
            assert current() not in (-1, sender.fileno())
        assert current() == -1
        async with trimesh.aio.open_trio():
            signal.set_wakeup_fd(sender.fileno())
        assert current() == sender.fileno()
        async with trimesh.aio.open_trio():
            assert current() == sender.fileno()
        assert current() == sender.fileno()

    with receiver, sender:
        sender.setblocking(False)
        try:
            asyncio.run(main())
        finally:
            signal.set_wakeup_fd(-1)


# ---- time limits -----------------------------------------------------------------------------------------------------


def test_earliest_limit_is_the_deadline_of_work(run: Run) -> None:
    """D02, LT-3: of work, and of calls that are started; in the task that entered it."""

    async def left_elsewhere() -> float:
        return await in_trio(seconds_left)()

    def placed() -> float:
        place = place_outside()
        assert place is not None
        assert place.run is trio_run.find_run(asyncio.get_running_loop())
        return in_trio_now(lambda: place.deadline - trio.current_time())()

    async def main() -> None:
        async with trimesh.aio.open_trio():
            assert (await in_trio(seconds_left)(), placed()) == (math.inf, math.inf)
            async with fail_after(LONG_SECONDS) as limit:
                assert limit.seconds == LONG_SECONDS
                assert 0 <= time.monotonic() + LONG_SECONDS - limit.deadline < LONG_SECONDS / 2
                async with move_on_after(2 * LONG_SECONDS):
                    assert LONG_SECONDS / 2 < await in_trio(seconds_left)() <= LONG_SECONDS
                async with move_on_after(LONG_SECONDS / 4):
                    assert 0 < await in_trio(seconds_left)() <= LONG_SECONDS / 4
                    assert 0 < placed() <= LONG_SECONDS / 4
                assert LONG_SECONDS / 2 < await in_trio(seconds_left)() <= LONG_SECONDS
                other = Attempt(left_elsewhere())
                assert await other.over() is None
                assert other.value == math.inf
            assert (await in_trio(seconds_left)(), placed()) == (math.inf, math.inf)

    run(main)


def test_limit_that_is_over_ends_work_and_blocks(run: Run) -> None:
    """D01, LT-1, LT-2: the task is cancelled once, and the cancel taken back."""
    notes: list[Any] = []

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        async with trimesh.aio.open_trio():
            with pytest.raises(TimeoutError, match="the time limit of 0 s is over") as caught:
                async with fail_after(0):
                    await in_trio(trio.sleep_forever)()
            assert isinstance(caught.value.__cause__, asyncio.CancelledError)
            async with move_on_after(0) as limit, in_trio_block(Block("a", notes)):
                await in_trio(trio.sleep_forever)()
            assert limit.cancelled_caught
            async with move_on_after(LONG_SECONDS), in_trio_block(Block("b", notes)):
                assert 0 < await in_trio(seconds_left)() <= LONG_SECONDS
            with pytest.raises(LookupError, match="of the work"):
                async with fail_after(0.01):
                    await in_trio(work_until)(trio.Event(), notes, LookupError("of the work"))
            assert task.cancelling() == 0
            assert await in_trio(nothing)() == 7

    run(main)
    assert [note for note in notes if note not in ("enter a", "leave a by Cancelled", "leave a by CancelledError")] == [
        *("enter b", "leave b", "begun", "unwound"),
    ]
