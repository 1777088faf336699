"""How blocks are left: drain, order, grace (rules M3, X1; Z11, Z14, Z15 as far as the mesh is concerned)."""

from __future__ import annotations

import atexit
import gc
import math
import time
import weakref
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import ClassVar

import pytest
import trio
import trio.lowlevel
from tests.conformance.meshes import Backend, SimBackend, attempt, only_real, only_sim, tick
from tests.conformance.probe import Probe, Tidy

import trimesh
from trimesh import (
    Actor,
    ActorFailed,
    MeshErrorGroup,
    MeshStopped,
    ProcDied,
    RemoteCancelled,
    endpoint,
    limits,
    this_proc,
)
from trimesh.shape.extent import Point


class Teller(Actor):
    """Tells a probe elsewhere, which outlives it, what it has run."""

    def __init__(self, observer: Probe) -> None:
        self.observer = observer

    @endpoint
    async def tell(self, note: object) -> None:
        await trio.sleep(0.01)
        await self.observer.note.call_one(note)

    @endpoint
    async def tell_through(self, other: Teller, note: object) -> None:
        await other.tell.call_one(note)

    @endpoint
    async def fail(self, error: Exception) -> None:
        raise error


# ---- drain -----------------------------------------------------------------------------------------------------------


@pytest.mark.daily("real")
async def test_accepted_messages_run_to_their_end(backend: Backend):
    """M3: in order, though the body has ended right after sending them."""
    async with this_proc().spawn("observer", Probe) as observer:
        async with backend.procs({"gpus": 1}) as procs:
            tellers = await procs.spawn("tellers", Teller, observer)
            for number in range(20):
                await tellers.tell.broadcast(number)
        assert await observer.seen.call_one() == list(range(20))


async def test_accepted_calls_of_other_tasks_run_to_their_end(backend: Backend):
    """M3: a call from a task outside of the block gets its value while the block is being left."""
    async with trio.open_nursery() as nursery:
        async with backend.procs({"gpus": 1}) as procs:
            probe = await procs.spawn("probe", Probe)
            gated = attempt(nursery, probe.wait_for_gate.call_one, "gated")
            await probe.wait.call_one("gated")
            await probe.open_gate.broadcast()
        assert await gated.result() == "gated"


