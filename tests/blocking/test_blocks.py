"""Blocks and waits of threads, without processes: order of leaving, errors, cancels, time limits, Ctrl-C (K06)."""

from __future__ import annotations

import atexit
import concurrent.futures
import gc
import math
import os
import resource
import signal
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import trio
from tests.blocking.test_lifetime import in_child, trio_threads
from tests.noted_blocks import Block, cancellable, nothing, seconds_left
from tests.patience import HANG_SECONDS

import trimesh.blocking as tb
from trimesh import limits
from trimesh.blocking.trio_thread import close_open_blocks
from trimesh.blocking.work import Body, Each, body_of, submit, wait, wait_now
from trimesh.errors import TrimeshInternalError


def kept(block: AbstractAsyncContextManager[Any], what: str, home: Body[Any] | None = None) -> Body[Any]:
    """Enter a block that stays open until `close`."""
    body = body_of(block, what, home)
    body.enter(keep=True)
    return body


async def cut(scope: trio.CancelScope) -> None:
    scope.cancel()
    await trio.sleep_forever()


@asynccontextmanager
async def failing() -> AsyncGenerator[Callable[[], None], None]:
    """Give a function that makes the block fail."""

    async def fail() -> None:
        raise LookupError("of a task")

    async with trio.open_nursery() as nursery:
        yield lambda: nursery.start_soon(fail)


def raises_failure() -> AbstractContextManager[object]:
    return pytest.RaisesGroup(pytest.RaisesExc(LookupError, match="of a task"), flatten_subgroups=True)


# ---- leaving ---------------------------------------------------------------------------------------------------------


def test_blocks_are_left_last_first() -> None:
    """K06: of those inside a `with`, first what stays open until `close`, the newest first; no others."""
    notes: list[Any] = []
    with tb.enter(Block("outer", notes)) as value:
        assert value == "outer"
        kept(Block("one", notes), "one")
        two = kept(Block("two", notes), "two")
        with tb.enter(Block("inner", notes)):
            kept(Block("three", notes), "three")
            assert tb.run(nothing) == 7
        two.close()
        two.close()
        kept(Block("four", notes), "four")
        five = kept(Block("five", notes), "five")
        assert trio_threads() == ["trimesh.blocking"]
    assert notes == [
        *("enter outer", "enter one", "enter two", "enter inner", "enter three"),
        *("leave three", "leave inner", "leave two"),
        *("enter four", "enter five", "leave five", "leave four", "leave one", "leave outer"),
    ]
    five.close()
    assert trio_threads() == []


def test_closing_leaves_the_thread_in_its_innermost_block() -> None:
    """K06: which is inside of another one than the block that is closed."""
    with tb.enter(Block("outer", [])):
        body = kept(Block("kept", []), "kept")
        with tb.enter(cancellable()) as scope:
            body.close()
            with pytest.raises(tb.Cancelled):
                tb.run(cut, scope)


def test_order_of_closing_is_checked() -> None:
    """K06: first what was opened inside; a block belongs into that of its home."""
    notes: list[Any] = []
    home = kept(Block("home", notes), "the home")
    inner = kept(Block("inner", notes), "the inner one", home)
    other = kept(Block("other", notes), "the other one", home)
    beside = kept(Block("beside", notes), "the one beside")
    with pytest.raises(
        RuntimeError, match=r"^close first what was opened inside: the other one is still open in the h"
    ):
        home.close()
    other.close()
    with pytest.raises(RuntimeError, match="inside: the inner one is still open"):
        home.close()
    inner.close()
    home.close()
    assert notes[4:] == ["leave other", "leave inner", "leave home"]
    late = kept(Block("late", notes), "late", home)  # its home has been left
    late.close()
    beside.close()
    with tb.enter(Block("with", notes)):
        body = body_of(Block("own", notes), "a block of its own")
        with pytest.raises(RuntimeError, match=r"is for a mesh of open\(\)"):
            body.close()  # nor one that was not entered
        with body, pytest.raises(RuntimeError, match=r"is for a mesh of open\(\), got a block of its own of a `with`"):
            body.close()
    assert trio_threads() == []


