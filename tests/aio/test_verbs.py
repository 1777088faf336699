"""Meshes from asyncio: the same objects, and every verb of theirs (K04)."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import re
from typing import Any

import pytest
import trio
from tests.conformance.probe import Probe
from tests.patience import HANG_SECONDS

import trimesh
from trimesh import Actor, ActorMesh, MeshErrorGroup, ProcMesh, endpoint
from trimesh._runtime.tasks.crossing import in_trio

pytestmark = pytest.mark.real


class Worker(Actor):
    @endpoint
    async def step(self, number: int) -> int:
        return number


@pytest.mark.daily
def test_listing_of_asyncio(run):
    """API 10, K04."""

    async def main():
        # fmt: off
        async with trimesh.aio.spawn_procs({"gpus": 4}) as procs:         # inside a running asyncio loop: Trio as its guest, the same objects  # noqa: E501
            async with asyncio.timeout(HANG_SECONDS):
                await (await procs.spawn("w", Worker)).step.call(1)
        # fmt: on

    run(main)


def test_handles_are_the_same_objects(run):
    """K04: a mesh that was entered from asyncio is what Trio's users get, and slices as theirs does."""

    async def main():
        async with trimesh.aio.this_host().spawn_procs({"gpus": 2}) as procs:
            probes = await procs.spawn("probes", Probe)

            assert type(procs) is ProcMesh
            assert type(probes) is ActorMesh
            assert dict(probes.extent) == {"gpus": 2}
            assert await probes.slice(gpus=1).rank.call_one() == 1
            assert dict(probes.alive().extent) == {"gpus": 2}

    run(main)


@pytest.mark.daily
def test_every_verb_works(run):
    """K04: call, call_settled, call_one, choose, broadcast and broadcast_nowait."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 2}) as procs:
            probes = await procs.spawn("probes", Probe)
            one = probes.slice(gpus=0)

            assert (await probes.note.call("called")).values() == ("called", "called")
            settled = await probes.fail.call_settled(ValueError("no"), ranks=[1])
            assert [outcome.ok for outcome in settled.values()] == [True, False]
            assert await one.note.call_one("one") == "one"
            assert await probes.note.choose("chosen") == "chosen"
            await one.note.broadcast("cast")
            one.note.broadcast_nowait("cast at once")
            await one.wait.call_one("cast at once")
            notes = [note for note in await one.seen.call_one() if note != "chosen"]
            assert notes == ["called", "one", "cast", "cast at once"]

    run(main)


def test_calls_are_started_and_awaited_later(run):
    """K04, A1: two at once; a cancelled wait leaves the call alone; an error that nobody awaits fails the block."""

    async def main():
        with pytest.raises(MeshErrorGroup) as caught:
            async with trimesh.aio.spawn_procs({"gpus": 2}) as procs:
                probes = await procs.spawn("probes", Probe)
                first = probes.wait_for_gate.call.start("first")
                second = probes.slice(gpus=1).pid.call_one.start()
                assert await second == (await probes.pid.call()).item(gpus=1)
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.01):
                        await first
                await probes.open_gate.call()
                assert (await first).values() == ("first", "first")
                held = probes.hold.call.start()
                held.cancel("enough")
                with pytest.raises(trimesh.RemoteCancelled, match="enough"):
                    await held
                probes.fail.choose.start(ValueError("nobody"))
                await asyncio.sleep(3600)
        assert [str(leaf) for leaf in trimesh.leaves(caught.value)] == ["nobody"]

    run(main)


def test_broadcast_nowait_leaves_at_once(run):
    """K02, K04: what is sent by a sync function leaves although no task awaits anything in Trio."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 1}) as procs:
            probe = await procs.spawn("probe", Probe)
            waiting = asyncio.create_task(probe.wait.call_one("cast"))
            await asyncio.sleep(0.05)  # Trio sleeps in its thread, too, by now: any time will do
            probe.note.broadcast_nowait("cast")
            await waiting

    run(main)