async def test_failures_among_drained_messages_join_the_group(backend: Backend):
    """M3, E10: nothing that was accepted is lost silently."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with this_proc().spawn("observer", Probe) as observer, backend.procs() as procs:
            tellers = await procs.spawn("tellers", Teller, observer)
            await tellers.tell.broadcast("before")
            await tellers.fail.broadcast(ValueError("drained"))
    leaves = list(trimesh.leaves(caught.value))
    assert {type(leaf) for leaf in leaves} == {ValueError}
    assert 1 <= len(leaves) <= 2
    assert all(trimesh.origin(leaf).endpoint == "fail" for leaf in leaves)


@pytest.mark.parametrize("how", ["exception", "cancel"])
async def test_exit_by_exception_or_cancel_skips_the_drain(backend: Backend, how: str):
    """M3: what runs is cancelled, what waits never runs."""
    async with this_proc().spawn("observer", Probe) as observer:
        with trio.CancelScope() as scope:
            try:
                async with backend.procs({"gpus": 1}) as procs:
                    held = await procs.spawn("held", Held, observer)
                    await held.hold.broadcast()
                    for _ in range(10):
                        await held.never.broadcast()
                    await observer.wait.call_one("holding")
                    if how == "exception":
                        raise LookupError("body")
                    scope.cancel()
                    await trio.sleep_forever()
            except* LookupError:
                pass
        assert await observer.seen.call_one() == ["holding", "unwound"]
        assert scope.cancelled_caught == (how == "cancel")


class Held(Actor):
    """Holds its slot until cancelled."""

    def __init__(self, observer: Probe) -> None:
        self.observer = observer

    @endpoint
    async def hold(self) -> None:
        await self.observer.note.call_one("holding")
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await self.observer.note.call_one("unwound")

    @endpoint
    async def never(self) -> None:
        await self.observer.note.call_one("never")


async def test_cancel_of_the_drain_cancels_what_runs(backend: Backend):
    """M3: the drain is within the enclosing scope; the clean-up is not."""
    async with this_proc().spawn("observer", Probe) as observer:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:

                async def cancel() -> None:
                    await observer.wait.call_one("holding")
                    await tick(50)
                    scope.cancel()

                nursery.start_soon(cancel)
                async with backend.procs({"gpus": 1}) as procs:
                    held = await procs.spawn("held", Held, observer)
                    await held.hold.broadcast()
        assert scope.cancelled_caught
        assert await observer.seen.call_one() == ["holding", "unwound"]


async def test_meshes_drain_side_by_side(backend: Backend):
    """M3: no mesh has stopped while another still runs what it has accepted."""
    async with this_proc().spawn("observer", Probe) as observer:
        async with backend.procs({"gpus": 1}) as procs:
            first = await procs.spawn("first", Teller, observer)
            second = await procs.spawn("second", Tidy, tell=observer)
            for number in range(5):
                await first.tell.broadcast(number)
            del second
        log = await observer.seen.call_one()
        assert log == [0, 1, 2, 3, 4, "cleaning 0", "clean 0"]


class Sleeper(Actor):
    """Sleeps."""

    @endpoint
    async def sleep(self, seconds: float) -> None:
        await trio.sleep(seconds)


@only_sim
async def test_grace_begins_after_the_drain(backend: SimBackend):
    """M3, BL-3."""
    async with backend.procs({"gpus": 1}, grace=3.0) as procs:
        await procs.spawn("tidy", Tidy, 2.0)
        sleeper = await procs.spawn("sleeper", Sleeper)
        await sleeper.sleep.broadcast(100.0)
    assert trio.current_time() == 102.0


# ---- who is refused --------------------------------------------------------------------------------------------------


async def test_other_holders_are_refused_while_a_mesh_stops(backend: Backend):
    """M3: their calls that run are cancelled, their new ones get `MeshStopped`."""
    async with backend.procs({"gpus": 1}) as others:
        relay = await others.spawn("relay", Probe)
        async with trio.open_nursery() as nursery, backend.procs({"gpus": 1}) as procs:
            probe = await procs.spawn("probe", Probe)
            gated = attempt(nursery, probe.wait_for_gate.call_one)
            await probe.wait.call_one("gate")
            running = attempt(nursery, relay.relay.call_one, probe, "hold_many", "call_one")
            await probe.wait.call_one("hold")
            queued = attempt(nursery, relay.relay.call_one, probe, "note", "call_one", "never")
            await relay.wait.call_one("relay note")

            async def when_stopping() -> None:
                with pytest.raises(RemoteCancelled):
                    await running.result()
                with pytest.raises((RemoteCancelled, MeshStopped)):
                    await queued.result()
                for verb in ("call_one", "choose"):
                    with pytest.raises(MeshStopped):
                        await relay.relay.call_one(probe, "note", verb, "never")
                with pytest.raises(MeshErrorGroup) as caught:
                    await relay.relay.call_one(probe, "note", "call", "never")
                assert [type(leaf) for leaf in trimesh.leaves(caught.value)] == [MeshStopped]
                gated.cancel()

            nursery.start_soon(when_stopping)
        with pytest.raises(MeshStopped):
            await relay.relay.call_one(probe, "note", "call_one", "never")


@pytest.mark.parametrize("verb", ["call", "call_settled", "choose", "broadcast", "broadcast_nowait"])
async def test_handle_is_refused_after_its_block(backend: Backend, verb: str):
    """M3, X1: a stray handle says that its mesh has stopped, as its verb says it, whether a block is open or not."""
    async with backend.procs() as procs:
        probes = await procs.spawn("probes", Probe)

    async def use() -> None:
        done = getattr(probes.note, verb)("never")
        value = None if verb == "broadcast_nowait" else await done
        if verb == "call_settled":
            raise MeshErrorGroup("settled", [outcome.error for outcome in value.values()])

    async def expect_refusal() -> None:
        with pytest.raises(MeshStopped if verb == "choose" else MeshErrorGroup) as caught:
            await use()
        assert {type(leaf) for leaf in trimesh.leaves(caught.value)} == {MeshStopped}
        if verb != "choose":
            assert trimesh.coords(caught.value) == [{"gpus": 0}, {"gpus": 1}]

    await expect_refusal()
    async with backend.procs({"gpus": 1}):
        await expect_refusal()
        with pytest.raises(MeshStopped):
            await probes.slice(gpus=0).note.call_one("never")
    assert dict(probes.slice(gpus=slice(0, 1)).extent) == {"gpus": 1}


# ---- order and grace -------------------------------------------------------------------------------------------------


async def test_actors_stop_in_reverse_order_of_spawn(backend: Backend):
    """M3, Z15: each mesh has cleaned up before the one that was spawned before it begins."""
    async with this_proc().spawn("observer", Probe) as observer:
        async with backend.procs({"gpus": 1}) as procs:
            for name in ("first", "second", "third"):
                await procs.spawn(name, Named, name, observer)
        order = ("third", "second", "first")
        assert await observer.seen.call_one() == [f"{name} {what}" for name in order for what in ("cleaning", "clean")]


class Named(Tidy):
    """A tidy actor that tells its mesh's name."""

    def __init__(self, name: str, observer: Probe) -> None:
        super().__init__(tell=observer)
        self.name_ = name

    async def say(self, note: str) -> None:
        await self.tell.note.call_one(f"{self.name_} {note}")


