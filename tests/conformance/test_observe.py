"""What a run tells of itself: its processes and calls, who waits for whom (Q1, Q2)."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.conformance.meeting import come, make_meetings, meet
from tests.conformance.meshes import Backend, SimBackend, member, only_real, only_sim
from tests.conformance.probe import Probe
from tests.conformance.supervised import kill_and_see, reading
from tests.conformance.test_stalls import Sleeper
from tests.patience import HANG_SECONDS

from trimesh import Isolate, endpoint, observe, this_host

WORK = ("doze", "hold_the_gil", "compute")
"""Endpoints that keep the loop of their process from running; on a rank each."""


class Busy(Sleeper):
    """Computes, besides."""

    @endpoint
    def compute(self, path: str) -> None:
        """Run Python code until a file is there."""
        while not os.path.exists(path):
            pass


class Relay(Probe):
    """Hands a call on, and owns processes."""

    @endpoint
    async def hand_on(self, *way: Any) -> None:
        """Let the first one hand the rest on; the last one holds."""
        if len(way) > 1:
            await way[0].hand_on.call_one(*way[1:])
        else:
            await way[0].hold.call_one()

    @endpoint
    async def own(self) -> None:
        """Own two processes until the gate is open."""
        async with this_host().spawn_procs({"gpus": 2}, name="inner"):
            self.notes.add("own")
            await self.gate.wait()


async def look(**options: int) -> Any:
    """Ask all; on a busy machine none is silent because its answer takes half a second."""
    return await observe.snapshot(seconds=HANG_SECONDS, **options)


async def test_only_a_real_run_has_figures_of_its_machines(backend: Backend):
    """Q1: a simulation must not depend on the machine that it runs on."""
    async with backend.procs({"gpus": 2}):
        seen = await look()
        assert sum(host.procs for host in seen.hosts) == 3
        is_real = not isinstance(backend, SimBackend)
        assert {(host.at > 0, host.cpus > 0, host.kernel != "") for host in seen.hosts} == {(is_real,) * 3}


async def test_snapshot_has_every_process_and_actor(backend: Backend):
    """Q1: the controller and its processes, each with what lives there."""
    async with backend.procs({"gpus": 3}) as procs:
        await procs.spawn("probes", Probe)
        seen = await look()

        assert [(proc.name, proc.state) for proc in seen.procs] == [
            ("controller", "running"),
            *((f"procs[gpus={rank}]", "running") for rank in range(3)),
        ]
        assert {actor.name: actor.cls for actor in seen.actors} == {
            f"probes[gpus={rank}]": "Probe" for rank in range(3)
        }
        by_id = {proc.id: proc for proc in seen.procs}
        assert {by_id[actor.proc].point["gpus"] for actor in seen.actors} == {0, 1, 2}
        assert seen.job is not None
        assert seen.job.id == seen.procs[0].id
        assert [(host.procs, host.failed) for host in seen.hosts] == [(4, 0)]
        assert seen.calls == ()
        assert seen.cut == {}


async def test_snapshot_has_processes_of_processes(backend: Backend):
    """Q1: each process asks those that it owns."""
    async with backend.procs({"gpus": 1}) as procs:
        owners = await procs.spawn("owners", Relay)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(owners.own.call_one)
            await owners.wait.call_one("own")
            seen = await look()
            await owners.open_gate.call_one()

        names = {proc.name: proc for proc in seen.procs}
        assert set(names) == {"controller", "procs[gpus=0]", "inner[gpus=0]", "inner[gpus=1]"}
        assert names["inner[gpus=1]"].parent == names["procs[gpus=0]"].id


async def test_rows_of_a_table_are_cut_at_its_end(backend: Backend):
    """Q1: the number of what is left out is said."""
    async with backend.procs({"gpus": 3}):
        seen = await look(rows_max=2)
        assert [proc.name for proc in seen.procs] == ["controller", "procs[gpus=0]"]
        assert seen.cut == {"procs": 2, "links": 4}  # each link is told by both ends


async def test_failures_come_first_and_are_kept(backend: Backend):
    """Q1: a process that has ended is there as dead until its place is taken, with how it ended."""
    async with backend.procs({"gpus": 3}, supervision=Isolate()) as procs, reading(procs) as log:
        await kill_and_see(backend, procs, log, 1)
        seen = await look()
        assert (seen.procs[0].name, seen.procs[0].state) == ("procs[gpus=1]", "dead")
        assert "SIGKILL" in seen.procs[0].last_event
        assert [(one.kind, one.name) for one in seen.failures] == [("Died", "procs[gpus=1]")]
        assert [host.failed for host in seen.hosts] == [1]


async def test_call_says_who_asked_and_what_it_waits_for(backend: Backend):
    """Q2: running and queued calls, where one runs, what is left of its deadline, and what holds its slot."""
    async with backend.procs() as procs:
        probes = await procs.spawn("probes", Probe)
        one = probes.slice(gpus=1)
        async with trio.open_nursery() as nursery:
            with trio.CancelScope() as scope:
                nursery.start_soon(one.wait_for_gate.call_one)
                await one.wait.call_one("gate")
                nursery.start_soon(_note_within, one, 50.0)
                while not await _is_queued("note"):
                    await trio.lowlevel.checkpoint()
                seen = await look()
            assert not scope.cancelled_caught
            await one.open_gate.call_one()

        calls = {call.endpoint: call for call in seen.calls}
        running, queued = calls["wait_for_gate"], calls["note"]
        assert (running.state, running.name, running.caller) == ("running", "probes[gpus=1]", "controller")
        assert running.point == {"gpus": 1}
        assert running.at.endswith("in wait_for_gate")
        assert "probe.py:" in running.at
        assert running.left is not None
        assert running.left > (50 if backend.is_sim else 0)  # that of the test
        assert queued.state == "queued"
        assert [(wait.kind, wait.call) for wait in queued.waits] == [("slot", running.id)]
        assert queued.left is not None
        assert 0 < queued.left <= 50


async def _note_within(probe: Any, seconds: float) -> None:
    with trio.fail_after(seconds):
        await probe.note.call_one("late")


async def _is_queued(name: str) -> bool:
    return any(call.state == "queued" and call.endpoint == name for call in (await look()).calls)


@pytest.mark.by_value
async def test_chain_of_calls_leads_to_the_culprit(backend: Backend):
    """Q2: a call that waits for another one names it; what all wait for in the end is found."""
    async with backend.procs({"gpus": 3}) as procs:
        nodes = await procs.spawn("nodes", Relay)
        probes = await procs.spawn("probes", Probe)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(nodes.slice(gpus=0).hand_on.call_one, nodes.slice(gpus=1), probes.slice(gpus=2))
            await probes.slice(gpus=2).wait.call_one("hold")
            seen = await look()
            nursery.cancel_scope.cancel()

        graph = observe.WaitGraph(seen)
        (root,) = [call for call in graph.roots() if call.id in graph.waits_for]
        (middle,) = graph.waits_for[root.id]
        (last,) = graph.waits_for[middle]
        assert [graph.calls[one].name for one in (root.id, middle, last)] == [
            "nodes[gpus=0]",
            "nodes[gpus=1]",
            "probes[gpus=2]",
        ]
        first = graph.culprits()[0]
        assert (first.call.name, first.call.endpoint, first.waiters) == ("probes[gpus=2]", "hold", 2)
        inner = next(call for call in seen.calls if call.name == "probes[gpus=2]")
        assert inner.caller == "nodes[gpus=1].hand_on"
        assert seen.calls[0].state == "waiting"


@only_sim
async def test_simulated_process_that_lags_is_silent(backend: SimBackend):
    """Q1: within the seconds of the question."""
    async with backend.procs({"gpus": 2}) as procs:
        probes = await procs.spawn("probes", Probe)
        backend.world.proc(member(probes, 1).proc_id).transport.lag(60.0)
        begun = trio.current_time()
        seen = await observe.snapshot(seconds=1.0)
        assert trio.current_time() - begun <= 1.0
        assert (seen.procs[0].name, seen.procs[0].state) == ("procs[gpus=1]", "silent")


@only_real
async def test_process_whose_loop_does_not_run_is_there_with_its_stack(backend: Backend, tmp_path: Path):
    """Q1: in Python code, its calls are known; in the operating system, or with the GIL in C, its stack is."""
    paths = make_meetings(tmp_path, "dozing", "holding")
    over = tmp_path / "over"
    async with backend.procs({"gpus": 4}) as procs:
        sleepers = await procs.spawn("sleepers", Busy)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sleepers.slice(gpus=0).doze.call_one, paths[0])
            nursery.start_soon(sleepers.slice(gpus=1).hold_the_gil.call_one, paths[1])
            nursery.start_soon(sleepers.slice(gpus=2).compute.call_one, str(over))
            while True:
                seen = await observe.snapshot()
                found = {proc.name: proc for proc in seen.procs}
                told = [found[f"procs[gpus={rank}]"] for rank in range(4)]
                states = [proc.state for proc in told]
                stacks = [f"in {name}" in proc.stack for name, proc in zip(WORK, told, strict=False)]
                if states == ["silent", "silent", "stuck", "running"] and all(stacks):  # none has yet to begin
                    break
            await meet(*paths)
            over.touch()

        calls = {call.endpoint: call for call in seen.calls}
        assert {name: call.state for name, call in calls.items()} == {
            "doze": "sent",
            "hold_the_gil": "sent",
            "compute": "running",
        }
        assert "in come" in calls["doze"].at
        assert "in hold_the_gil" in calls["hold_the_gil"].at


async def test_call_that_waits_for_another_names_the_line_of_the_program(backend: Backend):
    """Q1: not the lines of the library in which it waits, neither as its place nor in its stack."""
    async with backend.procs({"gpus": 2}) as procs, cancelled_at_the_end() as nursery:
        relays = await procs.spawn("relays", Relay)
        one = relays.slice(gpus=1)
        nursery.start_soon(relays.slice(gpus=0).hand_on.call_one, one)
        await one.wait.call_one("hold")
        seen = await look()

    [call] = [call for call in seen.calls if call.name == "relays[gpus=0]"]
    assert call.state == "waiting"
    assert "test_observe.py" in call.at
    assert call.at.endswith(" in hand_on")
    assert not [line for line in call.stack if "/trimesh/" in line]


@only_real
async def test_endpoint_in_a_thread_names_the_line_of_its_thread(backend: Backend, tmp_path: Path):
    """Q1: not the one in Trio where the task waits for the thread."""
    started, released = make_meetings(tmp_path, "started", "released")
    async with backend.procs({"gpus": 1}) as procs, trio.open_nursery() as nursery:
        threaded = await procs.spawn("threaded", Threaded)
        nursery.start_soon(threaded.in_thread.call_one, started, released)
        await meet(started)
        seen = await look()
        await meet(released)

    [call] = seen.calls
    assert call.stack[0].endswith(" in come")
    assert call.stack[1].endswith(" in in_thread")
    assert "meeting.py" in call.at


class Threaded(Probe):
    @endpoint(thread=True)
    def in_thread(self, started: str, released: str) -> None:
        come(started)
        come(released)


@asynccontextmanager
async def cancelled_at_the_end() -> AsyncGenerator[trio.Nursery]:
    async with trio.open_nursery() as nursery:
        yield nursery
        nursery.cancel_scope.cancel()
