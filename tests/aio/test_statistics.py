"""What is known of meshes, asked from asyncio (K04)."""

from __future__ import annotations

import pytest
from tests.conformance.probe import Probe

import trimesh

pytestmark = pytest.mark.real


def test_statistics_are_seen_from_asyncio(run):
    """K02, K04: a sync look at the runtime, wherever Trio is."""

    async def main():
        async with trimesh.aio.spawn_procs({"gpus": 2}) as procs:
            probes = await procs.spawn("probes", Probe)
            await probes.rank.call()
            assert len(procs.statistics().members) == 2
            assert len(probes.statistics().members) == 2

    run(main)
