"""The simulator over supervised meshes: restarts under chaos break no rule, and the same seed gives the same run."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import trio
from tests.testing.actors import Worker

import trimesh
from trimesh import Actor, ActorFailed, Backoff, Isolate, MeshError, ProcDied, Restart, endpoint, limits, this_host
from trimesh.testing import simulate
from trimesh.testing.simulated.seeded_run import SeededOptions, run_once


class Fragile(Actor):
    """Fails when it is told to."""

    def __init__(self) -> None:
        self.failing = trio.Event()

    @asynccontextmanager
    async def lifespan(self):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.fail)
            yield
            nursery.cancel_scope.cancel()

    async def fail(self) -> None:
        await self.failing.wait()
        raise KeyError("told to")

    @endpoint
    async def fail_soon(self) -> None:
        self.failing.set()

    @endpoint
    async def fail_now(self) -> None:
        raise KeyError("told to")

    @endpoint
    async def let_fail(self, target) -> None:
        await target.fail_now.broadcast()

    @endpoint
    async def incarnation(self) -> int:
        return trimesh.context().incarnation


RESTART = Restart("one_for_one", intensity=1_000, period=60)


@simulate(seeds=10, per_host={"gpus": 3}, supervision=RESTART, sometimes=("a death was seen", "all went well"))
async def test_pool_serves_while_members_die(mesh, chaos):
    """R07, R08, R09: every call ends; after the faults every member answers."""
    w = await mesh.spawn("w", Worker)
    plan = chaos.plan(kill=3, stop=1, lag=1, every=(0.5, 5))
    async with chaos.safety(plan, duration=60):
        for number in range(60):
            seen = False
            for outcome in (await w.slow.call_settled(0.3)).values():
                seen = seen or not outcome.ok
                assert outcome.ok or isinstance(outcome.error, MeshError), number
            chaos.sometimes("a death was seen", seen)
            chaos.sometimes("all went well", not seen)
    async with chaos.liveness(within=30):
        while True:
            try:
                assert len(await w.step.call(1)) == 3
                break
            except* MeshError:
                await trio.sleep(0.5)


@simulate(seeds=10, per_host={"gpus": 2}, supervision=RESTART)
async def test_restarted_member_gets_its_faults_by_coordinates(mesh, faults):
    """A fault is for a place, so it meets whoever lives there."""
    w = await mesh.spawn("w", Worker)
    faults.kill({"gpus": 1})
    with pytest.raises((MeshError, ExceptionGroup)):
        await w.slow.call(1)
    faults.at(w.step, {"gpus": 1}).raises(KeyError("for the second incarnation"))

    with pytest.RaisesGroup(KeyError) as caught:
        await w.step.call()

    (error,) = trimesh.leaves(caught.value)
    assert trimesh.origin(error).incarnation == 1


@simulate(seeds=10, per_host={"gpus": 2}, supervision=RESTART)
async def test_actor_is_remade_after_its_process_died_while_it_was_being_remade(mesh, faults):
    """P1: the restart of the process takes the actor's own one over, and the next failure of the actor is healed."""
    remake = Restart("one_for_one", intensity=1_000, backoff=Backoff(0.5, cap=0.5), on=(ActorFailed,))
    w = await mesh.supervised(remake).spawn("w", Fragile)
    member = w.slice(gpus=1)

    await member.fail_soon.call_one()
    await trio.sleep(0.25)
    go_on = faults.kill({"gpus": 1}, how="sigstop")  # what makes the actor anew waits there until the lease has run out
    await trio.sleep(limits.LEASE_SECONDS + 0.01)
    go_on()
    assert await member.incarnation.call_one() == 1
    await member.fail_soon.call_one()
    await trio.sleep(0.1)

    with trio.fail_after(10):
        assert await member.incarnation.call_one() == 2


@simulate(seeds=15, per_host={"gpus": 1}, supervision=Isolate())
async def test_member_that_is_given_up_while_it_starts_does_not_live(mesh):
    """P1: the message that waited for the new actor makes it fail before its owner knows that it has started."""
    once = Restart("one_for_one", intensity=1, backoff=Backoff(2.0), on=(ActorFailed,))
    w = await mesh.supervised(once).spawn("w", Fragile)
    other = await mesh.spawn("other", Fragile)
    await w.fail_now.broadcast()
    await trio.sleep(1)
    await other.let_fail.call_one(w)
    await trio.sleep(10)

    assert len(w.alive()) == 0
    assert len(other.alive()) == 1


class Slow(Actor):
    """Takes too long to clean up."""

    @asynccontextmanager
    async def lifespan(self):
        try:
            yield
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(30)


@pytest.mark.parametrize("policy", [RESTART, Isolate()])
@simulate(seeds=10)
async def test_process_that_an_actor_costs_its_mesh_is_healed(policy):
    """P1, Z13: the block of the actors tells of the kill, the mesh of the processes goes on by its policy."""
    async with this_host().spawn_procs({"gpus": 2}, supervision=policy, grace=1.0) as procs:
        w = await procs.spawn("w", Fragile)
        with pytest.RaisesGroup(ProcDied) as caught:
            async with procs.slice(gpus=1).spawn("slow", Slow):
                pass
        assert trimesh.coords(caught.value) == [{"gpus": 1}]

        if isinstance(policy, Restart):
            with trio.fail_after(10):
                assert list((await w.incarnation.call()).values()) == [0, 1]
        else:
            assert list((await w.alive().incarnation.call()).values()) == [0]
            await procs.replace([{"gpus": 1}])
            assert list((await w.incarnation.call()).values()) == [0, 1]


async def restarting_body(mesh, chaos):
    w = await mesh.spawn("w", Worker)
    async with chaos.safety(chaos.plan(kill=1, every=(0.5, 2)), duration=20):
        while True:
            await w.slow.call_settled(0.3)


def test_restarts_are_bit_exact():
    options = SeededOptions({"gpus": 3}, {"supervision": RESTART})
    outcomes = [run_once(restarting_body, {"mesh": None, "chaos": None}, options, 11) for _ in range(2)]

    assert [outcome.error for outcome in outcomes] == [None, None]
    assert outcomes[0].simulation.trace.text == outcomes[1].simulation.trace.text
    assert len(outcomes[0].simulation.trace.at("exit")) > 5
