"""Cancelling a call, whatever it is doing (C01-C14; rules C1, C2)."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.conformance.meeting import come, make_meetings, meet, meet_now
from tests.conformance.meshes import Backend, RealBackend, SimBackend, attempt, fill, member, only_real, only_sim, tick
from tests.conformance.probe import Probe, Tidy

import trimesh
from trimesh import Actor, MeshErrorGroup, MeshStopped, RemoteCancelled, Unacknowledged, Unresponsive, endpoint, limits
from trimesh._runtime.life.current import current_proc


class Deaf(Actor):
    """Endpoints that no cancel interrupts, and one that asks for cancels."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.spinning = trio.Event()

    @endpoint
    def sit(self, started: str, released: str) -> None:
        """Say that this has started, then stay until the test comes."""
        come(f"{started}{trimesh.current_rank()}")
        come(f"{released}{trimesh.current_rank()}")

    @endpoint
    def sit_or_fail(self, started: str, released: str) -> None:
        # Rank 0 fails when rank 1 certainly runs (C1).
        if trimesh.current_rank() == 0:
            meet_now(started)
            raise ValueError("rank 0")
        come(started)
        come(released)

    @endpoint(thread=True)
    def spin(self) -> None:
        trio.from_thread.run_sync(self.spinning.set)
        try:
            while True:
                trio.from_thread.check_cancelled()
                time.sleep(0.001)
        except trio.Cancelled:
            self.log.append("heard")
            raise

    @endpoint(concurrency=2, group="watch")
    async def wait_for_spin(self) -> None:
        await self.spinning.wait()

    @endpoint
    async def heard(self) -> list[str]:
        return self.log

    @endpoint
    async def echo(self, value: int) -> int:
        return value


async def test_cancel_ends_every_rank(backend: Backend):
    """C01: every addressed endpoint is cancelled, and has unwound when the caller leaves."""
    async with backend.procs({"gpus": 4}) as procs:
        probes = await procs.spawn("probes", Probe)
        async with trio.open_nursery() as nursery:
            held = attempt(nursery, probes.hold.call)
            await probes.wait.call("hold")
            held.cancel()

        assert held.cancelled
        assert [log[-1] for log in (await probes.seen.call()).values()] == ["hold cancelled"] * 4


@only_sim
async def test_cancel_waits_for_every_acknowledgement(backend: SimBackend):
    """C01: the caller leaves when the slowest endpoint has unwound."""
    async with backend.procs() as procs:
        probes = await procs.spawn("probes", Probe)
        async with trio.open_nursery() as nursery:
            calls = [attempt(nursery, probes.slice(gpus=rank).unwind.call, None, 1.0 + rank) for rank in range(2)]
            both = attempt(nursery, probes.unwind.call, None, 3.0)
            await probes.wait.call("unwind", 2)
            start = trio.current_time()
            for call in (*calls, both):
                call.cancel()
            for call, seconds in zip((*calls, both), (1, 2, 3), strict=True):
                await call.over.wait()
                assert call.cancelled
                assert trio.current_time() - start == seconds


@only_sim
async def test_cancel_leaves_after_the_bound_without_acknowledgement(backend: SimBackend):
    """C01, C12, C2: a silent endpoint is given up after the bound; its late reply is dropped and counted."""
    async with backend.procs() as procs:
        probes = await procs.spawn("probes", Probe)
        dropped = current_proc().dropped_replies
        start = trio.current_time()
        with trio.move_on_after(1) as scope:
            await probes.unwind.call(None, 60.0)
        assert scope.cancelled_caught
        assert trio.current_time() - start == 1 + limits.CANCEL_ACK_SECONDS

        await probes.wait.call("unwind over")
        assert list((await probes.rank.call()).values()) == [0, 1]
        assert current_proc().dropped_replies == dropped + 2


