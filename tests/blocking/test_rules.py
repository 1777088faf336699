"""Cancels, deadlines, errors and deaths of threads that wait: the rules C, D and E (K06)."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from tests.blocking.test_cancellation import Watch, helper, interrupt
from tests.conformance.probe import Probe, Tidy
from tests.patience import HANG_SECONDS

import trimesh
import trimesh.blocking as tb
from trimesh import (
    Actor,
    Failure,
    Isolate,
    MeshErrorGroup,
    ProcDied,
    RemoteCancelled,
    RemoteError,
    configured,
    endpoint,
    leaves,
)

pytestmark = [pytest.mark.real, pytest.mark.daily]


class Odd(Exception):
    """Raised over there."""


class Threaded(Actor):
    """Waits in a thread of its process for calls to others."""

    @endpoint(thread=True)
    def left_there(self, watch: Any, seconds: float) -> float:
        face: Any = tb.face(watch)
        with tb.fail_after(seconds):
            left: float = face.seconds_left.call_one()
        return left

    @endpoint(thread=True)
    def hold_there(self, probe: Any) -> None:
        face: Any = tb.face(probe)
        face.hold.call_one("there")

    @endpoint(thread=True)
    def hold_in_time(self, probe: Any, seconds: float) -> None:
        face: Any = tb.face(probe)
        with tb.fail_after(seconds):
            face.hold.call_one("limited")

    @endpoint(thread=True)
    def pid_of(self, name: str) -> int:
        procs: Any = tb.face(trimesh.context().procs)
        pid: int = procs.get_or_spawn(name, Probe).pid.call_one()
        return pid


@pytest.fixture(scope="module")
def procs() -> Iterator[tb.ProcMesh]:
    # Its history would begin in the midst of a test, which would seem to have left it behind.
    with configured(history=0), tb.spawn_procs({"gpus": 2}, shared=True) as procs:
        yield procs


# ---- cancels ---------------------------------------------------------------------------------------------------------


def test_cancelled_future_names_its_caller(procs: tb.ProcMesh) -> None:
    """C01, C03, C04, C09, K06: once; a second cancel does nothing, and other calls go on."""
    probe = procs.slice(gpus=0).spawn("probe", Probe)
    first, second = probe.hold_many.call_one.submit("first"), probe.wait_for_gate.call_one.submit("second")
    probe.wait.call_one("first")
    probe.wait.call_one("second")
    assert first.cancel()
    first.cancel()
    probe.wait.call_one("first cancelled")
    [reason] = [note[1] for note in probe.seen.call_one() if note[0] == "first cancelled" and note != "first cancelled"]
    assert "caller cancelled" in reason
    probe.open_gate.call_one()
    assert second.result(HANG_SECONDS) == "second"


def test_cancel_of_a_future_is_never_lost(procs: tb.ProcMesh) -> None:
    """C02, C11, K06: at once after it was made; what has begun has ended, and a queued call never runs."""
    probe = procs.slice(gpus=0).spawn("probe", Probe)
    gate = probe.wait_for_gate.call_one.submit()
    probe.wait.call_one("gate")
    queued = [probe.note.call_one.submit(number) for number in range(4)]
    for number in range(20):
        future = probe.hold_many.call_one.submit(f"hold {number}")
        if number % 2:
            probe.seen.call_one()
        future.cancel()
    for future in queued[::2]:
        assert future.cancel()
    probe.seen.call_one()
    probe.open_gate.call_one()
    gate.result(HANG_SECONDS)
    assert [future.result(HANG_SECONDS) for future in queued[1::2]] == [1, 3]
    for number in range(20):
        seen = probe.seen.call_one()
        assert seen.count(f"hold {number}") <= 1
        if f"hold {number}" in seen:
            probe.wait.call_one(f"hold {number} cancelled")
    assert sorted(note for note in probe.seen.call_one() if isinstance(note, int)) == [1, 3]


def test_call_that_the_actor_ends_is_an_error(procs: tb.ProcMesh) -> None:
    """C05, C06, K06: `RemoteCancelled`, never `Cancelled`."""
    with procs.slice(gpus=0).spawning("tidy", Tidy) as tidy, pytest.raises(RemoteCancelled):
        tidy.cancel_itself.call_one()


def test_interrupt_before_the_start_reaps_what_is_half_made() -> None:
    """C07, C08, K06: while the actor sets up; the block is left, and the zombie guard looks at what stays."""
    with tb.spawn_procs({"gpus": 1}, name="outside") as outside:
        notes = outside.spawn("notes", Probe)

        def strike() -> None:
            notes.wait.call_one("setting up")
            interrupt()

        with helper(strike), pytest.raises(KeyboardInterrupt), tb.spawn_procs({"gpus": 1}) as procs:
            procs.spawn("slow", Slow, notes)


class Slow(Probe):
    """Never ends its set-up."""

    def __init__(self, notes: Any) -> None:
        super().__init__()
        self.other = notes

    def lifespan(self) -> Any:
        return _SettingUp(self.other)


class _SettingUp:
    def __init__(self, notes: Any) -> None:
        self.notes = notes

    async def __aenter__(self) -> None:
        await self.notes.note.call_one("setting up")
        await self.notes.hold.call_one("held")

    async def __aexit__(self, *_: object) -> None:
        raise AssertionError


def test_cancel_of_the_caller_reaches_through_a_thread(procs: tb.ProcMesh) -> None:
    """C01, C10, C14, K06: the call that a thread of an actor waits for is cancelled with its endpoint."""
    threaded = procs.slice(gpus=0).spawn("threaded", Threaded)
    probe = procs.slice(gpus=1).spawn("probe", Probe)
    future = threaded.hold_there.call_one.submit(probe)
    probe.wait.call_one("there")
    assert future.cancel()
    probe.wait.call_one("there cancelled")


# ---- deadlines -------------------------------------------------------------------------------------------------------


def test_least_budget_holds_along_a_chain(procs: tb.ProcMesh) -> None:
    """D02, D03, K06: of the limit here and of that in a thread over there; without any there is none."""
    threaded = procs.slice(gpus=0).spawn("threaded", Threaded)
    watch = procs.slice(gpus=1).spawn("watch", Watch)
    assert watch.seconds_left.call_one() == math.inf
    for outer, inner in ((HANG_SECONDS, 10 * HANG_SECONDS), (10 * HANG_SECONDS, HANG_SECONDS)):
        with tb.fail_after(outer):
            assert 0 < threaded.left_there.call_one(watch, inner) <= HANG_SECONDS


def test_limit_in_a_thread_of_an_actor_cancels_its_call(procs: tb.ProcMesh) -> None:
    """C14, D01, D06, K06: it is `TimeoutError` there, and the endpoint that it has called has unwound."""
    threaded = procs.slice(gpus=0).spawn("threaded", Threaded)
    probe = procs.slice(gpus=1).spawn("probe", Probe)
    with pytest.raises(TimeoutError):
        threaded.hold_in_time.call_one(probe, 0.05)
    seen = probe.seen.call_one()
    assert seen.count("limited") == seen.count("limited cancelled")
    assert threaded.left_there.call_one(procs.spawn("watch", Watch).slice(gpus=1), HANG_SECONDS) <= HANG_SECONDS


def test_expired_call_never_starts(procs: tb.ProcMesh) -> None:
    """D04, K06: neither with no time left, nor when it ends in the mailbox."""
    probe = procs.slice(gpus=0).spawn("probe", Probe)
    gate = probe.wait_for_gate.call_one.submit()
    probe.wait.call_one("gate")
    for seconds in (0, 0.05):
        with pytest.raises(TimeoutError), tb.fail_after(seconds):
            probe.note.call_one("never")
    probe.open_gate.call_one()
    gate.result(HANG_SECONDS)
    assert probe.seen.call_one() == ["gate", "gate passed"]


def test_shielded_clean_up_outlives_the_limit(procs: tb.ProcMesh) -> None:
    """D05, D06, K06: the thread waits for it, then it is `TimeoutError`."""
    probe = procs.slice(gpus=0).spawn("probe", Probe)
    has_begun = probe.wait.call_one.submit("at the gate")
    for seconds in (0.05, 1.0, HANG_SECONDS / 2):  # a busy machine may need more to begin
        limit = tb.fail_after(seconds)
        is_over, was_held = threading.Event(), threading.Event()
        with helper(partial(open_past, limit, probe, has_begun, is_over, was_held)):
            with pytest.raises(TimeoutError), limit:
                probe.fail_at_gate.call_one(Odd("not raised"), ranks=[])
            is_over.set()
        if has_begun.done():
            break
    assert was_held.is_set()


def open_past(
    limit: tb.TimeLimit, probe: Any, has_begun: tb.CallFuture[None], is_over: threading.Event, was_held: threading.Event
) -> None:
    """Open the gate past a limit, and note whether the call was held by it until then."""
    while not has_begun.done():
        if is_over.wait(0.01):
            return
    while time.monotonic() < limit.deadline:
        time.sleep(0.01)
    if not is_over.is_set():
        was_held.set()
    probe.open_gate.call_one()


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_all_ranks_that_fail_are_in_the_group(procs: tb.ProcMesh) -> None:
    """E02, E03, E04, K06: `call_one` and `choose` raise bare."""
    probes = procs.spawn("probes", Probe)
    future = probes.fail_at_gate.call.submit(Odd("odd"))
    probes.wait.call("at the gate")
    probes.open_gate.call()
    with pytest.raises(MeshErrorGroup) as caught:
        future.result(HANG_SECONDS)
    assert sorted(point["gpus"] for point in trimesh.coords(caught.value)) == [0, 1]
    assert {type(leaf) for leaf in leaves(caught.value)} == {Odd}
    for verb in (probes.slice(gpus=0).fail.call_one, probes.fail.choose):
        with pytest.raises(Odd):
            verb(Odd("odd"))


def test_exits_never_become_local_ones(procs: tb.ProcMesh) -> None:
    """E05, E06, K06: an exit over there is an error, as is what cannot be rebuilt."""
    probe = procs.slice(gpus=0).spawn("probe", Probe)
    for error in (KeyboardInterrupt("there"), SystemExit(3), GeneratorExit("there")):
        with pytest.raises(RemoteError, match=type(error).__name__):
            probe.fail.call_one(error)
    assert probe.note.call_one("alive") == "alive"


def test_failed_broadcast_fails_the_block() -> None:
    """E10, K06."""
    with pytest.raises(MeshErrorGroup) as caught, tb.spawn_procs({"gpus": 2}) as procs:
        probes = procs.spawn("probes", Probe)
        probes.fail.broadcast(Odd("nobody"), [1])
        probes.hold.call()
    assert [str(leaf) for leaf in leaves(caught.value)] == ["nobody"]


def test_failed_spawn_names_its_ranks() -> None:
    """E11, K06."""
    with tb.spawn_procs({"gpus": 2}) as procs:
        with pytest.raises(MeshErrorGroup) as caught:
            procs.spawn("tidy", Tidy, setup_error=Odd("set-up"), ranks=[1])
        assert trimesh.coords(caught.value) == [{"gpus": 1}]
        assert procs.spawn("probes", Probe).rank.call().values() == (0, 1)


# ---- deaths, owners --------------------------------------------------------------------------------------------------


def test_death_cites_the_process(procs: tb.ProcMesh) -> None:
    """E14, X3, K06: to a future, too; the mesh goes on without it."""
    with tb.spawn_procs({"gpus": 2}, supervision=Isolate()) as isolated:
        probes = isolated.spawn("probes", Probe)
        future = probes.slice(gpus=1).hold.call_one.submit()
        probes.slice(gpus=1).wait.call_one("hold")
        isolated.kill([{"gpus": 1}])
        error = future.exception(HANG_SECONDS)
        assert isinstance(error, ProcDied)
        assert error.by == "kill"
        with pytest.raises(MeshErrorGroup) as caught:
            probes.rank.call()
        assert trimesh.coords(caught.value) == [{"gpus": 1}]
        assert probes.alive().rank.call().values() == (0,)


def test_thread_of_an_actor_asks_for_an_actor_of_a_name(procs: tb.ProcMesh) -> None:
    """M9, K06: all get the same one."""
    threaded = procs.spawn("threaded", Threaded)
    assert len({*threaded.pid_of.call("shared one").values()}) == 1


def test_error_of_a_handler_ends_the_waits_of_its_body() -> None:
    """P5, K06: its block raises it."""
    asked: queue.SimpleQueue[Failure] = queue.SimpleQueue()

    def handler(failure: Failure) -> bool:
        asked.put(failure)
        raise LookupError("handler")

    with pytest.raises(ExceptionGroup) as caught, tb.spawn_procs({"gpus": 2}, supervision=Isolate()) as procs:
        probes = procs.spawn("probes", Probe)
        with procs.on_failure(handler):
            procs.kill([{"gpus": 1}])
            probes.slice(gpus=0).hold.call()
    assert "handler" in [str(leaf).strip("'") for leaf in leaves(caught.value)]
    assert asked.get(timeout=HANG_SECONDS).points == ({"gpus": 1},)
