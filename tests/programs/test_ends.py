"""How a connection ends: programs leave, and die."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.lifetime.program import Program
from tests.programs.conftest import SCRIPTS

import trimesh
from trimesh import ConnectError, ConnectionLost, MeshStopped, ProcDied, connect

pytestmark = [pytest.mark.real, pytest.mark.daily]


async def test_death_of_the_publisher_is_connection_lost(publisher: Program, judge: Any):
    """W4: calls under way and later ones raise it; the block goes on."""
    async with connect("judge", judge) as judges:
        with pytest.raises(ExceptionGroup) as caught:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(judges.hang.call)
                await trio.to_thread.run_sync(publisher.events, "hanging", 2)
                publisher.send(signal.SIGKILL)
        assert {type(leaf) for leaf in trimesh.leaves(caught.value)} == {ConnectionLost}
        assert "'judge' of publisher.py" in str(next(trimesh.leaves(caught.value)))
        with pytest.raises(ConnectionLost):
            await judges.slice(gpus=0).score.call_one(1)
    await trio.to_thread.run_sync(publisher.check_gone)


async def test_death_of_an_actors_process_is_its_own(publisher: Program, judge: Any):
    """W4: with the diagnosis of the program that had started it."""
    async with connect("judge", judge) as judges:
        with pytest.raises(ProcDied) as caught:
            await judges.slice(gpus=0).end.call_one()
        assert caught.value.exit_code == 3
        assert await judges.slice(gpus=1).score.call_one(1) == 2
    publisher.say("leave")
    publisher.event("left")


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
async def test_death_of_a_client_cancels_its_calls(publisher: Program, tmp_path: Path, signum: int):
    """W4: nothing of it is left, and the actors live on."""
    with Program(tmp_path, "client", programs=SCRIPTS) as client:
        client.event("connected")
        publisher.event("hanging")
        client.kill_and_check(signum)
        publisher.event("cancelled")
    publisher.say("leave")
    publisher.event("left")
    assert not publisher.said("raised")


async def test_publisher_leaves_after_the_calls_under_way(publisher: Program, judge: Any):
    """W5: later ones raise `MeshStopped`."""
    results = list[str]()

    async def call(judges: Any) -> None:
        results.append(await judges.slice(gpus=0).after.call_one(0.5))

    async with connect("judge", judge) as judges:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call, judges)
            await trio.to_thread.run_sync(publisher.event, "working")
            publisher.say("leave")
            await trio.to_thread.run_sync(publisher.event, "leaving")
        assert results == ["done"]
        await trio.to_thread.run_sync(publisher.event, "left")
        with pytest.raises(MeshStopped):
            await judges.slice(gpus=0).score.call_one(1)
    with pytest.raises(ConnectError, match="no program of this user publishes 'judge'"):
        async with connect("judge", judge):
            raise AssertionError


async def test_publisher_that_fails_cancels_the_calls(judge: Any, tmp_path: Path):
    """W5."""
    with Program(tmp_path, "publisher", {"words": ["fail"]}, programs=SCRIPTS) as publisher:
        publisher.event("published")
        async with connect("judge", judge) as judges:
            with pytest.raises(ExceptionGroup) as caught:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(judges.hang.call)
                    await trio.to_thread.run_sync(publisher.events, "hanging", 2)
                    publisher.say("fail")
            assert {type(leaf) for leaf in trimesh.leaves(caught.value)} == {MeshStopped}
        assert publisher.event("raised")["leaves"][0]["type"] == "LookupError"
        publisher.events("cancelled", 2)  # by themselves: the block does not wait for them


async def test_client_that_is_stopped_is_cut_off(judge: Any, tmp_path: Path):
    """W5: its calls are cancelled."""
    with Program(tmp_path, "publisher", {"words": ["fail"]}, programs=SCRIPTS) as publisher:
        publisher.event("published")
        with Program(tmp_path, "client", programs=SCRIPTS) as client:
            client.event("connected")
            publisher.event("hanging")
            client.send(signal.SIGSTOP)
            publisher.say("fail")
            publisher.event("raised")
            publisher.event("cancelled")
            client.send(signal.SIGCONT)
            client.send(signal.SIGKILL)
            client.check_gone()
