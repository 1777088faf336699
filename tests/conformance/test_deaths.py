"""Processes that die, and callers that do (E02, E13; rules C1, M3, X3)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from tests.conformance.meshes import Backend, RealBackend, attempt, kinds, only_real
from tests.conformance.probe import Probe

import trimesh
from trimesh import MeshErrorGroup, MeshStopped, ProcDied, TrimeshInternalError, this_proc
from trimesh._runtime.calls.outgoing import OutgoingCall
from trimesh._runtime.life.current import current_proc


@pytest.mark.daily("real")
async def test_death_is_told_once_by_the_block(backend: Backend):
    """X3: calls of the body, of every verb, end by the cancel of the block; the one leaf is the death."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs({"gpus": 2}) as procs:
            probes = await procs.spawn("probes", Probe)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(probes.hold_many.call)
                nursery.start_soon(probes.hold_many.call_settled)
                nursery.start_soon(probes.slice(gpus=1).hold_many.call_one)
                nursery.start_soon(probes.slice(gpus=1).hold_many.choose)
                await probes.slice(gpus=0).wait.call_one("hold", 2)
                await probes.slice(gpus=1).wait.call_one("hold", 4)
                backend.kill(procs, 1)
                await trio.sleep_forever()
    (leaf,) = trimesh.leaves(caught.value)
    assert isinstance(leaf, ProcDied)
    assert leaf.signal == 9
    assert leaf.reason == "killed"
    assert leaf.by is None
    where = trimesh.origin(leaf)
    assert where.point == {"gpus": 1}
    assert where.mesh == "procs"
    assert where.actor is None


async def test_death_while_a_failed_call_waits_is_told_once(backend: Backend):
    """X3: a call that waits for acknowledgements, because a rank failed, does not repeat the death."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs({"gpus": 2}) as procs:
            probes = await procs.spawn("probes", Probe)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(probes.fail_at_gate.call, KeyError("call"), [0])
                await probes.wait.call("at the gate")
                await probes.slice(gpus=0).open_gate.call_one()
                backend.kill(procs, 1)
                await trio.sleep_forever()
    found = kinds(caught.value)
    assert found.count(ProcDied) == 1
    assert found in ([ProcDied], [ProcDied, KeyError])


async def test_two_deaths_are_two_leaves(backend: Backend):
    """E02: as many as there were before the block had stopped."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs({"gpus": 3}) as procs:
            backend.kill(procs, 0)
            backend.kill(procs, 2)
            await trio.sleep_forever()
    assert set(kinds(caught.value)) == {ProcDied}
    assert {point["gpus"] for point in trimesh.coords(caught.value)} <= {0, 2}


async def test_caller_outside_the_block_gets_the_death_from_its_call(backend: Backend):
    """X3: also one in the same program, and one in another process."""
    async with backend.procs({"gpus": 1}) as others, trio.open_nursery() as nursery:
        relay = await others.spawn("relay", Probe)
        with pytest.raises(MeshErrorGroup):
            async with backend.procs({"gpus": 2}) as procs:
                probes = await procs.spawn("probes", Probe)
                target = probes.slice(gpus=1)
                outside = attempt(nursery, target.hold_many.call_one)
                settled = attempt(nursery, target.hold_many.call_settled)
                away = attempt(nursery, relay.relay.call_one, target, "hold_many", "call_one")
                await target.wait.call_one("hold", 3)
                backend.kill(procs, 1)
                await trio.sleep_forever()
        for call in (outside, away):
            with pytest.raises(ProcDied) as caught:
                await call.result()
            assert caught.value.maybe_executed
            assert caught.value.signal == 9
            assert trimesh.origin(caught.value).point == {"gpus": 1}
        (outcome,) = (await settled.result()).values()
        assert isinstance(outcome.error, ProcDied)
        with pytest.raises((ProcDied, MeshStopped)) as later:
            await relay.relay.call_one(target, "note", "call_one", "never")
        if isinstance(later.value, ProcDied):
            assert not later.value.maybe_executed


async def test_call_to_a_mesh_with_a_dead_rank_fails_at_once(backend: Backend):
    """C1, X3: the rank that is known to be dead is the first failure; nothing waits for the others."""
    async with (
        backend.procs({"gpus": 1}) as others,
        this_proc().spawn("keeper", Probe) as keeper,
        trio.open_nursery() as nursery,
    ):
        relay = await others.spawn("relay", Probe)
        with pytest.raises(MeshErrorGroup) as block:
            async with backend.procs({"gpus": 2}) as procs:
                tidy = await procs.spawn("tidy", Lingering, keeper)
                await relay.relay.call_one(tidy, "rank", "call")
                nursery.start_soon(expect_death, relay, tidy, keeper)
                backend.kill(procs, 1)
                await trio.sleep_forever()
        assert kinds(block.value) == [ProcDied]


