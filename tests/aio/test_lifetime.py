"""What an asyncio program has of Trio, and when: shared by its blocks, gone with the last (K04, Z01)."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import sys
import types

import pytest
import trio
from tests.aio.loops import Attempt, watched
from tests.conformance.probe import Probe

import trimesh
from trimesh._runtime.tasks.crossing import in_trio, in_trio_block
from trimesh.aio import trio_run
from trimesh.testing.zombie_guard import left_descriptors, left_threads, scan

pytestmark = pytest.mark.real


def children() -> set[str]:
    """Return the pids of this process's children."""
    found = set()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/self/task/{task}/children") as file:
            found |= set(file.read().split())  # unless the thread has ended meanwhile
    return found


@pytest.mark.daily
def test_nothing_is_left_when_the_block_has_been_left(run):
    """Z01, K04: processes, descriptors and threads are gone when `async with` is over, while the loop runs on."""

    async def main():
        before = scan(), children()
        async with trimesh.aio.spawn_procs({"gpus": 2}) as procs:
            await (await procs.spawn("probes", Probe)).rank.call()
            assert len(children() - before[1]) >= 1  # the spawner; its workers are its children
        assert children() == before[1]
        assert list(left_descriptors(before[0])) == []
        assert list(left_threads(before[0])) == []

    run(main)


def test_meshes_follow_each_other(run):
    """Z01, K04: the second time Trio starts anew."""

    async def main():
        for _ in range(3):
            async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
                assert await (await procs.spawn("probe", Probe)).rank.call_one() == 0

    run(main)


def test_nested_blocks_share_one_run(run):
    """K04."""

    async def main():
        loop = asyncio.get_running_loop()
        async with trimesh.aio.open_trio():
            first = trio_run.find_run(loop)
            async with trimesh.aio.spawn_procs({"gpus": 1}), trimesh.aio.spawn_procs({"gpus": 1}):
                assert trio_run.find_run(loop) is first
            assert trio_run.find_run(loop) is first
        assert trio_run.find_run(loop) is None

    run(main)


def test_block_that_does_not_wait_is_entered_at_once_and_left_in_a_turn():
    """So its body begins without a turn of the loop, and blocks in a row let other tasks run."""
    turns = []

    @contextlib.asynccontextmanager
    async def nothing():
        yield trio.lowlevel.current_task()

    async def main():
        async with trimesh.aio.open_trio():
            asyncio.get_running_loop().call_soon(turns.append, "other")
            async with in_trio_block(nothing()):
                turns.append("body")
            turns.append("left")

    asyncio.run(main())
    assert turns == ["body", "other", "left"]


def test_block_of_a_cancelled_task_is_not_entered():
    """A cancel that was requested before is raised by entering, not by the body."""
    begun = []

    @contextlib.asynccontextmanager
    async def nothing():
        yield

    async def main():
        async with trimesh.aio.open_trio():
            asyncio.current_task().cancel()
            with pytest.raises(asyncio.CancelledError):
                async with in_trio_block(nothing()):
                    begun.append("body")
            assert asyncio.current_task().uncancel() == 0

    asyncio.run(main())
    assert begun == []


def test_sibling_tasks_share_one_run(run):
    """K04: the last block ends the run, whichever task it is in; handles of the tasks are good for each other."""

    async def main():
        probes: asyncio.Queue[Probe] = asyncio.Queue()
        called = asyncio.Event()

        async def give() -> None:
            async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
                probes.put_nowait(await procs.spawn("probe", Probe))
                await called.wait()

        async def take() -> None:
            async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
                mine = await procs.spawn("mine", Probe)
                assert (
                    await mine.relay.call_one(await probes.get(), "note", "call_one", "by the other") == "by the other"
                )
                called.set()
                await asyncio.sleep(0.05)

        async with asyncio.TaskGroup() as group:
            group.create_task(give())
            group.create_task(take())

    run(main)


def test_block_that_opens_while_the_run_ends_gets_a_new_one(run):
    """K04: a thread holds one Trio run at a time, so it waits."""

    async def main():
        ends = asyncio.Event()

        async def first() -> None:
            async with trimesh.aio.open_trio():
                pass
            ends.set()

        async def second() -> None:
            while not ends.is_set():
                async with trimesh.aio.open_trio():
                    assert await in_trio(trio.lowlevel.checkpoint)() is None

        async with asyncio.TaskGroup() as group:
            group.create_task(second())
            for _ in range(20):
                group.create_task(first())

    run(main)


def test_cancel_while_the_run_ends_is_kept(run):
    """RUN-2, K04: the end is waited for, then the task is cancelled."""

    async def main():
        async def body() -> None:
            async with trimesh.aio.open_trio():
                left.set()

        left = asyncio.Event()
        attempt = Attempt(body())
        await left.wait()
        attempt.task.cancel()
        await attempt.over()
        assert attempt.task.cancelled()
        assert trio_run.find_run(asyncio.get_running_loop()) is None

    run(main)


