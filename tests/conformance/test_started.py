"""Calls that are sent now and awaited later: `call.start` (rule A1)."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from tests.conformance.meshes import Backend, SimBackend, only_real, only_sim
from tests.conformance.nodes import no_deadline
from tests.conformance.probe import Probe
from tests.patience import HANG_SECONDS

import trimesh
from trimesh import (
    Backoff,
    DeadlockError,
    MeshErrorGroup,
    MeshStopped,
    ProcDied,
    RemoteCancelled,
    Restart,
    Retry,
    StartedCall,
    endpoint,
    leaves,
)


class Starter(Probe):
    """Starts calls to others."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: StartedCall[Any] | None = None
        self.handle: Any = None

    @endpoint
    async def start_notes(self, target: Probe, notes: list[int]) -> list[int]:
        """Start one call after the other, the first of which makes the link, then call."""
        started = [target.note.call_one.start(note) for note in notes[:-1]]
        return [*[await target.note.call_one(notes[-1])], *[await one for one in started]]

    @endpoint
    def keep(self, target: Probe, name: str, *args: Any) -> None:
        """Start a call in a plain function, and keep it."""
        self.kept = getattr(target, name).call_one.start(*args)

    @endpoint
    def forget(self, target: Probe, name: str, *args: Any) -> None:
        getattr(target, name).call_one.start(*args)

    @endpoint
    async def collect(self) -> Any:
        assert self.kept is not None
        return await self.kept

    @endpoint
    async def start_and_hold(self, target: Probe) -> None:
        self.kept = target.hold.call_one.start()
        await trio.sleep_forever()

    @endpoint(idempotent=True)
    async def fail_first(self) -> int:
        self.notes.add("tried")
        if len(self.notes.log) == 1:
            raise ConnectionError
        return len(self.notes.log)

    @endpoint
    async def keep_handle(self, handle: Any) -> None:
        self.handle = handle

    @endpoint
    async def give_handle(self) -> Any:
        return self.handle

    @endpoint
    async def touch(self, path: str) -> None:
        await trio.Path(path).touch()

    @endpoint
    async def visit_later(self, me: Starter) -> None:
        started = me.rank.call_one.start()
        await started


@pytest.mark.daily("real")
async def test_calls_are_sent_now_and_awaited_later(backend: Backend):
    """A1: two calls run at the same time; each handle gives what its verb returns, to every awaiter."""
    async with backend.procs() as procs:
        probes = await procs.spawn("probes", Probe)
        first = probes.wait_for_gate.call.start("first")
        second = probes.slice(gpus=1).pid.call_one.start()
        settled = probes.fail.call_settled.start(ValueError("no"), [0])
        chosen = probes.pid.choose.start()
        assert await second in (await probes.pid.call()).values()
        assert not first.done
        await probes.open_gate.call()
        assert list((await first).values()) == ["first", "first"]
        assert list((await first).values()) == ["first", "first"]
        assert first.done
        assert [outcome.ok for outcome in (await settled).values()] == [False, True]
        assert await chosen in (await probes.pid.call()).values()
        with trio.testing.assert_checkpoints():
            await first


async def test_started_calls_leave_in_order(backend: Backend):
    """A1, S01: among themselves and before what is called next, also where the first one has to make the link."""
    async with backend.procs() as procs:
        starters = await procs.spawn("starters", Starter)
        one, other = starters.slice(gpus=0), starters.slice(gpus=1)
        expected = list(range(6))
        assert sorted(await one.start_notes.call_one(other, expected)) == expected
        assert await other.seen.call_one() == expected
        started = [other.note.call_one.start(note) for note in range(6, 9)]
        other.note.broadcast_nowait(9)
        assert [await call for call in started] == [6, 7, 8]
        await other.wait.call_one(9)
        assert await other.seen.call_one() == list(range(10))


