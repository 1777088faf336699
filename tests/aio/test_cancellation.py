"""Cancels that cross between asyncio and Trio, both ways, and deadlines of asyncio (K04)."""

from __future__ import annotations

import asyncio
import gc
import threading
from types import FrameType

import pytest
import trio
from tests.aio.loops import Attempt, expire
from tests.conformance.probe import Probe, Tidy

import trimesh
from trimesh import Actor, MeshErrorGroup, RemoteCancelled, endpoint, limits
from trimesh._runtime.tasks import in_trio

pytestmark = [pytest.mark.real, pytest.mark.daily]


def test_timeout_cancels_the_endpoints(run):
    """C01, D01, D06, K04: `asyncio.timeout` is a `TimeoutError` here, and by then every endpoint has unwound."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 2}) as procs:
            probes = await procs.spawn("probes", Probe)
            timeout = asyncio.timeout(None)

            async def call() -> None:
                async with timeout:
                    await probes.unwind.call(seconds=0.1)

            task = asyncio.create_task(call())
            await probes.wait.call("unwind")
            await expire(timeout)
            with pytest.raises(TimeoutError):
                await task
            assert (await probes.seen.call()).values() == (["unwind", "unwind over"],) * 2

    run(main)


def test_cancel_of_one_call_leaves_the_others(run):
    """C03, K04."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            probe = await procs.spawn("probe", Probe)
            first = asyncio.create_task(probe.hold_many.call_one("first"))
            second = asyncio.create_task(probe.wait_for_gate.call_one("second"))
            await probe.wait.call_one("first")
            await probe.wait.call_one("second")
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            assert "first cancelled" in await probe.seen.call_one()
            await probe.open_gate.call_one()
            assert await second == "second"

    run(main)


def test_cancel_says_why(run):
    """C04, K04: the endpoint's `Cancelled` says that the caller was cancelled."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            probe = await procs.spawn("probe", Probe)
            task = asyncio.create_task(probe.hold.call_one())
            await probe.wait.call_one("hold")
            task.cancel()
            await asyncio.wait([task])
            [_, (note, reason, _), _] = await probe.seen.call_one()
            assert note == "hold cancelled"
            assert "caller cancelled" in reason

    run(main)


def test_further_cancels_wait_for_the_acknowledgement(run):
    """C09, K04: a task that waits for the end over there stays there, however often it is cancelled."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            probe = await procs.spawn("probe", Probe)
            task = asyncio.create_task(probe.fail_at_gate.call_one(LookupError("not raised"), ranks=[]))
            await probe.wait.call_one("at the gate")
            for _ in range(3):
                task.cancel()
                await asyncio.wait([task], timeout=0.02)
                assert not task.done()
            await probe.open_gate.call_one()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert task.cancelling() == 3
            assert await probe.note.call_one("alive") == "alive"

    run(main)


def test_outer_cancel_is_not_taken_for_the_timeout(run):
    """K04: a task whose own timeout expires while it is being cancelled from outside ends as cancelled."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            probe = await procs.spawn("probe", Probe)

            timeout = asyncio.timeout(None)

            async def call() -> None:
                async with timeout:
                    await probe.fail_at_gate.call_one(LookupError("not raised"), ranks=[])

            task = asyncio.create_task(call())
            await probe.wait.call_one("at the gate")
            task.cancel()
            await expire(timeout)
            await probe.open_gate.call_one()
            with pytest.raises(asyncio.CancelledError):
                await task

    run(main)


def test_error_while_cancelling_wins(run):
    """E08, K04: what the endpoint raises on its way out is not masked by the cancel."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 2}) as procs:
            probes = await procs.spawn("probes", Probe)
            task = asyncio.create_task(probes.unwind.call(LookupError("on the way out")))
            await probes.wait.call("unwind")
            task.cancel()
            with pytest.raises(MeshErrorGroup) as caught:
                await task
            assert [type(leaf) for leaf in trimesh.leaves(caught.value)] == [LookupError, LookupError]

    run(main)