@only_sim
async def test_silent_ranks_of_a_failed_call_are_unresponsive(backend: SimBackend):
    """C2: a mesh call that failed names the ranks that did not acknowledge, beside the cause."""
    async with backend.procs({"gpus": 3}) as procs:
        probes = await procs.spawn("probes", Probe)
        fuses = await procs.spawn("fuses", Probe)
        async with trio.open_nursery() as nursery:
            stuck = attempt(nursery, probes.fail_at_gate.call, ValueError("boom"), [0])
            await probes.wait.call("at the gate")
            start = trio.current_time()
            await probes.slice(gpus=0).open_gate.call_one()
            with pytest.raises(MeshErrorGroup) as caught:
                await stuck.result()
            assert trio.current_time() - start == limits.CANCEL_ACK_SECONDS
            await probes.open_gate.call()
        kinds = {trimesh.origin(leaf).point["gpus"]: type(leaf) for leaf in trimesh.leaves(caught.value)}
        assert kinds == {0: ValueError, 1: Unresponsive, 2: Unresponsive}
        assert list((await fuses.rank.call()).values()) == [0, 1, 2]


@only_sim
async def test_cancel_that_overtakes_its_call_is_kept(backend: SimBackend):
    """C02: the call never starts, and the caller leaves when that is acknowledged."""
    async with backend.procs() as procs:
        probes = await procs.spawn("probes", Probe)
        backend.lag.data = 2.0
        start = trio.current_time()
        with trio.move_on_after(1) as scope:
            await probes.hold.call()
        assert scope.cancelled_caught
        assert trio.current_time() - start == 4.0  # the call is under way until 2, its acknowledgement until 4
        backend.lag.data = 0.0
        assert list((await probes.seen.call()).values()) == [[], []]


async def test_cancel_at_any_moment_of_a_call_is_never_lost(backend: Backend):
    """C02: a cancel after any number of ticks, before, at or after the start: what started has been cancelled."""
    async with backend.procs() as procs:
        probes = await procs.spawn("probes", Probe)
        for ticks in range(25):
            note = f"hold {ticks}"
            async with trio.open_nursery() as nursery:
                held = attempt(nursery, probes.hold_many.call, note)
                await tick(ticks)
                held.cancel()
            assert held.cancelled
            for log in (await probes.seen.call()).values():
                assert log.count(note) == log.count(f"{note} cancelled")


async def test_cancel_races_completion(backend: Backend):
    """C02, S02: whatever wins, the endpoint ran once at most, and a value means that it did."""
    async with backend.procs() as procs:
        probes = await procs.spawn("probes", Probe)
        outcomes = set()
        for ticks in range(25):
            async with trio.open_nursery() as nursery:
                noted = attempt(nursery, probes.note.call, ticks)
                await tick(ticks)
                noted.cancel()
            outcomes.add(noted.cancelled)
            assert noted.error is None
            for log in (await probes.seen.call()).values():
                assert log.count(ticks) <= 1
                if not noted.cancelled:
                    assert log.count(ticks) == 1
        if backend.is_sim:
            assert outcomes == {True, False}


async def test_cancel_leaves_siblings_and_actor_alone(backend: Backend):
    """C03."""
    async with backend.procs() as procs:
        probes = await procs.spawn("probes", Probe)
        async with trio.open_nursery() as nursery:
            one = attempt(nursery, probes.hold_many.call, "one")
            other = attempt(nursery, probes.wait_for_gate.call, "other")
            await probes.wait.call("one")
            await probes.wait.call("other")
            one.cancel()
            await one.over.wait()
            await probes.open_gate.call()
            assert list((await other.result()).values()) == ["other"] * 2
        assert one.cancelled
        assert list((await probes.rank.call()).values()) == [0, 1]


async def test_reason_travels(backend: Backend):
    """C04: the endpoint sees who cancelled it and why; so does one that it called."""
    async with backend.procs() as procs:
        probes = await procs.spawn("probes", Probe)
        first, second = probes.slice(gpus=0), probes.slice(gpus=1)
        async with trio.open_nursery() as nursery:
            held = attempt(nursery, first.relay.call_one, second, "hold", "call_one", "deep")
            await second.wait.call_one("deep")
            held.cancel("enough")
        reasons = [note[1] for note in await second.seen.call_one() if isinstance(note, tuple)]
        assert len(reasons) == 1
        assert reasons[0].startswith("caller cancelled @probes.hold")
        assert "caller cancelled @probes.relay" in reasons[0]
        assert "enough" in reasons[0]