async def test_arguments_are_refused_at_start(backend: Backend):
    """A1: nothing is sent, and the error is raised there."""
    async with backend.procs({"gpus": 1}) as procs:
        probe = await procs.spawn("probe", Probe)
        with pytest.raises(TypeError, match="note"):
            probe.note.call_one.start()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
        with pytest.raises(TypeError):
            probe.note.call_one.start(threading.Lock())
        assert await probe.seen.call_one() == []


async def test_error_is_raised_where_it_is_awaited(backend: Backend):
    """A1: however long after it came; the owner does not hear of it."""
    async with backend.procs() as procs:
        probes = await procs.spawn("probes", Probe)
        started = probes.fail.call.start(ValueError("late"), [1])
        while not started.done:
            await probes.rank.call()
        with pytest.raises(MeshErrorGroup) as caught:
            await started
        assert [str(leaf) for leaf in leaves(caught.value)] == ["late"]
        del started, caught
        assert list((await probes.rank.call()).values()) == [0, 1]


async def test_error_of_a_dropped_handle_fails_the_block(backend: Backend):
    """A1: as soon as nobody can await it; the body is cancelled."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs({"gpus": 1}) as procs:
            probe = await procs.spawn("probe", Probe)
            probe.fail.call_one.start(ValueError("nobody"))
            await trio.sleep_forever()
    assert [str(leaf) for leaf in leaves(caught.value)] == ["nobody"]


async def test_error_of_a_handle_that_is_dropped_later_fails_the_block(backend: Backend):
    """A1: also when the error was there before."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs({"gpus": 1}) as procs:
            probe = await procs.spawn("probe", Probe)
            started = probe.fail.call_one.start(ValueError("nobody"))
            while not started.done:
                await probe.rank.call()
            del started
            await trio.sleep_forever()
    assert [str(leaf) for leaf in leaves(caught.value)] == ["nobody"]


async def test_error_that_was_not_awaited_is_raised_by_the_block(backend: Backend):
    """A1: at the latest when it is left, beside that of the body."""
    kept: list[StartedCall[Any]] = []
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs({"gpus": 1}) as procs:
            probe = await procs.spawn("probe", Probe)
            kept += [probe.fail.call_one.start(ValueError(str(number))) for number in range(3)]
            await probe.note.call_one("after them")  # the one slot: all have failed, and none is cancelled
            await kept[0]
    assert sorted(str(leaf) for leaf in leaves(caught.value)) == ["0", "1", "2"]


async def test_leaving_the_block_waits_for_started_calls(backend: Backend):
    """A1: they run to their end, and may be awaited after it."""
    async with backend.procs({"gpus": 1}) as procs:
        probe = await procs.spawn("probe", Probe)
        started = probe.wait_for_gate.call_one.start()
        await probe.wait.call_one("gate")
        probe.open_gate.call_one.start()
    assert await started == "gate"


async def test_leaving_the_block_by_an_error_cancels_started_calls(backend: Backend):
    """A1, E01: who awaits them elsewhere is told that they were cancelled."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs({"gpus": 1}) as procs:
            probe = await procs.spawn("probe", Probe)
            started = probe.hold.call_one.start()
            await probe.wait.call_one("hold")
            raise ValueError("body")
    assert [str(leaf) for leaf in leaves(caught.value)] == ["body"]
    with pytest.raises(RemoteCancelled, match=r"being left|has ended"):
        await started


async def test_failure_of_the_block_cancels_started_calls(backend: Backend):
    """A1, E10: the block raises the failure, whatever was started, awaited or not."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs() as procs:
            probes = await procs.spawn("probes", Probe)
            held = [probes.hold_many.call.start(str(number)) for number in range(3)]
            await probes.wait.call("2")
            await probes.fail.broadcast(ValueError("broadcast"), [0])
            await held[0]
    assert [str(leaf) for leaf in leaves(caught.value)] == ["broadcast"]
    with pytest.raises(RemoteCancelled):
        await held[1]