@only_sim
async def test_ranks_stop_side_by_side(backend: SimBackend):
    """M3, Z15: clean-up of one mesh takes as long as its slowest rank."""
    async with backend.procs({"gpus": 8}) as procs:
        await procs.spawn("first", Tidy, 2.0)
        await procs.spawn("second", Tidy, 2.0)
    assert trio.current_time() == 4.0


@only_sim
@pytest.mark.parametrize("grace", [0.5, 3.0])
async def test_clean_up_gets_its_grace_and_no_more(backend: SimBackend, grace: float):
    """Z14, M3: then the process is killed, which is a failure that says so."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs(grace=grace) as procs:
            await procs.spawn("tidy", Tidy, 100.0, ranks=[1])
    (leaf,) = trimesh.leaves(caught.value)
    assert isinstance(leaf, ProcDied)
    assert leaf.by == "grace"
    assert trimesh.origin(leaf).point == {"gpus": 1}
    assert grace <= trio.current_time() <= grace + limits.TERM_SECONDS


async def test_member_that_needs_more_than_its_grace_is_killed(backend: Backend):
    """Z13, M3: a leaf for each member that was killed, none for the others."""
    for grace in (0.3, 3.0, 20.0):  # on a busy machine the others may need more than the first, too
        with pytest.raises(MeshErrorGroup) as caught:
            async with backend.procs({"gpus": 3}, grace=grace) as procs:
                await procs.spawn("tidy", Tidy, 1000.0, ranks=[0, 2])
        leaves = list(trimesh.leaves(caught.value))
        if backend.is_sim or len(leaves) == 2:
            break
    assert [(type(leaf), leaf.by) for leaf in leaves] == [(ProcDied, "grace")] * 2
    assert sorted(point["gpus"] for point in trimesh.coords(caught.value)) == [0, 2]


@only_real
@pytest.mark.daily
async def test_member_that_exits_slowly_is_not_blamed_for_the_grace_of_another(backend: Backend):
    """Z13, M3: large libraries take a second to end, after the actors have cleaned up in time."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs({"gpus": 2}, grace=3.0) as procs:
            slow = await procs.spawn("slow", SlowExit, 2 * limits.TERM_SECONDS)
            await slow.load.call()
            await procs.spawn("tidy", Tidy, 1000.0, ranks=[0])
    assert [(point["gpus"], leaf.by) for leaf, point in deaths_in(caught.value)] == [(0, "grace")]


def deaths_in(error: BaseException) -> list[tuple[ProcDied, Point]]:
    leaves = [leaf for leaf in trimesh.leaves(error) if isinstance(leaf, ProcDied)]
    return [(leaf, trimesh.origin(leaf).point) for leaf in leaves]


class SlowExit(Actor):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    @endpoint
    def load(self) -> None:
        """Do what a library does that takes its time at the end of its process."""
        atexit.register(time.sleep, self.seconds)


async def test_endpoint_that_ignores_its_cancel_is_killed_after_the_grace(backend: Backend):
    """D05: a shielded endpoint may outlive its caller, not the grace."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs({"gpus": 1}, grace=0.3) as procs:
            probe = await procs.spawn("probe", Probe)
            await probe.unwind.broadcast(None, 30.0)
            await probe.wait.call_one("unwind")
            raise LookupError("body")
    kinds = [type(leaf) for leaf in trimesh.leaves(caught.value)]
    assert kinds == [LookupError, ProcDied]


@only_sim
async def test_grace_is_one_for_all_meshes_of_a_block(backend: SimBackend):
    """BL-3: what the later meshes have used is not there for the earlier ones."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs({"gpus": 1}, grace=3.0) as procs:
            await procs.spawn("first", Tidy, 2.0)
            await procs.spawn("second", Tidy, 2.0)
    (leaf,) = trimesh.leaves(caught.value)
    assert isinstance(leaf, ProcDied)
    assert 3.0 <= trio.current_time() <= 3.0 + limits.TERM_SECONDS