async def test_call_ended_by_the_owner_is_remote_cancelled(backend: Backend):
    """C05: a cancel by others is an error that says who and why; it is no `Cancelled`."""
    async with backend.procs() as procs:
        relays = await procs.spawn("relays", Probe)
        async with trio.open_nursery() as nursery:
            async with procs.spawn("targets", Probe) as targets:
                relayed = attempt(
                    nursery, relays.slice(gpus=0).relay.call_one, targets.slice(gpus=1), "hold", "call_one"
                )
                await targets.slice(gpus=1).wait.call_one("hold")
            with pytest.raises(RemoteCancelled) as caught:
                await relayed.result()
        assert "targets is stopping" in caught.value.reason
        assert "targets" in caught.value.canceller
        assert trimesh.origin(caught.value).point == {"gpus": 1}


async def test_actor_that_cancels_itself_fails_its_callers(backend: Backend):
    """C06: every call that it ends so is a failure of that call; the actor has stopped, its block has not failed."""
    async with backend.procs() as procs:
        async with procs.spawn("tidy", Tidy) as tidy:
            one = tidy.slice(gpus=0)
            async with trio.open_nursery() as nursery:
                held = attempt(nursery, one.hold_many.call_one)
                await one.wait.call_one("hold")
                with pytest.raises(MeshErrorGroup) as caught:
                    await one.cancel_itself.call()
                with pytest.raises(RemoteCancelled):
                    await held.result()
            assert {type(leaf) for leaf in trimesh.leaves(caught.value)} == {RemoteCancelled}
            with pytest.raises(MeshStopped):
                await one.rank.call_one()
        assert list((await (await procs.spawn("probes", Probe)).rank.call()).values()) == [0, 1]


@only_sim
async def test_second_cancel_changes_nothing(backend: SimBackend):
    """C09: a cancel of the caller while it waits for acknowledgements neither cuts that short nor unwinds again."""
    async with backend.procs() as procs:
        probes = await procs.spawn("probes", Probe)
        with trio.move_on_after(2) as outer, trio.move_on_after(1) as inner:
            await probes.unwind.call(None, 3.0)
        assert trio.current_time() == 4
        assert inner.cancel_called
        assert outer.cancelled_caught
        for log in (await probes.seen.call()).values():
            assert log.count("unwind over") == 1


async def test_cancelling_twice_is_one_cancel(backend: Backend):
    """C09."""
    async with backend.procs() as procs:
        probes = await procs.spawn("probes", Probe)
        async with trio.open_nursery() as nursery:
            held = attempt(nursery, probes.hold.call)
            await probes.wait.call("hold")
            held.cancel()
            held.cancel()
            await held.over.wait()
            held.cancel()
        for log in (await probes.seen.call()).values():
            assert log.count("hold cancelled") == 1


@only_sim
@pytest.mark.parametrize("depth", [1, 2, 3])
async def test_cancel_latency_is_one_round_trip_a_level(backend: SimBackend, depth: int):
    """C10: at depth d the caller leaves after d round trips, not after a bound per level."""
    async with backend.procs({"gpus": 3}) as procs:
        probes = await procs.spawn("probes", Probe)
        chain = [probes.slice(gpus=rank) for rank in range(depth)]
        args: tuple[object, ...] = ("hold", "call_one")
        for target in reversed(chain[1:]):
            args = ("relay", "call_one", target, *args)
        name, _, *rest = ("hold", "call_one") if depth == 1 else args
        async with trio.open_nursery() as nursery:
            held = attempt(nursery, getattr(chain[0], name).call_one, *rest)
            await chain[-1].wait.call_one("hold")
            backend.lag.data = backend.lag.control = 0.125
            start = trio.current_time()
            held.cancel()
            await held.over.wait()
            assert trio.current_time() - start == depth * 0.25
            backend.lag.data = backend.lag.control = 0.0