async def test_death_of_a_process_ends_the_wait_for_started_calls(backend: Backend):
    """A1, X3: the block raises it, once."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs() as procs:
            probes = await procs.spawn("probes", Probe)
            held = [probes.hold_many.call.start(str(number)) for number in range(3)]
            await probes.wait.call("2")
            backend.kill(probes, 0)
            await held[0]
    assert [type(leaf) for leaf in leaves(caught.value)] == [ProcDied]


async def test_cancel_of_a_started_call(backend: Backend):
    """A1, C01, C05: it has unwound over there when the wait ends; a cancelled wait leaves it alone."""
    async with backend.procs() as procs:
        probes = await procs.spawn("probes", Probe)
        started = probes.unwind.call.start()
        await probes.wait.call("unwind")
        with trio.CancelScope() as scope:
            scope.cancel()
            await started
        assert scope.cancelled_caught
        assert not started.done
        started.cancel("enough")
        with pytest.raises(RemoteCancelled, match="enough"):
            await started
        assert all("unwind over" in log for log in (await probes.seen.call()).values())
        started.cancel()


async def test_error_of_clean_up_wins_over_the_cancel(backend: Backend):
    """A1, E08: it is raised where the call is awaited."""
    async with backend.procs({"gpus": 1}) as procs:
        probe = await procs.spawn("probe", Probe)
        started = probe.unwind.call_one.start(ValueError("unwinding"))
        await probe.wait.call_one("unwind")
        started.cancel()
        with pytest.raises(ValueError, match="unwinding"):
            await started


@only_real
@pytest.mark.daily("real")
async def test_started_call_runs_while_its_caller_computes(backend: Backend, tmp_path: Path):
    """A1: it is sent at once, to a process that sleeps."""
    async with backend.procs({"gpus": 1}) as procs:
        starter = await procs.spawn("starter", Starter)
        started = starter.touch.call_one.start(str(tmp_path / "ran"))
        end = time.monotonic() + HANG_SECONDS
        while not (tmp_path / "ran").exists():
            assert time.monotonic() < end
            time.sleep(0.001)  # noqa: ASYNC251 - as code that waits for nothing
        await started


@only_sim
@pytest.mark.parametrize(
    ("seconds", "why", "error"),
    [(2.1, "", trio.TooSlowError), (3.0, "", RemoteCancelled), (2.1, "enough", RemoteCancelled)],
)
async def test_deadline_of_the_start_just_before_that_of_the_awaiter(
    backend: SimBackend, seconds: float, why: str, error: type[Exception]
):
    """A1, D06: an awaiter whose own deadline is about to pass gets that, unless the call was cancelled."""
    async with backend.procs({"gpus": 1}) as procs:
        probe = await procs.spawn("probe", Probe)
        with pytest.raises(error), trio.fail_after(seconds):
            with trio.move_on_after(2.0):
                started = probe.hold.call_one.start()
                await trio.sleep(1.99)
                if why:
                    started.cancel(why)
                    await started
            await started


@only_sim
async def test_deadline_is_that_of_the_start(backend: SimBackend):
    """A1, D06, C3: it travels, and cuts the call short although nobody awaits it, which is no failure."""
    async with backend.procs({"gpus": 1}) as procs:
        probe = await procs.spawn("probe", Probe)
        began = trio.current_time()
        with trio.move_on_after(2.0):
            started = probe.hold.call_one.start()
            await trio.sleep_forever()
        await probe.wait.call_one("hold cancelled")
        assert trio.current_time() - began < 3.0
        with pytest.raises(RemoteCancelled, match="budget"):
            await started
        with pytest.raises(trio.TooSlowError), trio.fail_after(2.0):
            await probe.hold.call_one.start()


async def test_a_nursery_owns_what_is_started_in_it(backend: Backend):
    """A1: it waits, its cancel cancels, and an error fails it at once."""
    async with backend.procs() as procs:
        probes = await procs.spawn("probes", Probe)
        async with trio.open_nursery() as nursery:
            started = probes.note.call.start_in(nursery, "in a nursery")
        assert started.done
        async with trio.open_nursery() as nursery:
            held = probes.hold.call.start_in(nursery)
            await probes.wait.call("hold")
            nursery.cancel_scope.cancel()
        with pytest.raises(RemoteCancelled):
            await held
        await probes.wait.call("hold cancelled")
        with pytest.raises(ExceptionGroup) as caught:
            async with trio.open_nursery() as nursery:
                failing = probes.fail.call.start_in(nursery, ValueError("at once"), [0])
                await trio.sleep_forever()
        assert [str(leaf) for leaf in leaves(caught.value)] == ["at once"]
        with pytest.raises(MeshErrorGroup):
            await failing


async def test_actor_owns_what_its_endpoints_start(backend: Backend):
    """A1: the slot is free, another endpoint awaits; an error that nobody awaits ends the actor."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs() as procs:
            starters = await procs.spawn("starters", Starter)
            one, other = starters.slice(gpus=0), starters.slice(gpus=1)
            await one.keep.call_one(other, "wait_for_gate")
            await other.wait.call_one("gate")
            await other.open_gate.call_one()
            assert await one.collect.call_one() == "gate"
            await one.keep.call_one(other, "fail", KeyError("kept"))
            with pytest.raises(KeyError, match="kept"):
                await one.collect.call_one()
            await one.forget.call_one(other, "fail", ValueError("nobody"))
            await trio.sleep_forever()
    (leaf,) = leaves(caught.value)
    assert str(leaf) == "nobody"
    assert [found.mesh for found in [trimesh.origin(leaf)] if found is not None] == ["starters"]