def test_error_of_a_body_passes_through_its_blocks() -> None:
    """K06: those that stay open inside, too; each may suppress it, or raise another."""
    notes: list[Any] = []
    error = ValueError("of the body")
    with pytest.raises(ValueError, match="of the body") as caught, tb.enter(Block("outer", notes)):
        kept(Block("kept", notes), "kept")
        raise error
    assert caught.value is error
    assert notes[2:] == ["leave kept by ValueError", "leave outer by ValueError"]
    with tb.enter(Block("quiet", notes, suppresses=True)):
        raise error
    with tb.enter(Block("nothing to suppress", notes, suppresses=True)):
        pass
    failure = LookupError("on the way out")
    with pytest.raises(LookupError, match="on the way out") as other, tb.enter(Block("loud", notes, fails=failure)):
        raise error
    assert other.value is failure
    with pytest.raises(LookupError), tb.enter(Block("loud", notes, fails=failure)):
        pass
    assert tb.run(nothing) == 7
    assert trio_threads() == []


def test_cancel_of_a_body_is_one_of_trio_in_its_block() -> None:
    """BD-2, K06: a time limit leaves it as a cancel of Trio would."""
    kinds = list[Any]()

    class Kinds(Block):
        async def __aexit__(self, *error: Any) -> bool:  # noqa: PYI036 - as they came
            kinds.append(error[0])
            return await super().__aexit__(*error)

    with tb.move_on_after(HANG_SECONDS) as limit, tb.enter(Kinds("a", [])):
        limit.deadline = 0.0  # over, at a moment that no busy machine can change
        tb.run(trio.sleep_forever)
    assert limit.cancelled_caught
    assert kinds == [trio.Cancelled]


def test_block_that_cannot_be_entered_is_not_open() -> None:
    """K06: nor is one that was entered before."""
    notes: list[Any] = []
    block = tb.enter(Block("a", notes))
    with block:
        assert "open" in repr(block)
        with pytest.raises(RuntimeError, match="can be entered once, got a second `with`"), block:
            pass
    assert notes == ["enter a", "leave a"]

    @asynccontextmanager
    async def closed() -> AsyncGenerator[None, None]:
        raise OSError("no entry")
        yield

    with pytest.raises(OSError, match="no entry"), tb.enter(closed()):
        notes.append("body")
    with tb.enter(Block("around", notes)):
        with pytest.raises(OSError, match="no entry"):
            kept(closed(), "closed")
        assert tb.run(nothing) == 7
    assert notes[2:] == ["enter around", "leave around"]
    assert trio_threads() == []


# ---- blocks that fail by themselves ----------------------------------------------------------------------------------


def test_failure_of_a_block_that_stays_open_is_raised_once() -> None:
    """E09, K06: by the call that it ends, else by the next one, else by `close`; not by calls of other blocks."""
    beside = kept(Block("beside", []), "beside")
    body = body_of(failing(), "failing")
    fail = body.enter(keep=True)

    async def wait_for_it() -> None:
        fail()
        await trio.sleep_forever()

    with raises_failure():
        wait(wait_for_it, body)
    body.close()
    for raised_by in (partial(wait, nothing), partial(submit, nothing)):
        body = body_of(failing(), "failing")
        fail = body.enter(keep=True)
        wait_now(fail, body)
        assert wait(nothing, beside) == 7
        with raises_failure():
            while True:
                raised_by(body)
        body.close()
    body = body_of(failing(), "failing")
    wait_now(body.enter(keep=True), body)
    with raises_failure():
        body.close()
    body.close()
    beside.close()
    assert trio_threads() == []


def test_failure_of_a_block_that_stays_open_is_raised_by_a_block_inside() -> None:
    """E09, K06: which it cancels while that is being left."""
    notes: list[Any] = []

    class Held(Block):
        async def __aexit__(self, *error: object) -> bool:
            notes.append("leaving")
            await trio.sleep_forever()
            return False

    home = body_of(failing(), "failing")
    fail = home.enter(keep=True)
    token = wait_now(trio.lowlevel.current_trio_token, home)
    with raises_failure(), body_of(Held("inner", notes), "inner", home):
        token.run_sync_soon(fail)
    home.close()
    assert notes[0] == "enter inner"
    assert trio_threads() == []


def test_failure_of_a_block_is_raised_at_its_end() -> None:
    """K06: the waits of its body end by `Cancelled`."""
    ended = list[tb.Cancelled]()
    with raises_failure(), tb.enter(failing()) as fail:
        try:
            wait_now(fail)
            tb.run(trio.sleep_forever)
        except tb.Cancelled as error:
            ended.append(error)
            raise
    assert [(str(error), error.limit) for error in ended] == [("the block around it was cancelled", None)]