@only_sim
async def test_bound_of_the_acknowledgement_is_one_for_all_levels(backend: SimBackend):
    """C10: a silent endpoint at depth 3 costs its caller's caller one bound, not three."""
    async with backend.procs({"gpus": 3}, grace=100) as procs:  # the endpoint unwinds for a minute
        probes = await procs.spawn("probes", Probe)
        first, second, third = (probes.slice(gpus=rank) for rank in range(3))
        start = trio.current_time()
        with trio.move_on_after(1):
            await first.relay.call_one(second, "relay", "call_one", third, "unwind", "call_one", None, 60.0)
        assert trio.current_time() - start == 1 + limits.CANCEL_ACK_SECONDS


async def test_cancelled_queued_message_never_runs(backend: Backend):
    """C11: it leaves the mailbox at once, though the actor is busy."""
    async with backend.procs() as procs:
        probes = await procs.spawn("probes", Probe)
        async with trio.open_nursery() as nursery:
            attempt(nursery, probes.wait_for_gate.call)
            await probes.wait.call("gate")
            queued = [attempt(nursery, probes.note.call, number) for number in range(20)]
            await tick(20)
            for call in queued[::2]:
                call.cancel()
            for call in queued[::2]:
                await call.over.wait()
            await probes.open_gate.call()
        assert [call.cancelled for call in queued] == [True, False] * 10
        for log in (await probes.seen.call()).values():
            assert sorted(note for note in log if isinstance(note, int)) == list(range(1, 20, 2))


async def test_cancelled_message_that_waits_for_room_is_never_sent(backend: Backend):
    """C11: with the mailbox full, a call waits at the sender; cancelled there, it leaves nothing behind."""
    async with backend.procs() as procs:
        probes = await procs.spawn("probes", Probe)
        one = probes.slice(gpus=0)
        async with trio.open_nursery() as nursery:
            gate = attempt(nursery, one.wait_for_gate.call_one)
            await one.wait.call_one("gate")
            queued = fill(one.note, "queued")
            waiting = [attempt(nursery, one.note.call_one, "late"), attempt(nursery, one.note.broadcast, "late")]
            await tick(20)
            assert not any(call.over.is_set() for call in waiting)
            for call in waiting:
                call.cancel()
            for call in waiting:
                await call.over.wait()
                assert call.cancelled
            gate.cancel()
            await one.wait.call_one("queued", queued)
        assert "late" not in await one.seen.call_one()