async def test_actor_that_stops_cancels_what_it_has_started(backend: Backend):
    """A1: leaving the block is not held up by it, and it is no failure."""
    async with backend.procs() as procs, procs.spawn("probes", Probe) as probes:
        async with procs.spawn("starters", Starter) as starters:
            await starters.slice(gpus=0).keep.call_one(probes.slice(gpus=1), "hold")
            await probes.slice(gpus=1).wait.call_one("hold")
        await probes.slice(gpus=1).wait.call_one("hold cancelled")


async def test_cancel_of_an_endpoint_cancels_what_it_has_started(backend: Backend):
    """A1, C01: for as long as it runs."""
    async with backend.procs() as procs:
        starters = await procs.spawn("starters", Starter)
        one, other = starters.slice(gpus=0), starters.slice(gpus=1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.start_and_hold.call_one, other)
            await other.wait.call_one("hold")
            nursery.cancel_scope.cancel()
        await other.wait.call_one("hold cancelled")


async def test_awaiting_a_started_call_may_be_a_deadlock(backend: Backend):
    """A1, C8: a call that its own awaiter keeps from starting fails, although another task waits for it."""
    async with no_deadline(), backend.procs({"gpus": 1}) as procs:
        starter = await procs.spawn("starter", Starter)
        with pytest.raises(DeadlockError):
            await starter.visit_later.call_one(starter)
        assert await starter.rank.call_one() == 0


async def test_started_call_has_the_options_of_its_handle(backend: Backend):
    """A1, C6: what is retried, too."""
    async with backend.procs() as procs:
        starters = await procs.spawn("starters", Starter)
        started = starters.fail_first.options(retry=Retry(1, on=(ConnectionError,)), abandon_after=1.0).call.start()
        assert list((await started).values()) == [2, 2]
        with pytest.raises(TypeError, match="window"):
            starters.rank.options(window=2).call.start()


async def test_nothing_is_started_in_a_block_that_has_been_left(backend: Backend):
    """A1: and the error says so."""
    async with backend.procs({"gpus": 1}):
        async with backend.procs({"gpus": 1}, name="inner") as procs:
            probe = await procs.spawn("probe", Probe)
        with pytest.raises(RuntimeError, match="inner"):
            probe.rank.call_one.start()