@only_sim
async def test_infinite_grace_waits(backend: SimBackend):
    """M3: `math.inf` is allowed."""
    async with backend.procs({"gpus": 1}, grace=math.inf) as procs:
        await procs.spawn("tidy", Tidy, 10_000.0)
    assert trio.current_time() == 10_000.0


@pytest.mark.parametrize("grace", [-1.0, math.nan])
async def test_grace_must_be_a_time(backend: Backend, grace: float):
    """API 1."""
    with pytest.raises(ValueError, match="grace"):
        backend.procs(grace=grace)


@only_sim
async def test_actor_of_this_process_gets_its_grace_and_is_joined(backend: SimBackend):
    """Z14, M7: it cannot be killed, so its clean-up is cancelled, waited for, and told."""
    del backend
    with pytest.raises(MeshErrorGroup) as caught:
        async with this_proc().spawn("tidy", Tidy, 100.0):
            pass
    (leaf,) = trimesh.leaves(caught.value)
    assert isinstance(leaf, ActorFailed)
    assert "grace" in str(leaf)
    assert trio.current_time() == limits.GRACE_SECONDS


async def test_actor_of_this_process_is_gone_when_its_block_ends(backend: Backend):
    """M7: set-up, service and clean-up run under the spawning block."""
    del backend
    async with this_proc().spawn("observer", Probe) as observer:
        async with this_proc().spawn("tidy", Tidy, tell=observer) as tidy:
            assert await tidy.rank.call_one() == 0
        assert await observer.seen.call_one() == ["cleaning 0", "clean 0"]


async def test_cancel_does_not_cut_clean_up_short(backend: Backend):
    """M3: clean-up is shielded for its grace, whatever ended the block."""
    async with this_proc().spawn("observer", Probe) as observer:
        with trio.CancelScope() as scope:
            async with backend.procs() as procs:
                await procs.spawn("tidy", Tidy, 0.05, tell=observer)
                scope.cancel()
                await trio.sleep_forever()
        assert scope.cancelled_caught
        assert sorted(await observer.seen.call_one()) == ["clean 0", "clean 1", "cleaning 0", "cleaning 1"]


async def test_clean_exit_says_nothing(
    backend: Backend, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
):
    """Z11: neither on the log nor on any output."""
    async with backend.procs() as procs:
        probes = await procs.spawn("probes", Probe)
        await probes.rank.call()
        with trio.move_on_after(0.01):
            await probes.hold.call()
    assert caplog.records == []
    assert capfd.readouterr() == ("", "")


class Weight:
    """What an actor holds; those of this process that are still there can be counted."""

    alive: ClassVar[weakref.WeakSet[Weight]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.alive.add(self)


class Weighty(Actor):
    """Holds memory, and what leads back to it: its own nursery."""

    def __init__(self) -> None:
        self.weight = Weight()

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        async with trio.open_nursery() as self.nursery:
            self.nursery.start_soon(trio.sleep_forever)
            yield
            self.nursery.cancel_scope.cancel()

    @endpoint
    def now(self) -> None: ...

    @endpoint
    async def later(self) -> None:
        await trio.lowlevel.checkpoint()

    @endpoint
    async def items(self) -> AsyncGenerator[int, None]:
        yield 1

    @endpoint
    def fail(self) -> None:
        raise ValueError


class Scales(Actor):
    """Counts what is left, without a collector that would remove it."""

    @endpoint
    def count(self) -> int:
        gc.disable()
        return len(Weight.alive)


async def test_memory_of_an_actor_goes_with_it(backend: Backend):
    """M3: at once, not when cycles are collected some day."""
    was_enabled = gc.isenabled()
    try:
        async with backend.procs({}) as procs:
            scales = await procs.spawn("scales", Scales)
            before = await scales.count.call_one()
            async with procs.spawn("weighty", Weighty) as weighty:
                await weighty.now.call_one()
                await weighty.later.call_one()
                async with weighty.items.stream() as items:
                    assert [item async for _, item in items] == [1]
                with pytest.raises(ValueError):  # noqa: PT011 - it says nothing
                    await weighty.fail.call_one()
                assert await scales.count.call_one() == before + 1

            assert await scales.count.call_one() == before
    finally:
        if was_enabled:
            gc.enable()
