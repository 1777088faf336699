"""Errors that cross into asyncio: groups as they are, and blocks that cancel their body as a TaskGroup does (K04)."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from tests.aio.loops import Attempt
from tests.conformance.probe import Probe

import trimesh
from trimesh import MeshErrorGroup, MeshStopped, ProcDied

pytestmark = [pytest.mark.real, pytest.mark.daily]


class Odd(Exception):
    """Raised over there."""


def test_one_failing_rank_is_a_group_with_its_coordinates(run):
    """E01, E03, E04, K04: `except*` of the original type in asyncio; the siblings have been cancelled."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 2}) as procs:
            probes = await procs.spawn("probes", Probe)
            caught = None
            try:
                await probes.fail.call(Odd("odd"), [1])
            except* Odd as group:
                caught = group
            assert isinstance(caught, MeshErrorGroup)
            assert trimesh.coords(caught) == [{"gpus": 1}]
            [leaf] = caught.exceptions
            assert type(leaf) is Odd
            where = trimesh.origin(leaf)
            assert where is not None
            assert where.endpoint == "fail"
            assert await probes.slice(gpus=0).note.call_one("alive") == "alive"

    run(main)


def test_all_failing_ranks_are_in_the_group(run):
    """E02, K04."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 4}) as procs:
            probes = await procs.spawn("probes", Probe)
            async with asyncio.TaskGroup() as group:
                call = group.create_task(Attempt(probes.fail_at_gate.call(Odd("odd"))).over())
                await probes.wait.call("at the gate")
                await probes.open_gate.call()
            error = call.result()
            assert isinstance(error, MeshErrorGroup)
            assert sorted(point["gpus"] for point in trimesh.coords(error)) == [0, 1, 2, 3]

    run(main)


def test_call_one_and_choose_raise_bare(run):
    """E03, K04."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            probe = await procs.spawn("probe", Probe)
            for verb in (probe.fail.call_one, probe.fail.choose):
                with pytest.raises(Odd):
                    await verb(Odd("odd"))

    run(main)


def test_death_cancels_the_body(run):
    """X3, K04: the asyncio task in the block is cancelled, the block raises the death once, and the task goes on."""

    async def main():
        task = asyncio.current_task()
        assert task is not None
        body: BaseException | None = None
        with pytest.raises(MeshErrorGroup) as caught:
            async with trimesh.aio.spawn_procs({"gpus": 2}) as procs:
                probes = await procs.spawn("probes", Probe)
                pids = (await probes.pid.call()).values()
                os.kill(pids[1], signal.SIGKILL)
                try:
                    await probes.hold.call()
                except BaseException as error:
                    body = error
                    raise
        assert isinstance(body, asyncio.CancelledError)
        [died] = caught.value.exceptions
        assert isinstance(died, ProcDied)
        assert trimesh.coords(caught.value) == [{"gpus": 1}]
        assert task.cancelling() == 0
        await asyncio.sleep(0)  # no cancel is left over

    run(main)


def test_death_cancels_a_body_that_waits_in_asyncio(run):
    """X3, K04: also where nothing of Trio's is awaited."""

    async def main():
        with pytest.raises(MeshErrorGroup):
            async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
                pid = await (await procs.spawn("probe", Probe)).pid.call_one()
                os.kill(pid, signal.SIGKILL)
                await asyncio.Event().wait()

    run(main)


def test_death_ends_the_calls_of_all_tasks_of_the_body(run):
    """X3, K04: tasks of a TaskGroup inside the block end as cancelled, the death surfaces at the block alone."""

    async def main():
        tasks = []
        with pytest.raises(MeshErrorGroup) as caught:
            async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
                probe = await procs.spawn("probe", Probe)
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(probe.hold_many.call_one()) for _ in range(5)]
                    await probe.wait.call_one("hold", 5)
                    os.kill(await probe.pid.call_one(), signal.SIGKILL)
        assert [type(leaf) for leaf in trimesh.leaves(caught.value)] == [ProcDied]
        assert all(task.cancelled() for task in tasks)

    run(main)


