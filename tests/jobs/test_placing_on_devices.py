"""Places on the GPUs of this machine, by the NVML of its driver."""

from __future__ import annotations

import pytest
import trio
from tests.devices import HAS_CUDA
from tests.patience import HANG_SECONDS

import trimesh
from trimesh import Actor, Need, SpawnError, endpoint, this_host

pytestmark = [pytest.mark.real, pytest.mark.cuda, pytest.mark.skipif(not HAS_CUDA, reason="torch finds no CUDA device")]


class Worker(Actor):
    """Sees by torch what it has."""

    @endpoint
    async def see(self) -> tuple[list[str], list[str]]:
        """Return the UUIDs of the devices of CUDA, and those of its share."""
        import torch

        count = torch.cuda.device_count()
        uuids = [f"GPU-{torch.cuda.get_device_properties(one).uuid}" for one in range(count)]
        share = trimesh.context().share
        return uuids, [] if share is None else list(share.gpus)


async def test_placed_processes_see_their_gpus() -> None:
    """H28: NVML and CUDA mean the same devices."""
    with trio.fail_after(HANG_SECONDS):
        [found] = await this_host().resources()
        assert found.no_gpus == ""
        needs = {"half": Need(gpus=0.5, count=2), "none": Need()}
        async with this_host().place(needs) as placement:
            async with (
                this_host().spawn_procs(on=placement["half"]) as procs,
                procs.spawn("workers", Worker) as workers,
            ):
                both = list(await workers.see.call())
                assert [seen for seen, _ in both] == [own for _, own in both]
                assert {len(own) for _, own in both} == {1}
            async with (
                this_host().spawn_procs(on=placement["none"]) as procs,
                procs.spawn("workers", Worker) as workers,
            ):
                assert await workers.see.call_one() == ([], [])
            with pytest.raises(SpawnError, match="taken by 'half'"):
                async with this_host().place({"all": Need(gpus=1, count=len(found.gpus))}):
                    pass
