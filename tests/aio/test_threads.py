"""Meshes of a Trio program from asyncio in another thread, and uses that are refused (K04)."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import Any

import pytest
import trio
from tests.aio.loops import Attempt, watched
from tests.conformance.probe import Probe
from tests.patience import HANG_SECONDS

import trimesh
from trimesh import MeshErrorGroup, ProcDied, this_host
from trimesh.aio import trio_run

pytestmark = pytest.mark.real


@pytest.mark.daily
async def test_thread_of_a_trio_program_uses_its_handles():
    """K04: asyncio code in a thread that Trio has started calls by handles of the Trio program."""
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        probes = await procs.spawn("probes", Probe)

        async def main():
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await probes.hold.call()  # no block is open: the run is found all the same
            async with trimesh.aio.open_trio():
                assert (await probes.rank.call()).values() == (0, 1)
                probes.note.broadcast_nowait("from asyncio")
                assert dict(probes.alive().extent) == {"gpus": 2}
                more = await procs.spawn("more", Probe)  # adopted by the block of the Trio program
                assert (await more.rank.call()).values() == (0, 1)

        await trio.to_thread.run_sync(lambda: asyncio.run(watched(main)))
        assert "from asyncio" in await probes.slice(gpus=1).seen.call_one()


async def test_trio_serves_while_asyncio_waits():
    """K04: the two loops run side by side."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        probe = await procs.spawn("probe", Probe)

        async def main():
            async with trimesh.aio.open_trio():
                assert await probe.wait_for_gate.call_one() == "gate"

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, lambda: asyncio.run(watched(main)))
            await probe.wait.call_one("gate")
            await probe.open_gate.call_one()


async def test_token_names_the_run_of_another_thread():
    """K04: a thread that was not started by Trio is told which run to use."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        probe = await procs.spawn("probe", Probe)
        token = trio.lowlevel.current_trio_token()
        found: list[Any] = []

        async def main():
            async with trimesh.aio.open_trio(trio_token=token):
                found.append(await probe.note.call_one("by token"))

        thread = threading.Thread(target=lambda: asyncio.run(watched(main)))
        thread.start()
        assert "by token" not in found
        await trio.to_thread.run_sync(thread.join)
        assert found == ["by token"]


async def test_death_reaches_an_asyncio_block_of_another_thread():
    """X3, K04: the block in asyncio is cancelled and raises; the Trio program around it goes on."""

    async def main():
        with pytest.raises(MeshErrorGroup) as caught:
            async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
                os.kill(await (await procs.spawn("probe", Probe)).pid.call_one(), signal.SIGKILL)
                await asyncio.Event().wait()
        assert [type(leaf) for leaf in trimesh.leaves(caught.value)] == [ProcDied]

    async with this_host().spawn_procs({"gpus": 1}, name="of Trio") as procs:
        probe = await procs.spawn("probe", Probe)
        await trio.to_thread.run_sync(lambda: asyncio.run(watched(main)))
        assert await probe.note.call_one("alive") == "alive"


def test_end_of_the_trio_program_cancels_the_asyncio_block():
    """K04: a Trio run that ends beneath an asyncio block waits until that has been left."""
    order: list[str] = []

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            await procs.spawn("probe", Probe)
            entered.set()
            try:
                await asyncio.Event().wait()
            finally:
                order.append("body left")

    def in_thread() -> None:
        try:
            asyncio.run(main())
        except asyncio.CancelledError:
            order.append("asyncio ended")
        finally:
            left.set()

    async def program() -> None:
        with trio.move_on_after(HANG_SECONDS) as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lambda: trio.to_thread.run_sync(in_thread, abandon_on_cancel=True))
                await trio.to_thread.run_sync(entered.wait)
                nursery.cancel_scope.cancel()
        assert not scope.cancelled_caught

    entered, left = threading.Event(), threading.Event()
    trio.run(program)
    order.append("Trio ended")
    # Trio has abandoned it, so it may be later.
    assert left.wait(HANG_SECONDS), "the thread of the asyncio program did not end"
    assert order[0] == "body left"
    assert sorted(order) == ["Trio ended", "asyncio ended", "body left"]
    assert trio_run._runs == {}


def test_call_from_another_loop_is_refused():
    """K04: a handle belongs to the loop whose block owns the processes; another thread's loop is told so."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            probe = await procs.spawn("probe", Probe)

            async def call_there() -> None:
                await probe.note.call_one("from elsewhere")

            with pytest.raises(RuntimeError, match="in a loop without an open block"):
                await asyncio.to_thread(lambda: asyncio.run(call_there()))  # with this task's context variables
            assert await probe.note.call_one("from here") == "from here"

    asyncio.run(watched(main))


def test_call_outside_of_any_loop_is_refused():
    """K04: a coroutine that is driven by hand."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            probe = await procs.spawn("probe", Probe)

            def drive() -> None:
                coroutine = probe.note.call_one("by hand")
                with pytest.raises(RuntimeError, match="must be used in a task of asyncio"):
                    coroutine.send(None)

            await asyncio.to_thread(drive)

    asyncio.run(watched(main))


def test_call_by_a_stale_handle_is_refused():
    """K04: no block is open, so there is no Trio."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            probe = await procs.spawn("probe", Probe)
        with pytest.raises(RuntimeError, match="in a loop without an open block"):
            await probe.note.call_one("too late")

    asyncio.run(watched(main))


def test_guest_of_the_program_itself_is_used():
    """K04: a loop that has Trio as its guest already keeps that one, whose tasks use the meshes as well."""

    async def main():
        loop = asyncio.get_running_loop()
        over = loop.create_future()
        handles = trio.open_memory_channel[Probe](1)
        left = trio.Event()

        async def in_trio() -> str:
            async with handles[1]:
                probe = await handles[1].receive()
                note = await probe.note.call_one("from Trio")
            await left.wait()
            return note

        trio.lowlevel.start_guest_run(
            in_trio,
            run_sync_soon_threadsafe=loop.call_soon_threadsafe,
            done_callback=over.set_result,
            host_uses_signal_set_wakeup_fd=True,
        )
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            probe = await procs.spawn("probe", Probe)
            assert isinstance(trio_run.find_run(loop), trio_run.Local)
            await probe.note.call_one("from asyncio")
            probe.note.broadcast_nowait("at once")
            await probe.wait.call_one("at once")
            handles[0].send_nowait(probe)
            await probe.wait.call_one("from Trio")
        left.set()
        assert (await over).unwrap() == "from Trio"

    asyncio.run(watched(main))


def test_error_without_aio_names_it():
    """K04: who awaits a mesh in asyncio without `trimesh.aio` is told what to write."""
    script = """
import asyncio, trimesh
async def main():
    try:
        async with trimesh.this_host().spawn_procs({"n": 1}):
            pass
    except RuntimeError as error:
        print(error)
asyncio.run(main())
"""
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "async with trimesh.aio.spawn_procs(...) as procs:" in done.stdout
    assert done.stderr == ""


async def test_attempt_keeps_the_value():
    """The tool of these tests."""

    async def main():
        attempt = Attempt(asyncio.sleep(0, "value"))
        assert await attempt.over() is None
        assert attempt.value == "value"

    await trio.to_thread.run_sync(lambda: asyncio.run(main()))
