"""Memory of members that die, stop and lag: every transfer ends, by right bytes or by an error of ours (N4)."""

from __future__ import annotations

import pytest
import trio
from tests.conformance.vault import Reader, Vault, pattern

import trimesh
from trimesh import MeshError, ProcDied, Restart
from trimesh.testing import simulate

SIZE = 1 << 18
"""A few of the chunks in which simulated processes move it."""

RESTART = Restart("one_for_one", intensity=1_000, period=60)


@pytest.mark.slow
@simulate(seeds=8, per_host={"gpus": 4}, supervision=RESTART, sometimes=("a death was seen", "all went well"))
async def test_memory_is_read_while_members_die(mesh, chaos):
    """N4, R08: old handles never give new bytes, whoever reads; after the faults every member is read again."""
    vaults = await mesh.spawn("vaults", Vault, SIZE)
    readers = await mesh.spawn("readers", Reader)
    plan = chaos.plan(kill=3, stop=1, lag=1, every=(0.5, 5))
    async with chaos.safety(plan, duration=60):
        for number in range(30):
            try:
                handles = list((await vaults.handle.call()).values())
                found = bytearray(SIZE)
                await handles[number % 4].read_into(found)
                assert found == pattern(SIZE)
                for got in (await readers.read.call(handles[(number + 1) % 4])).values():
                    assert got == pattern(SIZE)
                async with trimesh.rdma.batch() as batch:
                    for handle in handles:
                        batch.read(handle[:1000], into=bytearray(1000))
                chaos.sometimes("all went well")
            except* ProcDied:
                chaos.sometimes("a death was seen")
            except* (MeshError, trio.ClosedResourceError):
                pass
            await trio.sleep(2)
    async with chaos.liveness(within=30):
        while True:
            try:
                for handle in (await vaults.handle.call()).values():
                    found = bytearray(SIZE)
                    await handle.read_into(found)
                    assert found == pattern(SIZE)
                break
            except* MeshError:
                await trio.sleep(0.5)