async def expect_death(relay: Any, tidy: Any, keeper: Any) -> None:
    """While rank 0 cleans up, call both ranks from elsewhere."""
    await keeper.wait.call_one("lingering 0")
    with pytest.raises(MeshErrorGroup) as caught:
        await relay.relay.call_one(tidy, "hold_many", "call")
    assert ProcDied in kinds(caught.value)
    await keeper.open_gate.call_one()


class Lingering(Probe):
    """Rank 0 does not stop before the keeper's gate is open."""

    def __init__(self, keeper: Probe) -> None:
        super().__init__()
        self.keeper = keeper

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        yield
        if trimesh.current_rank() == 0:
            await self.keeper.note.call_one("lingering 0")
            await self.keeper.wait_for_gate.call_one()


async def test_death_during_the_drain_is_a_failure(backend: Backend):
    """M3: a process that dies before it was asked to end has died, also while its block is being left."""
    async with trio.open_nursery() as nursery:
        with pytest.raises(MeshErrorGroup) as caught:
            async with backend.procs() as procs:
                probes = await procs.spawn("probes", Probe)
                held = attempt(nursery, probes.wait_for_gate.call)
                await probes.wait.call("gate")

                async def kill() -> None:
                    with pytest.raises(MeshStopped):
                        while True:
                            await probes.slice(gpus=0).seen.call_one()
                    backend.kill(procs, 0)

                nursery.start_soon(kill)
        assert kinds(caught.value) == [ProcDied]
        with pytest.raises(MeshErrorGroup):
            await held.result()


# ---- callers that vanish ---------------------------------------------------------------------------------------------


async def test_reply_to_a_caller_that_died_is_no_error(backend: Backend):
    """E13: the actor goes on; what the caller had asked for is cancelled."""
    async with backend.procs({"gpus": 1}) as procs:
        probe = await procs.spawn("probe", Probe)
        with pytest.raises(MeshErrorGroup) as caught:
            async with backend.procs({"gpus": 1}, name="others") as others:
                relay = await others.spawn("relay", Probe)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(relay.relay.call_one, probe, "hold_many", "call_one")
                    nursery.start_soon(relay.relay.call_one, probe, "fail_at_gate", "call_one", KeyError("late"))
                    await probe.wait.call_one("hold")
                    await probe.wait.call_one("at the gate")
                    backend.kill(others, 0)
                    await trio.sleep_forever()
        assert kinds(caught.value) == [ProcDied]
        await probe.wait.call_one("hold cancelled")
        await probe.open_gate.call_one()
        assert await probe.rank.call_one() == 0


@only_real
async def test_bug_of_the_runtime_ends_every_wait(backend: RealBackend, monkeypatch: pytest.MonkeyPatch):
    """API 4: `TrimeshInternalError` with the cause, from the block and from callers outside; nothing is left."""

    def break_down(*_: object) -> None:
        raise LookupError("a bug")

    async with trio.open_nursery() as nursery:
        with pytest.raises(MeshErrorGroup) as caught:
            async with backend.procs(grace=0.5) as procs:
                probes = await procs.spawn("probes", Probe)
                outside = attempt(nursery, probes.hold_many.call)
                await probes.wait.call("hold")
                monkeypatch.setattr(OutgoingCall, "terminal", break_down)
                await probes.rank.broadcast()
                with trio.CancelScope(shield=True):
                    await probes.rank.call()
        assert TrimeshInternalError in {type(leaf) for leaf in trimesh.leaves(caught.value)}
        causes = {
            type(cause) for leaf in trimesh.leaves(caught.value) for cause in trimesh.leaves(leaf.__cause__ or leaf)
        }
        assert LookupError in causes
        with pytest.raises(MeshErrorGroup) as away:
            await outside.result()
        assert {type(leaf) for leaf in trimesh.leaves(away.value)} == {TrimeshInternalError}


async def _break_down() -> None:
    raise LookupError("a bug")


@only_real
async def test_bug_in_a_task_of_the_runtime_is_raised_and_logged(
    backend: RealBackend, caplog: pytest.LogCaptureFixture
):
    """API 4: at once, with its traceback, and no task waits for what cannot come."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs({"gpus": 1}, grace=0.5) as procs:
            probes = await procs.spawn("probes", Probe)
            current_proc().nursery.start_soon(_break_down)
            await probes.hold_many.call()
    assert LookupError in {type(leaf.__cause__) for leaf in trimesh.leaves(caught.value)}
    (record,) = [record for record in caplog.records if record.levelname == "CRITICAL"]
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], LookupError)
