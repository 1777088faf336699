"""The listing of bulk data of the public API's description (API 7), as it stands there; it needs torch."""

from __future__ import annotations

import pytest
from tests.conformance.meshes import Backend

import trimesh
from trimesh import Actor, endpoint

torch = pytest.importorskip("torch")
torch.zeros(1 << 20)  # torch starts its threads here, and not in a test that is asked what it has left

# fmt: off


class Trainer(Actor):
    def __init__(self):
        self.weights = torch.zeros(1 << 20)
        self.buffer = trimesh.RDMABuffer(self.weights)              # registers memory, copies nothing, is picklable

    @endpoint
    async def handle(self) -> trimesh.RDMABuffer:
        return self.buffer

    @endpoint
    async def first(self) -> float:
        return float(self.weights[0])


@pytest.mark.torch
async def test_listing_of_bulk_data(backend: Backend):
    """API 7: a read, a write, and both together."""
    async with backend.procs({"gpus": 2}) as procs:
        trainers = await procs.spawn("trainers", Trainer)
        handle, b = (await trainers.handle.call()).values()
        a, x, y, local = handle[:4096], torch.ones(1024), torch.zeros(1 << 20), torch.zeros(1 << 20)
        y[0], local[0] = 2, 1
        await handle.read_into(local)          # one-sided: the owner's Python takes no part
        assert local[0] == 0
        local[0] = 5
        await handle.write_from(local)
        async with trimesh.rdma.batch() as batch:
            batch.read(a, into=x); batch.write(b, source=y)                 # run together; overlaps refused when queued  # noqa: E702
        assert x[0] == 5
        assert (await trainers.first.call()).values() == (5.0, 2.0)