def test_many_calls_run_at_once(run):
    """K04: asyncio tasks of the body call side by side; each gets its own result."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 2}) as procs:
            probes = await procs.spawn("probes", Probe)
            async with asyncio.TaskGroup() as group:
                held = group.create_task(probes.wait_for_gate.call())
                tasks = [group.create_task(probes.relay.call(probes, "pid", "call")) for _ in range(50)]
                await probes.open_gate.call()
            assert held.result().values() == ("gate", "gate")
            assert len({task.result().values()[0].values() for task in tasks}) == 1

    run(main)


def test_actors_of_this_process_run_in_trio(run):
    """K04, M7: an actor of this very process is called from asyncio, and calls on."""

    async def main():
        async with trimesh.aio.this_proc().spawn("own", Probe) as own:
            assert await own.note.call_one("here") == "here"
            async with trimesh.aio.spawn_procs({"gpus": 1}) as procs, procs.spawn("there", Probe) as there:
                relayed = await own.relay.call_one(there, "note", "call_one", "relayed")
                assert relayed == "relayed"
                assert await there.seen.call_one() == ["relayed"]

    run(main)


def test_warm_host_keeps_its_spawner(run):
    """K04, O1: a warm host is entered from asyncio, and meshes that are awaited on it belong to its block."""

    async def main():
        async with trimesh.aio.this_host().warm(preload=("json",)) as host:
            first = await host.spawn_procs({"gpus": 1})
            async with host.spawn_procs({"gpus": 1}) as second:
                for procs in (first, second):
                    assert await (await procs.spawn("probe", Probe)).rank.call_one() == 0

    run(main)


def test_awaiting_processes_without_a_block_is_refused(run):
    """M1, K04."""

    async def main():
        with pytest.raises(RuntimeError, match=re.escape("write `async with this_host().spawn_procs(...) as procs:`")):
            await _adopted_by_nobody()

    async def _adopted_by_nobody():
        async with trimesh.aio.open_trio():
            await trimesh.aio.spawn_procs({"gpus": 1})

    run(main)


def test_spawning_is_used_once(run):
    """M1, K04: what spawn_procs returns is entered once, and says so when it is not."""

    async def main():
        spawning = trimesh.aio.spawn_procs({"gpus": 1})
        async with spawning:
            pass
        with pytest.raises(RuntimeError, match="can be started once"):
            async with spawning:
                pass
        with pytest.warns(RuntimeWarning, match=f"{re.escape(__file__)}.*was never started"):
            trimesh.aio.spawn_procs({"gpus": 1})

    run(main)


def test_failed_spawn_raises_in_asyncio(run):
    """E11, K04: the ranks whose start has failed are in the group, and what was half built is gone."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 2}) as procs:
            with pytest.raises(MeshErrorGroup) as caught:
                await procs.spawn("broken", Broken, [1])
            assert trimesh.coords(caught.value) == [{"gpus": 1}]
            assert (await (await procs.spawn("probes", Probe)).rank.call()).values() == (0, 1)

    run(main)


class Broken(Actor):
    def __init__(self, ranks: list[int]) -> None:
        if trimesh.current_rank() in ranks:
            raise LookupError("broken")

    @endpoint
    async def serve(self) -> None:
        return None


def test_context_variables_of_the_task_are_seen_in_trio(run):
    """K04: the work in Trio has the context of the asyncio task, and what it sets there does not come back."""
    variable = contextvars.ContextVar("variable", default="unset")

    async def exchange() -> str:
        await trio.lowlevel.checkpoint()
        found = variable.get()
        variable.set("from Trio")
        return found

    async def main():
        variable.set("from asyncio")
        async with trimesh.aio.open_trio():
            assert await in_trio(exchange)() == "from asyncio"
        assert variable.get() == "from asyncio"

    run(main)


def test_signature_is_that_of_spawn_procs():
    mine: Any = trimesh.aio.spawn_procs
    assert inspect.signature(mine) == inspect.signature(trimesh.this_host().spawn_procs)
