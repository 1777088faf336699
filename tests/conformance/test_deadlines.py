"""Time is Trio's: budgets travel with calls (D01-D06; rule C3)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from tests.conformance.meeting import come, listening, make_meetings
from tests.conformance.meshes import Backend, RealBackend, SimBackend, attempt, only_real, only_sim
from tests.conformance.probe import Probe
from tests.patience import HANG_SECONDS

import trimesh
from trimesh import Actor, MeshErrorGroup, RemoteCancelled, endpoint, limits, this_host
from trimesh._runtime.actors.cell import Cell


class Clock(Actor):
    """Says how much time it has."""

    def __init__(self) -> None:
        self.sleeping = trio.Event()

    @endpoint(concurrency=10)
    async def left(self) -> float:
        return trio.current_effective_deadline() - trio.current_time()

    @endpoint(concurrency=10)
    async def left_through(self, target: Clock, seconds: float) -> float:
        with trio.move_on_after(seconds):
            return await target.left.call_one()
        raise AssertionError

    @endpoint(concurrency=10)
    async def sleep(self, seconds: float) -> str:
        await trio.sleep(seconds)
        return "slept"

    @endpoint(concurrency=10)
    async def sleep_and_tell(self, path: str) -> None:
        """Sleep until cancelled; then say so at a meeting, whose other side may not have come yet."""
        self.sleeping.set()
        try:
            await trio.sleep_forever()
        finally:
            come(path)

    @endpoint(concurrency=10)
    async def wait_for_sleep(self) -> None:
        await self.sleeping.wait()

    @endpoint(concurrency=10)
    async def sleep_and_fail(self, seconds: float) -> None:
        try:
            await trio.sleep(seconds)
        finally:
            if trimesh.current_rank() == 0:
                raise KeyError("unwinding")


async def test_endpoint_sees_the_remaining_time(backend: Backend):
    """C3, D02: as `trio.current_effective_deadline()`, and none when the caller has none."""
    async with backend.procs() as procs:
        clocks = await procs.spawn("clocks", Clock)
        with trio.CancelScope(shield=True):  # the test itself has a deadline
            assert list((await clocks.left.call()).values()) == [float("inf")] * 2
        with trio.fail_after(20.0):
            for left in (await clocks.left.call()).values():
                assert 0.0 < left <= 20.0
                if backend.is_sim:
                    assert left == 20.0


async def test_deadline_is_too_slow_here(backend: Backend):
    """D06: `fail_after` raises `TooSlowError`, never a remote error."""
    async with backend.procs() as procs:
        clocks = await procs.spawn("clocks", Clock)
        for verb in ("call", "call_settled", "choose"):
            with pytest.raises(trio.TooSlowError), trio.fail_after(0.05):
                await getattr(clocks.sleep, verb)(1000.0)
        with pytest.raises(trio.TooSlowError), trio.fail_after(0.05):
            await clocks.slice(gpus=0).sleep.call_one(1000.0)


@only_sim
@pytest.mark.parametrize("lost", ["cancel", "everything"])
async def test_budget_ends_the_call_when_the_cancel_is_lost(backend: SimBackend, lost: str):
    """D01: the endpoint unwinds when its caller's time is over, though it is not told."""
    async with backend.procs() as procs:
        probes = await procs.spawn("probes", Probe)
        async with trio.open_nursery() as nursery:
            held = attempt(nursery, call_within, probes.hold, 2.0)
            await probes.wait.call("hold")
            backend.lag.control = 10_000.0
            if lost == "everything":
                backend.lag.data = 10_000.0
            await held.over.wait()
            assert trio.current_time() == (2.0 if lost == "cancel" else 2.0 + limits.CANCEL_ACK_SECONDS)
            backend.lag.control = backend.lag.data = 0.0
            logs = [cell._actor.notes.log for cell in cells(backend) if isinstance(cell._actor, Probe)]
            assert len(logs) == 2
            assert all("hold cancelled" in log for log in logs)
            nursery.cancel_scope.cancel()