def test_end_of_the_trio_run_fails_what_waits_for_it() -> None:
    """K06: with its cause; the next block has a new run."""

    async def end_the_run() -> None:
        async def fail() -> None:
            raise KeyError("of a system task")

        trio.lowlevel.spawn_system_task(fail)
        await trio.sleep_forever()

    with pytest.raises(
        TrimeshInternalError, match="the Trio run that does the work of this thread has ended"
    ) as caught:
        tb.run(end_the_run)
    assert isinstance(caught.value.__cause__, trio.TrioInternalError)
    assert tb.run(nothing) == 7
    body = kept(Block("kept", []), "kept")
    with pytest.raises(tb.Cancelled):
        tb.run(end_the_run)
    with pytest.raises(TrimeshInternalError):
        wait(nothing, body)
    assert tb.run(nothing) == 7
    assert trio_threads() == []


def test_end_of_the_trio_run_after_all_work_is_raised_by_the_last_block() -> None:
    """K06, TT-2."""

    async def fail() -> None:
        raise KeyError("of a system task")

    class Breaking(Block):
        async def __aexit__(self, *error: object) -> bool:
            trio.lowlevel.spawn_system_task(fail)
            return False

    with pytest.raises(TrimeshInternalError) as caught, tb.enter(Breaking("a", [])):
        pass
    assert isinstance(caught.value.__cause__, trio.TrioInternalError)
    assert trio_threads() == []