async def test_call_to_a_mesh_that_has_been_left_is_refused_when_it_is_awaited(backend: Backend):
    """A1: by the verb's own outcome, where another block owns the call; the mesh of others, by the outermost one."""
    async with backend.procs({"gpus": 2}) as procs:
        starter = await procs.slice(gpus=0).spawn("starter", Starter)
        async with procs.spawn("probes", Probe) as probes:
            await starter.keep_handle.call_one(probes)
            elsewhere = await starter.give_handle.call_one()
            assert await elsewhere.slice(gpus=1).rank.call_one.start() == 1
        started = elsewhere.rank.call_settled.start()
        assert [type(one.error) for one in (await started).values()] == [MeshStopped] * 2
        started = elsewhere.rank.call.start()
        with pytest.raises(MeshErrorGroup) as caught:
            await started
        assert [type(one) for one in caught.value.exceptions] == [MeshStopped]
    with pytest.raises(RuntimeError, match="block"):
        elsewhere.rank.call.start()


async def test_nursery_gets_the_refusal_of_a_mesh_that_has_been_left(backend: Backend):
    """A1, M3: by the verb's own outcome."""
    async with backend.procs({"gpus": 2}) as procs:
        async with procs.spawn("probes", Probe) as probes:
            pass
        async with trio.open_nursery() as nursery:
            settled = probes.rank.call_settled.start_in(nursery)
        assert [type(one.error) for one in (await settled).values()] == [MeshStopped] * 2
        with pytest.raises(ExceptionGroup) as caught:
            async with trio.open_nursery() as nursery:
                probes.rank.call.start_in(nursery)
        assert {type(leaf) for leaf in leaves(caught.value)} == {MeshStopped}


@only_sim
async def test_calls_that_wait_for_a_restart_are_sent_after_it(backend: SimBackend):
    """A1, S01: in their order; afterwards a message leaves at once again."""
    policy = Restart(backoff=Backoff(60.0))
    async with backend.procs({"gpus": 2}, supervision=policy) as procs:
        probes = await procs.spawn("probes", Probe)
        backend.kill(procs, 0)
        await trio.sleep(1)
        started = [probes.note.call.start(note) for note in range(3)]
        with pytest.raises(trio.WouldBlock):
            probes.note.broadcast_nowait(4)
        await probes.note.broadcast(3)
        assert [(await call).values() for call in started] == [(note, note) for note in range(3)]
        probes.note.broadcast_nowait(4)
        await probes.wait.call(4)
        assert list((await probes.seen.call()).values()) == [list(range(5))] * 2


@only_sim
async def test_call_that_waits_for_a_restart_is_refused_when_its_mesh_stops(backend: SimBackend):
    """A1, M3, R02: it was never sent."""
    policy = Restart(backoff=Backoff(60.0))
    async with backend.procs({"gpus": 1}) as others, trio.open_nursery() as nursery:
        await others.spawn("others", Probe)
        async with backend.procs({"gpus": 2}, supervision=policy, name="restarted") as procs:
            probes = await procs.spawn("probes", Probe)
            backend.kill(procs, 0)
            await trio.sleep(1)
            settled = probes.rank.call_settled.start_in(nursery)
            await trio.sleep(1)
            assert not settled.done
            await procs.stop()
        assert [type(one.error) for one in (await settled).values()] == [MeshStopped] * 2


async def test_started_call_has_no_attributes_of_its_result(backend: Backend):
    """A1."""
    async with backend.procs({"gpus": 1}) as procs:
        probe = await procs.spawn("probe", Probe)
        started = probe.rank.call_one.start()
        with pytest.raises(AttributeError, match="has no 'real': write `await` before it"):
            started.real  # noqa: B018
        assert await started == 0
