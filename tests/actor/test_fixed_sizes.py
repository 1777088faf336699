"""Meshes whose size is fixed: `resize` says why (rule P6)."""

from __future__ import annotations

from typing import Any

import pytest

import trimesh
from trimesh import Isolate, this_host
from trimesh.testing import simulate


@simulate(seeds=2, hosts=2, per_host={"gpus": 1}, supervision=Isolate())
async def test_mesh_over_hosts_is_not_resized(mesh: Any) -> None:
    for sizes in ({"hosts": 3}, {"hosts": 1}):
        with pytest.raises(RuntimeError, match="those of its hosts"):
            await mesh.resize(**sizes)
    assert len(await trimesh.current_view(mesh)) == 2


@pytest.mark.real
async def test_mesh_that_is_bound_to_cores_is_not_resized() -> None:
    async with this_host().spawn_procs({"gpus": 1}, bind="cores", supervision=Isolate()) as procs:
        with pytest.raises(RuntimeError, match="bound to cores"):
            await procs.resize(gpus=2)