@only_real
async def test_budget_ends_the_call_while_its_caller_hears_nothing(backend: RealBackend, tmp_path: Path):
    """D01: a caller that computes when the time is over sends no cancel; the endpoint has unwound all the same."""
    for seconds in (0.2, 1.0, 5.0):  # on a busy machine the endpoint may start after the first
        (path,) = make_meetings(tmp_path, f"unwound after {seconds}")
        has_started = has_unwound = False
        # Who comes is listened to until the block is left: an endpoint that has started too late comes all the same.
        with listening(path) as wait_for_who_comes:
            async with backend.procs({"gpus": 1}) as procs, trio.open_nursery() as nursery:
                clock = await procs.spawn("clock", Clock)
                with trio.move_on_after(seconds) as scope:
                    nursery.start_soon(call_within, clock.sleep_and_tell, seconds, path)
                    await clock.wait_for_sleep.call_one()
                    has_started = True
                    has_unwound = wait_for_who_comes(HANG_SECONDS)  # Trio does not run in this process meanwhile
                    await trio.sleep_forever()
                assert scope.cancelled_caught
        if has_started:
            break
    assert has_unwound


def cells(backend: SimBackend) -> Iterator[Cell]:
    """Yield the actors of all simulated processes; over links that lose everything they cannot be asked."""
    for proc_id in backend.world.children:
        yield from backend.world.proc(proc_id).cells.values()


async def call_within(endpoint_: Any, seconds: float, *args: Any) -> None:
    with trio.move_on_after(seconds):
        await endpoint_.call(*args)


async def test_nested_calls_take_the_least_of_the_budgets(backend: Backend):
    """D03."""
    async with backend.procs() as procs:
        clocks = await procs.spawn("clocks", Clock)
        one, other = clocks.slice(gpus=0), clocks.slice(gpus=1)
        for outer, inner, least in ((20.0, 400.0, 20.0), (4000.0, 400.0, 400.0)):
            with trio.CancelScope(shield=True), trio.fail_after(outer):  # the test itself has a deadline
                left = await one.left_through.call_one(other, inner)
            assert left == least if backend.is_sim else 0.1 * least < left <= least


@only_sim
async def test_expired_budget_never_starts(backend: SimBackend):
    """D04: neither a call that arrives late nor one that has waited in the mailbox for too long."""
    async with backend.procs({"gpus": 1}) as procs:
        probe = await procs.spawn("probe", Probe)
        backend.lag.data = 5.0
        with trio.move_on_after(2) as late:
            await probe.note.call_one("late")
        backend.lag.data = 0.0
        assert late.cancelled_caught
        await trio.sleep(100)
        async with trio.open_nursery() as nursery:
            gated = attempt(nursery, probe.wait_for_gate.call_one)
            await probe.wait.call_one("gate")
            backend.lag.control = 10_000.0
            with trio.move_on_after(2) as queued:
                await probe.note.call_one("queued")
            assert queued.cancelled_caught
            await probe.open_gate.call_one()
            await gated.result()
            backend.lag.control = 0.0
        log = await probe.seen.call_one()
        assert log == ["gate", "gate passed"]


async def test_expired_scope_never_sends(backend: Backend):
    """D04."""
    async with backend.procs({"gpus": 1}) as procs:
        probe = await procs.spawn("probe", Probe)
        with trio.move_on_after(0) as scope:
            await probe.note.call_one("never")
        assert scope.cancelled_caught
        assert await probe.seen.call_one() == []


@only_sim
async def test_shielded_clean_up_may_outlive_the_budget(backend: SimBackend):
    """D05: the caller waits for it, within the bound of the acknowledgement."""
    async with backend.procs({"gpus": 1}) as procs:
        probe = await procs.spawn("probe", Probe)
        with trio.move_on_after(1) as scope:
            await probe.unwind.call_one(None, 2.0)
        assert scope.cancelled_caught
        assert trio.current_time() == 3.0
        assert "unwind over" in await probe.seen.call_one()


@only_sim
@pytest.mark.parametrize("verb", ["call_one", "map"])
async def test_budget_that_ends_a_little_early_is_absorbed(backend: SimBackend, verb: str):
    """C3: the remote clock is ahead by less than `limits.DEADLINE_SKEW_SECONDS`."""
    async with backend.procs({"gpus": 1}) as procs:
        clock = await procs.spawn("clock", Clock)
        with pytest.raises(trio.TooSlowError), trio.fail_after(2.0):
            await call_with_shorter_budget(clock, limits.DEADLINE_SKEW_SECONDS, verb)
        assert trio.current_time() == 2.0


async def map_once(clock: Clock, seconds: float) -> None:
    async with clock.sleep.map([seconds]) as results:
        await anext(results)


