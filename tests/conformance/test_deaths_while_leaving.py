"""Deaths that come as a block is being left: what a policy would have healed, or lives without, fails nothing."""

from __future__ import annotations

import random

import pytest
import trio
from tests.conformance.meshes import Backend, SimBackend, kinds, only_sim
from tests.conformance.probe import Probe

from trimesh import ActorFailed, Backoff, Isolate, MeshErrorGroup, ProcDied, Restart, leaves

POLICIES = {
    "isolate": Isolate(),
    "restart": Restart(intensity=1_000, backoff=Backoff(0.01, cap=0.2)),
    "restart at once": Restart("one_for_all", intensity=1_000, backoff=Backoff(0)),
    "of actors, too": Restart(on=(ProcDied, ActorFailed), intensity=1_000, backoff=Backoff(0.01)),
}


@only_sim
@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.seeds(50)
async def test_death_just_before_the_block_is_left_is_healed_or_let_be(backend: SimBackend, seed: int, policy: str):
    """P1, P3, R08: however far its detection, or its restart, has come."""
    chance = random.Random(f"{policy} {seed}")
    backend.lag.control = chance.choice([0.0, 0.001])
    async with backend.procs({"gpus": 3}, supervision=POLICIES[policy]) as procs:
        probes = await procs.spawn("probes", Probe)
        await probes.rank.call()
        backend.kill(procs, chance.randrange(3))
        await trio.sleep(chance.choice([0.0, 0.0003, 0.001, 0.002, 0.01, 0.02, 0.05]))


@pytest.mark.parametrize("policy", ["isolate", "restart"])
async def test_death_as_the_block_is_left_fails_nothing(backend: Backend, policy: str):
    """P1, P3."""
    for _ in range(3):
        async with backend.procs(supervision=POLICIES[policy]) as procs:
            probes = await procs.spawn("probes", Probe)
            await probes.rank.call()
            backend.kill(procs, 1)


async def test_kill_is_a_death_that_the_policy_treats(backend: Backend):
    """P1: known when `kill` returns; a member that has ended is left as it is."""
    async with backend.procs(supervision=Isolate()) as procs:
        probes = await procs.spawn("probes", Probe)
        for _ in range(2):
            await procs.kill([{"gpus": 1}])
            assert len(procs.alive()) == 1
        with pytest.raises(ProcDied) as dead:
            await probes.slice(gpus=1).rank.call_one()
        assert (dead.value.by, dead.value.signal) == ("kill", 9)
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs() as procs:
            await procs.kill([{"gpus": 0}])
            await trio.sleep_forever()
    assert [leaf.by for leaf in leaves(caught.value) if isinstance(leaf, ProcDied)] == ["kill"]


async def test_death_as_the_block_is_left_is_raised_where_deaths_fail_it(backend: Backend):
    """P1: a true failure of a block without a policy that lives with it."""
    with pytest.raises(MeshErrorGroup) as caught:
        async with backend.procs() as procs:
            probes = await procs.spawn("probes", Probe)
            await probes.rank.call()
            backend.kill(procs, 1)
            await probes.hold.broadcast()
            with trio.CancelScope(shield=True):
                await trio.sleep(0.5)
    assert set(kinds(caught.value)) == {ProcDied}
