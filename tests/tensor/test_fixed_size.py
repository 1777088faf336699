"""A mesh with tensors has a fixed size."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is an extra")

import trimesh  # noqa: E402 - after the skip
from trimesh import Isolate, this_host  # noqa: E402

pytestmark = [pytest.mark.real, pytest.mark.torch]


async def test_mesh_with_tensors_is_not_resized() -> None:
    """Before there are any it is, and tensors lie on all that are there then."""
    async with this_host().spawn_procs({"gpus": 1}, supervision=Isolate()) as procs:
        grown = await procs.resize(gpus=2)
        with grown.activate():
            ones = torch.ones(2)
        total = ones.reduce("gpus", "sum")
        assert (await trimesh.fetch_shard(total, gpus=1)).tolist() == [2.0, 2.0]
        with pytest.raises(RuntimeError, match="its processes hold tensors"):
            await procs.resize(gpus=1)
