"""The listing of the public API's description, as it stands there."""

from __future__ import annotations

import pytest

import trimesh
from trimesh import Actor, endpoint

# fmt: off
# ruff: noqa: E501 - the listing's own line lengths


class Worker(Actor):
    @endpoint
    async def step(self, number: int) -> int:
        return number


@pytest.mark.slow
@trimesh.testing.simulate(seeds=200, per_host={"gpus": 4})
async def test_one_rank_out_of_memory(mesh, faults):
    async with mesh.spawn("w", Worker) as w:
        faults.at(w.step, point={"gpus": 2}, nth=3).raises(MemoryError("injected"))
        with pytest.RaisesGroup(MemoryError) as caught:
            for i in range(5):
                await w.step.call(i)
        assert trimesh.coords(caught.value) == [{"gpus": 2}]        # a Point equals the plain mapping of its coordinates