def test_call_that_outlives_its_task_group_is_joined(run):
    """K04: what asyncio tasks have begun inside of a block has ended when it is left."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 1}, name="outer") as outer:
            probe = await outer.spawn("probe", Probe)
            async with trimesh.aio.spawn_procs({"gpus": 1}, name="inner"):
                free = asyncio.create_task(probe.wait_for_gate.call_one())
                await probe.wait.call_one("gate")
                opener = asyncio.create_task(open_later(probe))
            assert await free == "gate"
            await opener

    async def open_later(probe: Probe) -> None:
        await asyncio.sleep(0.05)
        await probe.open_gate.call_one()

    run(main)


def test_task_that_outlives_an_inner_block_calls_on(run):
    """K04: its later calls run in the block around."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 1}, name="outer") as outer:
            probe = await outer.spawn("probe", Probe)
            left = asyncio.Event()

            async def late() -> str:
                await left.wait()
                return await probe.note.call_one("late")

            async with trimesh.aio.open_trio():
                free = asyncio.create_task(late())
            left.set()
            assert await free == "late"

    run(main)


def test_block_of_another_task_may_leave_it():
    """K04: a fixture enters in one task and leaves in another; a failure then surfaces at its end."""
    with asyncio.Runner() as runner:
        block = trimesh.aio.spawn_procs({"gpus": 1})
        procs = runner.run(enter(block))
        probe = runner.run(spawn(procs))
        assert runner.run(watch(probe)) == "called"
        runner.run(leave(block))


async def enter(block):
    return await block.__aenter__()


async def spawn(procs):
    return await procs.spawn("probe", Probe)


async def watch(probe):
    return await probe.note.call_one("called")


async def leave(block):
    await block.__aexit__(None, None, None)


def test_suppressing_block_takes_its_cancel_back(run):
    """A block of Trio that cancels its body and absorbs that is over, and the task goes on after it."""

    async def main():
        task = asyncio.current_task()
        assert task is not None
        block = Expiring()
        async with in_trio_block(block):
            await asyncio.Event().wait()
        assert block.scope.cancelled_caught
        assert task.cancelling() == 0
        await asyncio.sleep(0)

    run(main)


class Expiring:
    """`trio.move_on_after` as a block."""

    async def __aenter__(self):
        self.scope = trio.move_on_after(0.05)
        self.scope.__enter__()

    async def __aexit__(self, *error):
        return self.scope.__exit__(*error)


def test_closed_body_lets_the_block_go(run):
    """K04: a coroutine that is closed cannot wait; its block is cancelled, and the run ends by itself."""

    @types.coroutine
    def pause():
        yield

    async def main():
        block = trimesh.aio.open_trio()

        async def body() -> None:
            try:
                await pause()
            except GeneratorExit:
                await block.__aexit__(*sys.exc_info())
                raise

        await block.__aenter__()
        waiting = Attempt(in_trio(trio.sleep_forever)())
        await asyncio.sleep(0)
        coroutine = body()
        coroutine.send(None)
        coroutine.close()
        await waiting.over()
        assert waiting.task.cancelled()
        run_of_loop = trio_run._runs.get(asyncio.get_running_loop())
        if run_of_loop is not None:
            await run_of_loop.wait_ended()

    run(main)


def test_error_of_trio_itself_ends_every_wait():
    """RUN-3: when the guest run breaks down, calls raise and the block is over: nothing hangs."""

    async def main():
        loop = asyncio.get_running_loop()
        with pytest.raises(trimesh.TrimeshInternalError):
            async with trimesh.aio.open_trio():
                run = trio_run.find_run(loop)
                assert run is not None
                waiting = Attempt(in_trio(trio.sleep_forever)())
                await asyncio.sleep(0)
                run.post(lambda: trio.lowlevel.spawn_system_task(fail))
                assert isinstance(await waiting.over(), trimesh.TrimeshInternalError)

    async def fail() -> None:
        raise ValueError("a system task must not raise")

    asyncio.run(watched(main))


def test_broken_run_cancels_the_bodies():
    """RUN-3: a body that waits for something of asyncio's is told, too."""

    async def main():
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        with pytest.raises(trimesh.TrimeshInternalError):
            async with trimesh.aio.open_trio():
                run = trio_run.find_run(loop)
                assert run is not None
                run.post(lambda: trio.lowlevel.spawn_system_task(fail))
                await asyncio.Event().wait()
        assert task.cancelling() == 0

    async def fail() -> None:
        raise ValueError("a system task must not raise")

    asyncio.run(watched(main))


def test_block_is_entered_once(run):
    """M1, K04."""

    async def main():
        block = trimesh.aio.open_trio()
        async with block:
            pass
        with pytest.raises(RuntimeError, match="entered once"):
            async with block:
                pass

    run(main)


async def test_open_trio_is_for_asyncio():
    """K04: what has no meaning in Trio says so; meshes are the same there."""
    with pytest.raises(RuntimeError, match="must be used in a task of asyncio"):
        async with trimesh.aio.open_trio():
            pass
    async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
        assert await (await procs.spawn("probe", Probe)).rank.call_one() == 0


def test_dump_works_from_asyncio(run):
    """M4, K04."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            probe = await procs.spawn("probe", Probe)
            held = asyncio.create_task(probe.hold_many.call_one())
            await probe.wait.call_one("hold")
            text = io.StringIO()
            trimesh.dump(text)
            assert "probe.hold_many" in text.getvalue()
            held.cancel()
            await asyncio.wait([held])

    run(main)


def test_debug_mode_has_no_complaint(caplog):
    """K04: asyncio's debug mode looks at threads and at coroutines that were never awaited."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            assert await (await procs.spawn("probe", Probe)).rank.call_one() == 0

    asyncio.run(watched(main), debug=True)
    assert [record.message for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")] == []