def test_death_in_a_nested_block_cancels_that_body_alone(run):
    """X3, K04: the block around it goes on, and its requests of cancel are kept apart."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 1}, name="outer") as outer:
            around = await outer.spawn("around", Probe)
            with pytest.raises(MeshErrorGroup, match="inner"):
                async with trimesh.aio.spawn_procs({"gpus": 1}, name="inner") as inner:
                    pid = await (await inner.spawn("inside", Probe)).pid.call_one()
                    killing = asyncio.create_task(kill_when_held(pid, around))
                    await around.hold.call_one()
            await killing
            assert "hold cancelled" in await around.seen.call_one()

    async def kill_when_held(pid: int, around: Probe) -> None:
        await around.wait.call_one("hold")
        os.kill(pid, signal.SIGKILL)

    run(main)


def test_death_in_an_outer_block_cancels_the_inner_one(run):
    """X3, E14, K04: the inner block is left by a cancel; the outer one raises the death."""

    async def main():
        task = asyncio.current_task()
        assert task is not None
        with pytest.raises(MeshErrorGroup, match="outer") as caught:
            async with trimesh.aio.spawn_procs({"gpus": 1}, name="outer") as outer:
                pid = await (await outer.spawn("around", Probe)).pid.call_one()
                async with trimesh.aio.spawn_procs({"gpus": 1}, name="inner") as inner:
                    inside = await inner.spawn("inside", Probe)
                    os.kill(pid, signal.SIGKILL)
                    await inside.hold.call_one()
        assert [type(leaf) for leaf in trimesh.leaves(caught.value)] == [ProcDied]
        assert task.cancelling() == 0

    run(main)


def test_death_and_outer_cancel_are_kept_apart(run):
    """K04: a task that is cancelled from outside while its block fails is told of the failure, and stays cancelled."""

    async def main():
        async def body() -> None:
            async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
                probe = await procs.spawn("probe", Probe)
                os.kill(await probe.pid.call_one(), signal.SIGKILL)
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    attempt.task.cancel()
                    raise

        attempt = Attempt(body())
        error = await attempt.over()
        assert isinstance(error, MeshErrorGroup)
        assert attempt.task.cancelling() == 1

    run(main)


def test_caller_outside_of_the_block_gets_the_death(run):
    """X3, K04: a task that is not in the block that owns the process is told by its call."""

    async def main():
        handles: asyncio.Queue[Probe] = asyncio.Queue()

        async def call_from_outside() -> None:
            probe = await handles.get()
            with pytest.raises(ProcDied):
                await probe.hold.call_one()

        async with trimesh.aio.open_trio():
            outside = asyncio.create_task(call_from_outside())
            with pytest.raises(MeshErrorGroup):
                async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
                    probe = await procs.spawn("probe", Probe)
                    handles.put_nowait(probe)
                    await probe.wait.call_one("hold")
                    os.kill(await probe.pid.call_one(), signal.SIGKILL)
                    await asyncio.Event().wait()
            await outside

    run(main)


def test_body_and_actor_fail_together(run):
    """E09, K04: both are in the group that the block raises."""

    async def main():
        with pytest.raises(MeshErrorGroup) as caught:
            async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
                probe = await procs.spawn("probe", Probe)
                try:
                    await probe.fail.broadcast(Odd("there"))  # the failure may come before it returns
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    raise LookupError("here") from None
        assert {type(leaf) for leaf in trimesh.leaves(caught.value)} == {Odd, LookupError}

    run(main)


def test_error_of_the_body_is_in_the_group(run):
    """X1, K04: as in Trio, for one error, too; and what was raised there is what comes out."""

    async def main():
        error = LookupError("here")
        with pytest.raises(MeshErrorGroup) as caught:
            async with trimesh.aio.spawn_procs({"gpus": 1}):
                raise error
        assert caught.value.exceptions == (error,)

    run(main)


def test_broadcast_failure_surfaces_at_the_block(run):
    """E10, K04."""

    async def main():
        with pytest.raises(MeshErrorGroup) as caught:
            async with trimesh.aio.spawn_procs({"gpus": 2}) as procs:
                probes = await procs.spawn("probes", Probe)
                await probes.fail.broadcast(Odd("nobody asked"), ranks=[1])
        assert trimesh.coords(caught.value) == [{"gpus": 1}]
        assert [type(leaf) for leaf in trimesh.leaves(caught.value)] == [Odd]

    run(main)


def test_handle_of_a_block_that_was_left_is_refused(run):
    """M3, K04."""

    async def main():
        async with trimesh.aio.open_trio():
            async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
                probe = await procs.spawn("probe", Probe)
            with pytest.raises(MeshStopped):
                await probe.note.call_one("too late")
        with (
            pytest.raises(RuntimeError, match="in a loop without an open block")
            if run.__name__ != "run_in_thread"
            else (pytest.raises(MeshStopped))
        ):
            await probe.note.call_one("much too late")

    run(main)


def test_remote_exit_stays_remote(run):
    """E06, K04: a SystemExit over there ends nothing here."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            probe = await procs.spawn("probe", Probe)
            with pytest.raises(trimesh.RemoteError):
                await probe.fail.call_one(SystemExit(3))

    run(main)
