"""When restarts end: budgets, failures during a restart, ends that are not healed (R04, R05, R10; P2, P4)."""

from __future__ import annotations

import os
from typing import Any

import pytest
import trio
from tests.conformance.meshes import Backend, SimBackend, attempt, kinds
from tests.conformance.probe import Probe
from tests.conformance.supervised import Fragile, kill_and_wait, reading, restart

import trimesh
from trimesh import (
    Died,
    MeshErrorGroup,
    MeshStopped,
    ProcDied,
    Restarted,
    Restarting,
    RestartLimit,
    endpoint,
)


async def test_more_than_intensity_fails_the_block(backend: Backend):
    """R04, P4: `RestartLimit` with every cause, oldest first; X3: the calls of the body end by the cancel."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs(supervision=restart(intensity=2)) as procs, reading(procs) as log:
            probes = await procs.spawn("probes", Probe)
            for _ in range(2):
                await kill_and_wait(backend, procs, log, 1)
                assert await probes.slice(gpus=1).rank.call_one() == 1
            backend.kill(procs, 1)
            await trio.sleep_forever()
    (leaf,) = trimesh.leaves(caught.value)
    assert isinstance(leaf, RestartLimit)
    assert [type(cause) for cause in leaf.causes] == [ProcDied] * 3
    assert [trimesh.origin(cause).incarnation for cause in leaf.causes] == [0, 1, 2]
    assert trimesh.origin(leaf).point == {"gpus": 1}


@pytest.mark.by_value
async def test_failure_during_restart_counts(backend: Backend, tmp_path: Any):
    """R05: a process that does not come up again uses the budget up, with the error that kept it down."""
    flag = tmp_path / "broken"

    def setup() -> None:
        if flag.exists():
            raise KeyError("broken")

    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs(setup=setup, supervision=restart(intensity=2)) as procs:
            flag.touch()
            backend.kill(procs, 1)
            await trio.sleep_forever()
    (leaf,) = trimesh.leaves(caught.value)
    assert isinstance(leaf, RestartLimit)
    assert [type(cause) for cause in leaf.causes] == [ProcDied, KeyError, KeyError]


async def test_actor_that_does_not_start_again_counts(backend: Backend, tmp_path: Any):
    """R05: also when it is the actor; the mesh heals when the cause is gone."""
    flag = tmp_path / "broken"
    async with backend.procs(supervision=restart(intensity=50)) as procs, reading(procs) as log:
        fragile = await procs.spawn("fragile", Fragile, str(flag))
        flag.touch()
        backend.kill(procs, 1)
        restarting = await log.wait(Restarting, 1)
        assert isinstance(restarting.cause, ProcDied)
        flag.unlink()
        await log.wait(Restarted)
        assert await fragile.slice(gpus=1).rank.call_one() == 1


async def test_waiting_calls_end_when_the_restart_gives_up(backend: Backend, tmp_path: Any):
    """API 6: a caller outside the block, whose call waits for the member, gets an error."""
    flag = tmp_path / "broken"
    async with trio.open_nursery() as nursery:
        with pytest.raises(MeshErrorGroup) as caught:
            async with backend.procs(supervision=restart(intensity=3)) as procs, reading(procs) as log:
                fragile = await procs.spawn("fragile", Fragile, str(flag))
                flag.touch()
                backend.kill(procs, 1)
                await log.wait(Restarting)
                outside = attempt(nursery, fragile.slice(gpus=1).rank.call_one)
                await trio.sleep_forever()
        with pytest.raises((ProcDied, MeshStopped)):
            await outside.result()
    assert kinds(caught.value) == [RestartLimit]


async def test_end_that_the_policy_does_not_name_fails_the_block(backend: Backend):
    """P2."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs(supervision=restart(on=(trimesh.Unresponsive,))) as procs:
            backend.kill(procs, 1)
            await trio.sleep_forever()
    assert kinds(caught.value) == [ProcDied]


@pytest.mark.parametrize("when", ["temporary", "transient"])
async def test_member_that_is_not_restarted_is_gone(backend: Backend, when: str):
    """R10, R11: `temporary` restarts nothing, `transient` no process that has ended by itself; the block goes on."""
    async with backend.procs(supervision=restart(when=when)) as procs, reading(procs) as log:
        probes = await procs.spawn("probes", Leaving)
        if when == "temporary":
            backend.kill(procs, 1)
        elif isinstance(backend, SimBackend):
            backend.world.children[procs._owned.info.members[1].proc_id].die(code=0)
        else:
            await probes.slice(gpus=1).leave.broadcast()
        died = await log.wait(Died)
        assert isinstance(died.error, ProcDied)
        with pytest.raises(ProcDied):
            await probes.slice(gpus=1).rank.call_one()
        assert await probes.alive().rank.choose() == 0
        assert log.of(Restarting) == []


class Leaving(Probe):
    @endpoint
    async def leave(self) -> None:
        os._exit(0)