def test_unresponsive_endpoint_is_given_up(run, monkeypatch):
    """C2, C12, C13, K04: the wait for acknowledgements has its bound in asyncio, too."""
    monkeypatch.setattr(limits, "CANCEL_ACK_SECONDS", 0.2)

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            sleeper = await procs.spawn("sleeper", Sleeper)
            task = asyncio.create_task(sleeper.sleep.call_one())
            await sleeper.has_begun.call_one()
            while not task.done():
                task.cancel()
                await asyncio.wait([task], timeout=0.1)
            assert task.cancelled()
            assert not await sleeper.has_ended.call_one()
            await sleeper.wake.call_one()
            assert await sleeper.serve.call_one() == "served"

    run(main)


class Sleeper(Actor):
    """Sleeps in a thread, which no cancel reaches, until it is woken."""

    def __init__(self) -> None:
        self.woken = threading.Event()
        self.begun, self.ended = trio.Event(), trio.Event()

    @endpoint(thread=True)
    def sleep(self) -> None:
        trio.from_thread.run_sync(self.begun.set)
        self.woken.wait()
        trio.from_thread.run_sync(self.ended.set)

    @endpoint
    async def serve(self) -> str:
        return "served"

    @endpoint(concurrency=3, group="watch")
    async def has_begun(self) -> None:
        await self.begun.wait()

    @endpoint(concurrency=3, group="watch")
    async def has_ended(self) -> bool:
        return self.ended.is_set()

    @endpoint(concurrency=3, group="watch")
    async def wake(self) -> None:
        self.woken.set()


def test_cancelled_task_group_cancels_its_calls(run):
    """K04: the first error of a TaskGroup cancels the calls of its other tasks, which have unwound when it raises."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            probe = await procs.spawn("probe", Probe)
            held: list[asyncio.Task[None]] = []

            async def together() -> None:
                async with asyncio.TaskGroup() as group:
                    held.extend(group.create_task(probe.hold_many.call_one(f"held {number}")) for number in range(3))
                    for number in range(3):
                        await probe.wait.call_one(f"held {number}")
                    group.create_task(probe.note.call_one())

            # In a task of its own: before Python 3.13 a TaskGroup may forget to take back its cancel of this one.
            error = await Attempt(together()).over()
            assert isinstance(error, ExceptionGroup)
            assert [type(leaf) for leaf in error.exceptions] == [TypeError]
            assert all(task.cancelled() for task in held)
            notes = await probe.seen.call_one()
            assert all(f"held {number} cancelled" in notes for number in range(3))

    run(main)


def test_cancel_of_the_body_leaves_the_block(run):
    """M3, K04: a block whose body was cancelled cleans up and goes, then the task ends as cancelled."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 1}, name="outside") as outside:
            notes = await outside.spawn("notes", Probe)
            entered = asyncio.Event()

            async def body() -> None:
                async with trimesh.aio.spawn_procs({"gpus": 2}) as procs:
                    held = await procs.spawn("tidy", Tidy, 0.1, tell=notes)
                    entered.set()
                    await held.hold.call()

            attempt = Attempt(body())
            await entered.wait()
            attempt.task.cancel()
            await attempt.over()
            assert attempt.task.cancelled()
            seen = await notes.seen.call_one()
            assert sorted(seen) == ["clean 0", "clean 1", "cleaning 0", "cleaning 1"]

    run(main)


def test_cancel_while_leaving_cuts_accepted_messages_short(run):
    """M3, C09, K04: the end of a healthy block waits for what was broadcast; cancels end that, and are kept."""

    async def main():
        async def body() -> None:
            async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
                probe = await procs.spawn("probe", Probe)
                await probe.hold.broadcast()
                await probe.wait.call_one("hold")
                leaving.set()

        leaving = asyncio.Event()
        attempt = Attempt(body())
        await leaving.wait()
        done, _ = await asyncio.wait([attempt.task], timeout=0.05)
        assert not done
        attempt.task.cancel()
        attempt.task.cancel()
        await attempt.over()
        assert attempt.task.cancelled()

    run(main)