async def call_with_shorter_budget(clock: Clock, less: float, verb: str = "call_one") -> None:
    """Call with a budget that ends `less` before the deadline, as one does over there when its clock is fast."""
    with trio.fail_after(trio.current_effective_deadline() - trio.current_time() - less) as scope:
        async with trio.open_nursery() as nursery:
            call = attempt(nursery, partial(map_once, clock) if verb == "map" else clock.sleep.call_one, 1000.0)
            await trio.testing.wait_all_tasks_blocked()
            scope.deadline += less
            await call.result()


@only_sim
@pytest.mark.parametrize("verb", ["call", "call_one", "choose", "call_settled"])
async def test_extended_deadline_ends_in_remote_cancelled(backend: SimBackend, verb: str):
    """C3: the budget of the moment of sending has ended the call; no task here was cancelled."""
    async with backend.procs({"gpus": 1}) as procs:
        clock = await procs.spawn("clock", Clock)
        with trio.CancelScope(deadline=2.0) as scope:
            async with trio.open_nursery() as nursery:
                call = attempt(nursery, getattr(clock.sleep, verb), 1000.0)
                await trio.sleep(1)
                scope.deadline = 500.0
                if verb == "call_settled":
                    (outcome,) = (await call.result()).values()
                    error: BaseException = outcome.error
                else:
                    with pytest.raises((RemoteCancelled, MeshErrorGroup)) as caught:
                        await call.result()
                    error = caught.value
                (leaf,) = trimesh.leaves(error)
                assert isinstance(leaf, RemoteCancelled)
                assert leaf.reason == "budget at sending"
                assert trimesh.origin(leaf).point == {"gpus": 0}
        assert not scope.cancelled_caught
        assert trio.current_time() == 2.0


@only_sim
async def test_shortened_deadline_is_a_cancel(backend: SimBackend):
    """C3."""
    async with backend.procs({"gpus": 1}) as procs:
        probe = await procs.spawn("probe", Probe)
        with trio.CancelScope(deadline=100.0) as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(probe.hold.call_one)
                await probe.wait.call_one("hold")
                scope.deadline = 3.0
        assert scope.cancelled_caught
        assert trio.current_time() == 3.0
        assert "hold cancelled" in await probe.seen.call_one()


@only_sim
async def test_error_beside_an_expired_budget_is_not_masked(backend: SimBackend):
    """E08, C3: a rank that raises while its budget ends it is a failure, the other is none."""
    async with backend.procs() as procs:
        clocks = await procs.spawn("clocks", Clock)
        with pytest.raises(MeshErrorGroup) as caught, trio.fail_after(2.0):
            await clocks.sleep_and_fail.call(1000.0)
        assert [type(leaf) for leaf in trimesh.leaves(caught.value)] == [KeyError]
        assert trimesh.coords(caught.value) == [{"gpus": 0}]


@only_sim
async def test_broadcast_has_no_budget(backend: SimBackend):
    """API 3, C3: it belongs to the block, and runs on when the caller's scope is over."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs() as procs:
            probes = await procs.spawn("probes", Probe)
            with trio.move_on_after(1):
                await probes.hold_many.broadcast()
                probes.hold_many.broadcast_nowait("now")
                await trio.sleep_forever()
            await trio.sleep(100)
            assert list((await probes.seen.call()).values()) == [["hold", "now"]] * 2
            raise LookupError("nothing else ends them")
    assert [type(leaf) for leaf in trimesh.leaves(caught.value)] == [LookupError]


@pytest.mark.real
def test_mock_clock_sends_no_budget_to_real_processes():
    """C3: virtual seconds mean nothing to a process with a real clock; cancels still reach it."""
    clock = trio.testing.MockClock()

    async def main() -> None:
        async with this_host().spawn_procs({"gpus": 1}) as procs:
            actor = await procs.spawn("clock", Clock)
            with trio.fail_after(0.5):
                assert await actor.left.call_one() == float("inf")
                assert await actor.sleep.call_one(0.6) == "slept"
            with trio.move_on_after(0.5) as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(actor.sleep.call_one, 1000.0)
                    await actor.left.call_one()
                    clock.jump(1.0)
            assert scope.cancelled_caught

    trio.run(main, clock=clock)


@pytest.mark.daily("real")
@only_real
async def test_budget_is_relative(backend: RealBackend):
    """D02: clocks of processes are not compared; each counts the seconds that are left."""
    async with backend.procs({"gpus": 1}) as procs:
        clock = await procs.spawn("clock", Clock)
        start = time.monotonic()
        with trio.move_on_after(0.3) as scope:
            await clock.sleep.call_one(1000.0)
        assert scope.cancelled_caught
        assert time.monotonic() - start >= 0.3
