"""Calls between two programs."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.lifetime.program import Program
from tests.patience import HANG_SECONDS
from tests.programs.conftest import SCRIPTS, names_in

import trimesh
from trimesh import ConnectError, MeshErrorGroup, MeshStopped, connect, publish_as, this_host, this_proc

pytestmark = [pytest.mark.real, pytest.mark.daily]


async def test_calls_streams_and_errors_cross(publisher: Program, judge: Any):
    """W3: as within a program, with the coordinates of the other one."""
    async with connect("judge", judge) as judges:
        assert list((await judges.score.call(4)).values()) == [8, 8]
        assert await judges.slice(gpus=1).score.call_one(1) == 2
        async with judges.slice(gpus=0).numbers.stream(200) as results:
            assert [value async for _, value in results] == list(range(200))
        with pytest.raises(MeshErrorGroup) as caught:
            await judges.slice(gpus=slice(1, 2)).fail.call()
        assert {type(leaf) for leaf in trimesh.leaves(caught.value)} == {LookupError}
        assert trimesh.coords(caught.value) == [{"gpus": 1}]
    publisher.say("leave")


async def test_links_lead_to_the_processes_of_the_actors(publisher: Program, judge: Any):
    """W3: the controller of the other program may be stopped meanwhile."""
    async with connect("judge", judge) as judges:
        pids = set((await judges.pid.call()).values())
        assert publisher.pid not in pids
        publisher.send(signal.SIGSTOP)
        try:
            assert set((await judges.pid.call()).values()) == pids
        finally:
            publisher.send(signal.SIGCONT)
    publisher.say("leave")


async def test_cancels_and_deadlines_cross(publisher: Program, judge: Any):
    """W3."""
    async with connect("judge", judge) as judges:
        with trio.move_on_after(60) as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(judges.hang.call)
                await trio.to_thread.run_sync(publisher.events, "hanging", 2)
                nursery.cancel_scope.cancel()
        assert not scope.cancelled_caught
        await trio.to_thread.run_sync(publisher.events, "cancelled", 2)
        with trio.fail_after(50):
            assert 40 < await judges.slice(gpus=0).budget.call_one() <= 50

        async def hang(scope: trio.CancelScope) -> None:
            with scope:
                await judges.hang.call()

        async with trio.open_nursery() as nursery:
            limit = trio.CancelScope(deadline=trio.current_time() + HANG_SECONDS)
            nursery.start_soon(hang, limit)
            await trio.to_thread.run_sync(publisher.events, "hanging", 2)
            limit.deadline = trio.current_time()
        assert limit.cancelled_caught
        await trio.to_thread.run_sync(publisher.events, "cancelled", 2)
    publisher.say("leave")


async def test_channel_of_the_client_takes_items(publisher: Program, judge: Any):
    """W3: a port of the client takes items of the other program."""
    async with (
        connect("judge", judge) as judges,
        trimesh.open_channel(int, capacity=4) as (port, receiver),
        trio.open_nursery() as nursery,
    ):

        async def call() -> None:
            async with port:
                await judges.slice(gpus=0).tell.call_one(port, 50)

        nursery.start_soon(call)
        assert [number async for number in receiver] == list(range(50))
    publisher.say("leave")


async def test_client_may_have_meshes_of_its_own(publisher: Program, judge: Any):
    """W3: and its workers, and those of the other program, are told in words that they cannot use others' handles."""
    async with this_host().spawn_procs({"gpus": 1}) as procs, connect("judge", judge) as judges:
        own = await procs.spawn("own", judge)
        assert await own.score.call_one(3) == 6
        with pytest.raises(RuntimeError, match="came from another program"):
            await own.use.call_one(judges.slice(gpus=0))
        with pytest.raises(RuntimeError, match="came from another program"):
            await judges.slice(gpus=0).use.call_one(own)
        assert await judges.slice(gpus=0).use.call_one(judges.slice(gpus=1)) == 2
    publisher.say("leave")


async def test_several_clients(publisher: Program, judge: Any, tmp_path: Path):
    """W3, W4: the end of one does nothing to the others."""
    async with connect("judge", judge) as judges:
        with Program(tmp_path, "client", programs=SCRIPTS) as other:
            other.event("connected")
            publisher.event("hanging")
            other.kill_and_check()
            await trio.to_thread.run_sync(publisher.event, "cancelled")
        assert list((await judges.score.call(1)).values()) == [2, 2]
    publisher.say("leave")


async def test_view_is_published(judge: Any, tmp_path: Path):
    """W3: a part of a mesh keeps its ranks."""
    with Program(tmp_path, "part_publisher", programs=SCRIPTS) as program:
        program.event("published")
        async with connect("part", judge) as part:
            assert part.extent == {"gpus": 1}
            assert list((await part.score.call(1)).values()) == [2]
            with pytest.raises(MeshErrorGroup) as caught:
                await part.fail.call()
            assert trimesh.coords(caught.value) == [{"gpus": 1}]
        program.say("leave")
        program.event("left")


async def test_handle_ends_with_its_block(publisher: Program, judge: Any):
    """W5: on the side of the client; connecting again needs another outermost block (W3)."""
    async with this_host().warm():
        async with connect("judge", judge) as judges:
            await judges.score.call(1)
            with pytest.raises(ConnectError, match="can connect to another one once"):
                async with connect("judge", judge):
                    raise AssertionError
        with pytest.raises(MeshErrorGroup) as caught:
            await judges.score.call(1)
        assert {type(leaf) for leaf in trimesh.leaves(caught.value)} == {MeshStopped}
        with pytest.raises(ConnectError, match="leave all blocks first"):
            async with connect("judge", judge):
                raise AssertionError
    async with connect("judge", judge) as judges:
        assert list((await judges.score.call(1)).values()) == [2, 2]
    publisher.say("leave")


async def test_own_publication_is_refused(judge: Any):
    """W3: the handle itself is better."""
    async with this_proc().spawn("judge", judge) as own, publish_as("mine", own):
        with pytest.raises(ConnectError, match="by this program itself"):
            async with connect("mine", judge):
                raise AssertionError


async def test_leaving_leaves_nothing(publisher: Program, judge: Any, folder: Path):
    """W5: descriptors of the client, and of the program that published, and no name."""
    before = os.listdir("/proc/self/fd")
    async with connect("judge", judge) as judges:
        await judges.score.call(1)
    assert len(os.listdir("/proc/self/fd")) <= len(before)
    publisher.say("leave")
    left = publisher.event("left")
    published = publisher.heard[0]
    assert left["fds"] < published["fds"]
    assert names_in(folder) == []