@pytest.mark.parametrize("turns", [1, 2, 3, 5, 8, 13, 21, 34, 55, 89])
def test_cancel_while_entering_leaves_nothing(run, turns):
    """M1, C07, K04: whenever it comes; the zombie guard looks at what is left."""

    async def main():
        async def body() -> None:
            async with trimesh.aio.spawn_procs({"gpus": 2}) as procs, procs.spawn("probes", Probe):
                await asyncio.Event().wait()

        attempt = Attempt(body())
        for _ in range(turns):
            await asyncio.sleep(0)
        attempt.task.cancel()
        await attempt.over()
        assert attempt.task.cancelled()

    run(main)


@pytest.mark.parametrize("milliseconds", [5, 40, 80, 120, 160, 200, 240])
def test_cancel_during_spawn_leaves_nothing(run, milliseconds):
    """M1, C07, K04: in wall-clock time, so that it meets the spawner and half-born processes."""

    async def main():
        async def body() -> None:
            async with trimesh.aio.spawn_procs({"gpus": 2}) as procs:
                await procs.spawn("probes", Probe)
                await asyncio.Event().wait()

        attempt = Attempt(body())
        await asyncio.sleep(milliseconds / 1000)
        attempt.task.cancel()
        await attempt.over()
        assert attempt.task.cancelled()

    run(main)


def test_cancel_at_any_turn_of_a_call_is_never_lost(run):
    """C02, K04: before, at or after the start: what started has been cancelled when the task has ended."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            probe = await procs.spawn("probe", Probe)
            for turns in range(30):
                note = f"hold {turns}"
                task = asyncio.create_task(probe.hold_many.call_one(note))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
                assert task.cancelled()
                seen = await probe.seen.call_one()
                assert seen.count(note) == seen.count(f"{note} cancelled") <= 1

    run(main)


def test_cancelled_queued_message_never_runs(run):
    """C11, K04."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            probe = await procs.spawn("probe", Probe)
            gate = asyncio.create_task(probe.wait_for_gate.call_one())
            await probe.wait.call_one("gate")
            queued = [asyncio.create_task(probe.note.call_one(number)) for number in range(10)]
            await probe.seen.call_one()  # sent by now
            for task in queued[::2]:
                task.cancel()
            await asyncio.wait(queued[::2])
            await probe.open_gate.call_one()
            await asyncio.gather(gate, *queued[1::2])
            assert sorted(note for note in await probe.seen.call_one() if isinstance(note, int)) == [1, 3, 5, 7, 9]

    run(main)


def test_call_that_somebody_else_ends_is_an_error(run):
    """C05, C06, K04: `RemoteCancelled`, never `CancelledError`, when the actor ends the call."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            tidy = await procs.spawn("tidy", Tidy)
            with pytest.raises(RemoteCancelled):
                await tidy.cancel_itself.call_one()

    run(main)


async def cancel_before_a_wait() -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        await trio.lowlevel.checkpoint_if_cancelled()


def test_cancel_before_a_wait_leaves_no_cycle_of_frames(run):
    """K04: nor what the frames refer to."""

    async def main():
        async with trimesh.aio.open_trio():
            await in_trio(cancel_before_a_wait)()
            gc.collect()
            gc.disable()
            gc.set_debug(gc.DEBUG_SAVEALL)
            try:
                await in_trio(cancel_before_a_wait)()
                gc.collect()
                frames = {one.f_code.co_name for one in gc.garbage if isinstance(one, FrameType)}
                assert "cancel_before_a_wait" not in frames
            finally:
                gc.set_debug(0)
                gc.garbage.clear()
                gc.enable()

    run(main)
