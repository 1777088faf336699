"""What cancels a wait of a thread: Ctrl-C and time limits (K06)."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import trio
from tests.conformance.probe import Probe, Tidy
from tests.patience import HANG_SECONDS

import trimesh
import trimesh.blocking as tb
from trimesh import Actor, MeshErrorGroup, endpoint

pytestmark = [pytest.mark.real, pytest.mark.daily]


class Watch(Actor):
    @endpoint
    async def seconds_left(self) -> float:
        """Return what is left of the budget of this call."""
        return trio.current_effective_deadline() - trio.current_time()


@contextmanager
def helper(work: Callable[[], Any]) -> Generator[None, None, None]:
    """Do something in another thread beside the body."""
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join(HANG_SECONDS)
        assert not thread.is_alive()


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_interrupt_cancels_the_call_and_leaves_the_mesh() -> None:
    """C01, C03, K06, O6: the endpoint has unwound when `KeyboardInterrupt` comes, and the mesh goes on."""
    with tb.spawn_procs({"gpus": 2}) as procs:
        probes = procs.spawn("probes", Probe)

        def strike(count: int) -> None:
            probes.wait.call("unwind", count)
            interrupt()

        for count in (1, 2):
            with helper(partial(strike, count)), pytest.raises(KeyboardInterrupt):
                probes.unwind.call(seconds=0.05)
            assert all(notes.count("unwind over") == count for notes in probes.seen.call().values())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupt_leaves_the_block_in_order() -> None:
    """Z02, K06: actors clean up, and what comes out is `KeyboardInterrupt`."""
    with pytest.raises(KeyboardInterrupt), tb.spawn_procs({"gpus": 1}) as procs:
        probe = procs.spawn("probe", Tidy)

        def strike() -> None:
            probe.wait.call_one("hold")
            interrupt()

        with helper(strike):
            probe.hold.call_one()


def test_second_interrupt_ends_what_leaving_waits_for() -> None:
    """O6, K06: the first cancels the call, the second kills what cleans up."""
    with tb.spawn_procs({"gpus": 1}) as outer:
        told = outer.spawn("told", Probe)
        struck = threading.Event()

        def strike() -> None:
            struck.wait()
            interrupt()
            told.wait.call_one("cleaning 0")
            interrupt()

        with helper(strike), pytest.raises(KeyboardInterrupt), tb.spawn_procs({"gpus": 1}, grace=math.inf) as procs:
            slow = procs.spawn("slow", Tidy, 3600.0, tell=told)
            future = slow.hold_many.call_one.submit()
            slow.wait.call_one("hold")
            struck.set()
            future_of_other = slow.hold_many.call_one
            future_of_other()
            assert future.cancelled()


def test_interrupt_while_leaving_cuts_messages_short() -> None:
    """M3, O6, K06: accepted messages are not waited for any more."""
    with tb.spawn_procs({"gpus": 1}) as outer:
        told = outer.spawn("told", Probe)

        def strike() -> None:
            told.wait.call_one("held")
            interrupt()

        with helper(strike), pytest.raises(KeyboardInterrupt), tb.spawn_procs({"gpus": 1}) as procs:
            procs.spawn("holder", Holder).hold.broadcast(told)


class Holder(Actor):
    @endpoint
    async def hold(self, told: Any) -> None:
        await told.note.call_one("held")
        await trio.sleep_forever()


def test_error_while_unwinding_is_the_context_of_the_interrupt() -> None:
    """E08, K06."""
    with tb.spawn_procs({"gpus": 1}) as procs:
        probe = procs.spawn("probe", Probe)

        def strike() -> None:
            probe.wait.call_one("unwind")
            interrupt()

        with helper(strike), pytest.raises(KeyboardInterrupt) as caught:
            probe.unwind.call_one(LookupError("on the way out"))
        assert isinstance(caught.value.__context__, LookupError)


def test_time_limit_cancels_the_endpoints() -> None:
    """C01, D01, D06, K06: every endpoint has unwound when `TimeoutError` comes."""
    with tb.spawn_procs({"gpus": 2}) as procs:
        probes = procs.spawn("probes", Probe)
        with pytest.raises(TimeoutError, match=r"time limit of 0.05 s is over"), tb.fail_after(0.05):
            probes.unwind.call()
        assert all(notes in ([], ["unwind", "unwind over"]) for notes in probes.seen.call().values())
        with tb.move_on_after(0) as limit:
            probes.hold.call()
        assert limit.cancelled_caught
        with tb.move_on_after(HANG_SECONDS) as limit:
            assert probes.note.call(1).values() == (1, 1)
        assert not limit.cancelled_caught


def test_remaining_time_travels() -> None:
    """D02, K06: the endpoint sees the earliest deadline around its caller."""
    with tb.spawn_procs({"gpus": 1}) as procs:
        watch = procs.spawn("watch", Watch)
        assert watch.seconds_left.call_one() == math.inf
        with tb.fail_after(1000), tb.fail_after(5000):
            assert 0 < watch.seconds_left.call_one() <= 1000
            with tb.fail_after(500):
                assert watch.seconds_left.call_one() <= 500


def test_inner_limit_is_not_taken_for_the_outer() -> None:
    """D01, K06."""
    with tb.spawn_procs({"gpus": 1}) as procs:
        probe = procs.spawn("probe", Probe)
        with tb.fail_after(HANG_SECONDS), tb.move_on_after(0.01) as inner:
            probe.hold.call_one()
        assert inner.cancelled_caught
        with tb.move_on_after(0.01) as outer, tb.fail_after(HANG_SECONDS):
            probe.hold.call_one()
        assert outer.cancelled_caught


def test_limit_ends_a_block() -> None:
    """D01, Z01, K06: a block inside of a time limit is cancelled by it, and left."""
    with tb.move_on_after(0.3) as limit, tb.spawn_procs({"gpus": 1}) as procs:
        procs.spawn("probe", Probe).hold.call_one()
    assert limit.cancelled_caught


def test_error_while_cancelling_wins() -> None:
    """E08, K06: what an endpoint raises on its way out is not masked by the time limit."""
    with tb.spawn_procs({"gpus": 2}) as procs:
        probes = procs.spawn("probes", Probe)
        for seconds in (0.2, 1.0, 3.0, HANG_SECONDS / 2):  # a busy machine may need more to begin
            with pytest.raises((MeshErrorGroup, TimeoutError)) as caught, tb.fail_after(seconds):
                probes.unwind.call(LookupError("on the way out"))
            raised = [type(leaf) for leaf in trimesh.leaves(caught.value)]
            if len(raised) == 2:
                break
        assert raised == [LookupError, LookupError]


def test_time_limits_are_numbers() -> None:
    for wrong in (-1.0, math.nan):
        with pytest.raises(ValueError, match="seconds >= 0"):
            tb.fail_after(wrong)