@pytest.mark.daily("real")
@only_real
async def test_endpoint_in_c_code_ignores_cancel(backend: RealBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """C12, C13, C2: the caller leaves after the bound, later messages queue behind the call, its reply is dropped."""
    started0, started1, released0, released1 = make_meetings(tmp_path, "s0", "s1", "r0", "r1")
    monkeypatch.setattr(limits, "CANCEL_ACK_SECONDS", 0.2)
    async with backend.procs() as procs, procs.events() as events:
        deaf = await procs.spawn("deaf", Deaf)
        dropped = current_proc().dropped_replies
        async with trio.open_nursery() as nursery:
            sitting = attempt(nursery, deaf.sit.call, started0[:-1], released0[:-1])
            await meet(started0, started1)
            asked_at = trio.current_time()
            sitting.cancel()
            await sitting.over.wait()
            assert sitting.cancelled
            assert trio.current_time() - asked_at >= limits.CANCEL_ACK_SECONDS
            echoed = attempt(nursery, deaf.echo.call, 5)
            silent = {event.point["gpus"] async for event in first(events, Unacknowledged, 2)}
            assert silent == {0, 1}
            assert not echoed.over.is_set()
            assert current_proc().dropped_replies == dropped
            await meet(released0, released1)
            assert list((await echoed.result()).values()) == [5, 5]
        assert current_proc().dropped_replies == dropped + 2


async def first(events: AsyncIterator[Any], kind: type[Any], count: int) -> AsyncIterator[Any]:
    """Yield that many events of one kind."""
    for _ in range(count):
        event = await anext(events)
        while not isinstance(event, kind):
            event = await anext(events)
        yield event


@only_real
async def test_rank_in_c_code_is_unresponsive_in_a_failed_call(
    backend: RealBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """C13, C2."""
    started, released = make_meetings(tmp_path, "started", "released")
    monkeypatch.setattr(limits, "CANCEL_ACK_SECONDS", 0.2)
    async with backend.procs() as procs:
        deaf = await procs.spawn("deaf", Deaf)
        with pytest.raises(MeshErrorGroup) as caught:
            await deaf.sit_or_fail.call(started, released)
        assert [type(leaf) for leaf in trimesh.leaves(caught.value)] == [ValueError, Unresponsive]
        assert trimesh.coords(caught.value) == [{"gpus": 0}, {"gpus": 1}]
        await meet(released)
        assert await deaf.slice(gpus=1).echo.call_one(5) == 5


@pytest.mark.daily("real")
@only_real
async def test_threaded_endpoint_sees_the_cancel(backend: RealBackend):
    """C14: `from_thread.check_cancelled` raises there."""
    async with backend.procs() as procs:
        deaf = await procs.spawn("deaf", Deaf)
        async with trio.open_nursery() as nursery:
            spun = attempt(nursery, deaf.spin.call)
            await deaf.wait_for_spin.call()
            spun.cancel()
        assert spun.cancelled
        assert list((await deaf.heard.call()).values()) == [["heard"], ["heard"]]


@pytest.mark.parametrize("verb", ["call", "call_settled", "call_one", "choose"])
async def test_every_verb_cancels(backend: Backend, verb: str):
    """C01: a caller that was cancelled leaves with `Cancelled`, whatever the verb promises otherwise."""
    async with backend.procs() as procs:
        probe = (await procs.spawn("probes", Probe)).slice(gpus=0)
        async with trio.open_nursery() as nursery:
            held = attempt(nursery, getattr(probe.hold, verb))
            await probe.wait.call_one("hold")
            held.cancel()
        assert held.cancelled
        assert (await probe.seen.call_one())[-1] == "hold cancelled"


@pytest.mark.parametrize("verb", ["call", "call_settled", "choose", "broadcast"])
async def test_call_in_a_cancelled_scope_sends_nothing(backend: Backend, verb: str):
    """C01, D04: a caller that is cancelled already never starts anything."""
    async with backend.procs() as procs:
        probes = await procs.spawn("probes", Probe)
        with trio.CancelScope() as scope:
            scope.cancel()
            await getattr(probes.note, verb)("never")
        assert scope.cancelled_caught
        assert list((await probes.seen.call()).values()) == [[], []]


async def test_rank_that_is_gone_needs_no_acknowledgement(backend: Backend):
    """C01: a cancel does not wait for a process that has died meanwhile."""
    with trio.CancelScope() as scope, pytest.RaisesGroup(trimesh.ProcDied):
        async with backend.procs() as procs:
            probes = await procs.spawn("probes", Probe)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(probes.hold.call)
                await probes.wait.call("hold")
                backend.kill(procs, 1)
                await trio.sleep_forever()
    assert not scope.cancelled_caught
    assert member(procs, 0).pid != member(procs, 1).pid


async def test_long_reason_is_cut(backend: Backend):
    """C04: however much a caller has to say, its cancel reaches the endpoint."""
    async with backend.procs({"gpus": 1}) as procs:
        probe = await procs.spawn("probe", Probe)
        async with trio.open_nursery() as nursery:
            held = attempt(nursery, probe.hold.call_one)
            await probe.wait.call_one("hold")
            held.cancel("x" * 1_000_000)
        assert held.cancelled
        (reason,) = [note[1] for note in await probe.seen.call_one() if isinstance(note, tuple)]
        assert len(reason) == limits.REASON_CHARS_MAX
