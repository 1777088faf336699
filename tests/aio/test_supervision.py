"""Supervised meshes from asyncio (K04): deaths that are no failure of the block, restarts, events."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from tests.conformance.probe import Probe

import trimesh
from trimesh import Backoff, Died, Isolate, MeshErrorGroup, ProcDied, Restart, Restarted, Started

pytestmark = pytest.mark.real


@pytest.mark.daily
def test_isolated_death_is_the_caller_s(run):
    """X3, P1, K04: the body is not cancelled; the call that addresses the dead raises, the rest lives."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 2}, supervision=Isolate()) as procs:
            probes = await procs.spawn("probes", Probe)
            os.kill((await probes.pid.call()).values()[1], signal.SIGKILL)
            with pytest.raises(MeshErrorGroup) as caught:
                await probes.hold.call()
            assert [type(leaf) for leaf in trimesh.leaves(caught.value)] == [ProcDied]
            healthy = probes.exclude(trimesh.coords(caught.value))
            assert (await healthy.rank.call()).values() == (0,)
            await procs.replace([{"gpus": 1}])
            assert (await probes.rank.call()).values() == (0, 1)

    run(main)


def test_restart_heals_and_events_tell(run):
    """R01, T3, K04: the events of a mesh are read in asyncio, beside calls that wait for the restart."""

    async def main():
        policy = Restart("one_for_one", backoff=Backoff(0.01))
        async with trimesh.aio.spawn_procs({"gpus": 2}, supervision=policy) as procs:
            probes = await procs.spawn("probes", Probe)
            async with procs.events() as events, asyncio.timeout(20):
                assert [type(await anext(events)) for _ in range(2)] == [Started, Started]
                os.kill((await probes.pid.call()).values()[1], signal.SIGKILL)
                told = []
                async for event in events:
                    told.append(type(event))
                    if isinstance(event, Restarted):
                        break
                assert told[0] is Died
            assert (await probes.rank.call()).values() == (0, 1)

    run(main)


def test_timeout_of_an_event_loses_none(run):
    """T3, K04."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 3}) as procs:
            found = []
            async with procs.events() as events:
                while len(found) < 3:
                    try:
                        async with asyncio.timeout(0):
                            found.append(await anext(events))
                    except TimeoutError:
                        found.append(await anext(events))
            assert [event.point["gpus"] for event in found] == [0, 1, 2]

    run(main)