def test_trio_run_that_cannot_start_is_an_error() -> None:
    """K06: such as in a program that has no descriptor left; what was to stay open is closed by nothing."""
    assert tb.run(nothing) == 7
    body = body_of(Block("a", []), "a")
    free = os.dup(0)
    os.close(free)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        with pytest.raises(TrimeshInternalError) as caught:
            body.enter(keep=True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert isinstance(caught.value.__cause__, OSError)
    body.close()
    assert tb.run(nothing) == 7
    assert trio_threads() == []


# ---- time limits -----------------------------------------------------------------------------------------------------


def test_earliest_limit_around_a_wait_is_its_deadline() -> None:
    """D01, D02, K06: and only inside of its own block."""
    with tb.enter(Block("a", [])):
        assert tb.run(seconds_left) == math.inf
        with tb.fail_after(5_000):
            with tb.fail_after(9_000):
                assert 1_000 < tb.run(seconds_left) <= 5_000
            with tb.fail_after(1_000):
                assert 0 < tb.run(seconds_left) <= 1_000
            assert 1_000 < tb.run(seconds_left) <= 5_000
        assert tb.run(seconds_left) == math.inf


def test_limit_ends_waits_and_is_told_from_other_cancels() -> None:
    """D01, D06, K06: also if the block around the wait is cancelled at the same time."""

    with tb.enter(cancellable()) as scope, tb.move_on_after(HANG_SECONDS) as limit:
        with pytest.raises(tb.Cancelled, match=r"^the block around it was cancelled$") as caught:
            tb.run(cut, scope)
        assert caught.value.limit is None
    assert not limit.cancelled_caught
    over = pytest.raises(TimeoutError, match=r"^the time limit of 0 s is over$")
    with tb.enter(cancellable()) as scope, over, tb.fail_after(0):
        tb.run(cut, scope)
    with tb.move_on_after(0) as limit:
        tb.run(trio.sleep_forever)
    assert limit.cancelled_caught
    with pytest.raises(ValueError, match="wins"), tb.fail_after(0):
        raise ValueError("wins")


def test_limit_around_the_start_of_a_block_that_stays_open_ends_with_the_start() -> None:
    """D01, K06: one that is over leaves nothing of it."""
    with tb.fail_after(1_000):
        body = kept(Block("a", []), "a")
    assert wait(seconds_left, body) == math.inf
    body.close()
    notes: list[Any] = []
    for keep in (True, False):
        with pytest.raises(TimeoutError), tb.fail_after(0):
            body_of(Block("a", notes), "a").enter(keep=keep)
    assert notes == []
    assert trio_threads() == []


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------


def strike() -> None:
    os.kill(os.getpid(), signal.SIGINT)


async def strike_and_wait(notes: list[Any]) -> None:
    try:
        strike()
        await trio.sleep_forever()
    finally:
        notes.append("unwound")


def test_interrupt_is_raised_when_the_work_has_ended() -> None:
    """O6, K06: with the error of the work as its context; afterwards Ctrl-C has its usual handler."""
    notes: list[Any] = []
    with tb.enter(Block("a", notes)):
        with pytest.raises(KeyboardInterrupt):
            tb.run(strike_and_wait, notes)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert tb.run(nothing) == 7
    assert notes == ["enter a", "unwound", "leave a"]

    async def fail_on_the_way_out() -> None:
        with pytest.raises(trio.Cancelled):
            await strike_and_wait(notes)
        raise LookupError("on the way out")

    with pytest.raises(KeyboardInterrupt) as caught:
        tb.run(fail_on_the_way_out)
    assert isinstance(caught.value.__context__, LookupError)
    assert trio_threads() == []


def test_interrupt_while_a_block_is_entered_or_left_is_raised_at_the_end() -> None:
    """O6, K06: nothing of the block is left."""
    notes: list[Any] = []

    class Slow(Block):
        async def __aenter__(self) -> str:
            await strike_and_wait(notes)
            return "never"

    with pytest.raises(KeyboardInterrupt), tb.enter(Slow("a", notes)):
        notes.append("body")
    assert notes == ["unwound"]
    with pytest.raises(KeyboardInterrupt), tb.enter(Block("b", notes)):
        tb.run(strike_and_wait, notes)
    assert notes[1:] == ["enter b", "unwound", "leave b by KeyboardInterrupt"]
    assert trio_threads() == []


def test_interrupt_that_finds_a_block_entered_leaves_it() -> None:
    """O6, K06: without its body; an error on the way out is the context."""
    notes: list[Any] = []

    class Slow(Block):
        async def __aenter__(self) -> str:
            with pytest.raises(trio.Cancelled):
                await strike_and_wait(notes)
            with trio.CancelScope(shield=True):
                return await super().__aenter__()

        async def __aexit__(self, *error: object) -> bool:
            notes.append(error[0])
            raise ValueError("on the way out")

    with pytest.raises(KeyboardInterrupt) as caught, tb.enter(Slow("a", notes)):
        notes.append("body")
    assert isinstance(caught.value.__context__, ValueError)
    assert notes == ["unwound", "enter a", KeyboardInterrupt]
    assert trio_threads() == []


def test_interrupt_while_a_block_inside_is_left_cuts_leaving_of_those_around() -> None:
    """O6, K06: it came before they were waited for."""
    notes: list[Any] = []

    class Striking(Block):
        async def __aexit__(self, *error: Any) -> bool:  # noqa: PYI036 - as they came
            strike()
            return await super().__aexit__(*error)

    class Slow(Block):
        async def __aexit__(self, *error: object) -> bool:
            notes.append("leaving")
            await trio.sleep_forever()
            return False

    with pytest.raises(KeyboardInterrupt), tb.enter(Slow("outer", notes)):
        kept(Striking("inner", notes), "inner")
    assert notes[2] == "leave inner"
    assert trio_threads() == []


@pytest.mark.parametrize("of_body", [KeyboardInterrupt, LookupError])
def test_error_of_leaving_replaces_an_interrupt_unless_it_is_one(of_body: type[BaseException]) -> None:
    """O6, K06: a group of nothing but interrupts says no more than the interrupt of the body."""

    class Interrupted(Block):
        async def __aexit__(self, *error: object) -> bool:
            raise BaseExceptionGroup("of tasks", [KeyboardInterrupt()])

    expected = KeyboardInterrupt if of_body is KeyboardInterrupt else BaseExceptionGroup
    with pytest.raises(expected), tb.enter(Interrupted("a", [])):
        raise of_body
    with (
        pytest.raises(ValueError, match="on the way out"),
        tb.enter(Block("b", [], fails=ValueError("on the way out"))),
    ):
        raise of_body
    assert trio_threads() == []


def test_handler_of_the_program_is_left_alone() -> None:
    """O6: its error is raised when the work has been cancelled and has ended."""
    notes: list[Any] = []

    def handle(signum: int, frame: Any) -> None:
        raise LookupError("of the handler")

    before = signal.signal(signal.SIGINT, handle)
    try:
        with pytest.raises(LookupError, match="of the handler"):
            tb.run(strike_and_wait, notes)
        assert signal.getsignal(signal.SIGINT) is handle
    finally:
        signal.signal(signal.SIGINT, before)
    assert notes == ["unwound"]


def test_item_that_arrives_with_an_interrupt_is_not_lost() -> None:
    """K06: the next step returns it; an error, and a cancel, leave none."""
    notes: list[Any] = []

    async def items() -> AsyncGenerator[int, None]:
        yield 1
        with pytest.raises(trio.Cancelled):
            await strike_and_wait(notes)
        yield 2
        with pytest.raises(trio.Cancelled):
            await strike_and_wait(notes)
        raise LookupError("of an item")

    async def waiting() -> AsyncGenerator[int, None]:
        await strike_and_wait(notes)
        yield 3

    with tb.enter(Block("a", [])):
        each = Each(items())
        assert next(each) == 1
        assert not each.has_kept
        with pytest.raises(KeyboardInterrupt):
            next(each)
        assert each.has_kept
        assert next(each) == 2
        for one in (each, Each(waiting())):
            with pytest.raises(KeyboardInterrupt):
                next(one)
            assert not one.has_kept
        assert list(each) == []
    assert notes == ["unwound"] * 3


# ---- threads of Trio programs, forks, the exit of the interpreter ----------------------------------------------------


def in_thread_of_trio(work: Callable[[], Any], around: Callable[[], Any] = trio.CancelScope) -> Any:
    async def main() -> Any:
        with around():
            return await trio.to_thread.run_sync(work)

    return trio.run(main)


def test_thread_of_a_trio_program_waits_in_the_task_that_started_it() -> None:
    """K06: with its deadline, and the limit of the thread; blocks are entered in the same run."""
    assert in_thread_of_trio(partial(tb.run, nothing)) == 7
    assert in_thread_of_trio(partial(tb.run, seconds_left)) == math.inf
    within = partial(trio.move_on_after, 1_000)
    assert 0 < in_thread_of_trio(partial(tb.run, seconds_left), within) <= 1_000

    def limited() -> float:
        with pytest.raises(TimeoutError, match=r"^the time limit of 0 s is over$"), tb.fail_after(0):
            tb.run(trio.sleep_forever)
        with tb.fail_after(500):
            left: float = tb.run(seconds_left)
        return left

    assert 0 < in_thread_of_trio(limited, within) <= 500
    notes: list[Any] = []

    def blocks() -> None:
        with tb.enter(Block("outer", notes)), tb.enter(Block("inner", notes)):
            notes.append(tb.run(nothing))
        assert trio_threads() == []

    in_thread_of_trio(blocks)
    in_thread_of_trio(blocks)  # in a new run
    assert notes == ["enter outer", "enter inner", 7, "leave inner", "leave outer"] * 2

    def cut_around() -> None:
        with tb.enter(cancellable()) as scope, pytest.raises(tb.Cancelled), tb.enter(Block("inner", [])):
            tb.run(cut, scope)

    in_thread_of_trio(cut_around)


def test_trio_task_must_not_block() -> None:
    """K06: nor a function that it calls."""

    async def main() -> None:
        for call in (partial(tb.run, nothing), tb.enter(Block("a", [])).__enter__, partial(submit, nothing)):
            with pytest.raises(RuntimeError, match="must not be used in a Trio task, whose loop it would block"):
                call()

    trio.run(main)


def test_futures_end_like_their_work() -> None:
    """C01, C02, K06: without a block the run lasts as long as they do."""
    gate = threading.Event()

    async def wait_for_gate() -> int:
        await trio.to_thread.run_sync(gate.wait, HANG_SECONDS)
        return 7

    async def fail() -> None:
        raise LookupError("of the work")

    future = submit(wait_for_gate)
    assert (future.running(), future.done()) == (True, False)
    gate.set()
    assert future.result(HANG_SECONDS) == 7
    assert (future.running(), future.cancel(), future.cancelled()) == (False, False, False)
    with pytest.raises(LookupError, match="of the work"):
        submit(fail).result(HANG_SECONDS)
    with tb.enter(Block("a", [])):
        forever = submit(trio.sleep_forever)
        assert forever.cancel()
        forever.cancel()
        with pytest.raises(BaseException, match=r"^$") as caught:
            forever.result(HANG_SECONDS)
        assert type(caught.value).__name__ == "CancelledError"
        assert forever.cancelled()
        assert concurrent.futures.wait([forever], timeout=0).done == {forever}
    for thread in [one for one in threading.enumerate() if one.name == "trimesh.blocking"]:
        thread.join(HANG_SECONDS)
    assert trio_threads() == []


def test_future_belongs_to_the_innermost_block_or_to_that_of_its_home() -> None:
    """K06: an error of the body cancels those of its own."""
    home = kept(Block("home", []), "home")
    for at_home in (False, True):
        with pytest.raises(LookupError), tb.enter(Block("inner", [])):
            future = submit(trio.sleep_forever, home, at_home=at_home)
            raise LookupError
        assert future.done() is not at_home
    future.cancel()
    assert concurrent.futures.wait([future], HANG_SECONDS).done == {future}
    home.close()
    assert submit(nothing, home, at_home=True).result(HANG_SECONDS) == 7


def test_sigterm_has_its_default_action_again_after_the_last_block() -> None:
    """GT-1, K06: also if a future was the last to need the run."""
    with tb.enter(Block("a", [])):  # an earlier future may have left it
        pass
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    submit(nothing).result(HANG_SECONDS)
    for thread in [one for one in threading.enumerate() if one.name == "trimesh.blocking"]:
        thread.join(HANG_SECONDS)
    with tb.enter(Block("a", [])):
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_forked_process_has_none_of_the_blocks(caplog: pytest.LogCaptureFixture) -> None:
    """K06, TT-3: waits are refused, and leaving does nothing; blocks of its own have a run of their own."""
    notes: list[Any] = []
    body = kept(Block("kept", notes), "kept")

    def work() -> None:
        with pytest.raises(RuntimeError, match="in a process that was forked from it"):
            tb.run(nothing)
        with pytest.raises(trio.RunFinishedError):
            submit(nothing, body, at_home=True)
        body.close()
        close_open_blocks()
        assert caplog.records == []
        assert trio_threads() == []

    def work_of_its_own() -> None:
        assert tb.run(nothing) == 7
        with tb.enter(Block("own", [])):
            assert trio_threads() == ["trimesh.blocking"]
        assert trio_threads() == []

    with tb.enter(Block("a", notes)):
        assert in_child(work) == 0
        assert tb.run(nothing) == 7
    assert in_child(work_of_its_own) == 0
    body.close()
    assert notes == ["enter kept", "enter a", "leave a", "leave kept"]
    assert in_thread_of_trio(lambda: in_child(work_of_its_own)) == 0


def test_open_blocks_are_closed_at_the_exit(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Z01, K06: the last first, each with a line; errors are logged, and clean-up has a bound."""
    notes: list[Any] = []
    fails = (("one", None), ("two", LookupError("on the way out")), ("three", None))
    bodies = [kept(Block(name, notes, fails=error), f"the block {name}") for name, error in fails]
    close_open_blocks()
    assert notes[3:] == ["leave three", "leave two", "leave one"]
    assert [record.getMessage().partition(" was")[0] for record in caplog.records] == [
        "the block three",
        "the block two",
        "failed to close the block two",
        "the block one",
    ]
    caplog.clear()
    for body in reversed(bodies):
        with pytest.raises(LookupError) if body.what.endswith("two") else nullcontext():
            body.close()
    gate = threading.Event()

    class Slow(Block):
        async def __aexit__(self, *error: object) -> bool:
            await trio.to_thread.run_sync(gate.wait, HANG_SECONDS)
            return False

    body = kept(Slow("slow", notes), "the slow block")
    with monkeypatch.context() as patch:
        patch.setattr(limits, "EXIT_SECONDS", 0.0)
        close_open_blocks()
    assert caplog.records[-1].getMessage().startswith("the slow block did not end in time: ")
    gate.set()
    body.close()
    assert trio_threads() == []


def test_exit_closes_blocks_before_it_runs_handlers_of_modules() -> None:
    """Z01, K06: which are imported before the first block."""

    def work() -> None:
        atexit._clear()  # those of pytest
        notes: list[Any] = []
        atexit.register(lambda: notes.append("handler"))
        kept(Block("a", notes), "a")
        kept(Block("b", notes), "b")
        atexit._run_exitfuncs()
        assert notes == ["enter a", "enter b", "leave b", "leave a", "handler"]

    gc.collect()
    assert in_child(work) == 0
