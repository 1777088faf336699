"""`connect` and `publish_as` from asyncio and without `await`: calls, cancels, deadlines, errors and deaths cross."""

from __future__ import annotations

import asyncio
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.lifetime.program import Program
from tests.patience import HANG_SECONDS
from tests.programs.conftest import SCRIPTS

import trimesh
import trimesh.aio
import trimesh.blocking as tb
from trimesh import ConnectError, ConnectionLost, MeshErrorGroup, ProcDied, connect, publish_as

pytestmark = pytest.mark.real


def connect_and_leave(folder: Path) -> None:
    """Let another program connect, call, and leave."""
    with Program(folder, "client", programs=SCRIPTS) as client:
        client.event("connected")
        client.say("leave")
        client.event("left")


def test_asyncio_connects(publisher: Program, judge: Any) -> None:
    """W3, K04: values, streams and errors; a cancel of the task, and its timeout, reach the other program."""

    async def main() -> None:
        async with trimesh.aio.open_trio(), connect("judge", judge) as judges:
            assert (await judges.score.call(4)).values() == (8, 8)
            async with judges.slice(gpus=0).numbers.stream(20) as results:
                assert [value async for _, value in results] == list(range(20))
            with pytest.raises(MeshErrorGroup) as caught:
                await judges.fail.call()
            assert {type(leaf) for leaf in trimesh.leaves(caught.value)} == {LookupError}

            task = asyncio.create_task(judges.hang.call())
            await asyncio.to_thread(publisher.events, "hanging", 2)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            await asyncio.to_thread(publisher.events, "cancelled", 2)

            timeout = asyncio.timeout(None)

            async def limited() -> None:
                async with timeout:
                    await judges.slice(gpus=0).hang.call_one()

            attempt = asyncio.create_task(limited())
            await asyncio.to_thread(publisher.event, "hanging")
            timeout.reschedule(asyncio.get_running_loop().time())
            with pytest.raises(TimeoutError):
                await attempt
            await asyncio.to_thread(publisher.event, "cancelled")

    asyncio.run(main())
    publisher.say("leave")


@pytest.mark.daily
def test_asyncio_is_told_of_the_end_of_the_other_program(publisher: Program, judge: Any) -> None:
    """W4, K04: first that of an actor's process, with its diagnosis; then that of all."""

    async def main() -> None:
        async with trimesh.aio.open_trio(), connect("judge", judge) as judges:
            with pytest.raises(ProcDied) as died:
                await judges.slice(gpus=0).end.call_one()
            assert died.value.exit_code == 3
            held = asyncio.create_task(judges.slice(gpus=1).hang.call_one())
            await asyncio.to_thread(publisher.event, "hanging")
            publisher.send(signal.SIGKILL)
            with pytest.raises(ConnectionLost):
                await held

    asyncio.run(main())
    publisher.check_gone()


def test_asyncio_publishes(tmp_path: Path, judge: Any) -> None:
    """W3, W4, K04: leaving the block of the name waits for nothing of a client that has cancelled its calls."""

    async def main() -> None:
        async with trimesh.aio.spawn_procs({"gpus": 2}) as procs:
            judges = await procs.spawn("judges", judge)
            async with publish_as("judge", judges):
                with pytest.raises(ConnectError):
                    async with publish_as("judge", judges):
                        raise AssertionError
                await asyncio.to_thread(connect_and_leave, tmp_path)

    asyncio.run(main())


def test_script_connects(publisher: Program, judge: Any) -> None:
    """W3, K06: values, streams and errors; a future's cancel and a time limit reach the other program."""
    judges: Any
    with tb.connect("judge", judge) as judges:
        assert judges.score.call(4).values() == (8, 8)
        with judges.slice(gpus=0).numbers.stream(20) as results:
            assert [value for _, value in results] == list(range(20))
        with pytest.raises(MeshErrorGroup) as caught:
            judges.fail.call()
        assert {type(leaf) for leaf in trimesh.leaves(caught.value)} == {LookupError}

        future = judges.hang.call.submit()
        publisher.events("hanging", 2)
        assert future.cancel()
        publisher.events("cancelled", 2)
        with tb.fail_after(HANG_SECONDS):
            assert 0 < judges.slice(gpus=0).budget.call_one() <= HANG_SECONDS
        with pytest.raises(TimeoutError), tb.fail_after(0.05):
            judges.slice(gpus=0).hang.call_one()
    publisher.say("leave")


def test_script_is_told_of_the_end_of_the_other_program(publisher: Program, judge: Any) -> None:
    """W4, K06."""

    def strike() -> None:
        publisher.event("hanging")
        publisher.send(signal.SIGKILL)

    judges: Any
    with tb.connect("judge", judge) as judges:
        with pytest.raises(ProcDied):
            judges.slice(gpus=0).end.call_one()
        thread = threading.Thread(target=strike)
        thread.start()
        with pytest.raises(ConnectionLost):
            judges.slice(gpus=1).hang.call_one()
        thread.join()
    publisher.check_gone()


def test_script_publishes(tmp_path: Path, folder: Path, judge: Any) -> None:
    """W3, W4, K06: handles without `await` are published as they are."""
    with tb.spawn_procs({"gpus": 2}) as procs:
        judges = procs.spawn("judges", judge)
        with tb.publish_as("judge", judges):
            connect_and_leave(tmp_path)
    with pytest.raises(TypeError, match="handle on actors"):
        tb.publish_as("judge", judge)
