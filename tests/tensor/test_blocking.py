"""Tensors of plain scripts, which use them in an async function."""

from __future__ import annotations

from typing import Any, cast

import pytest

import trimesh
import trimesh.blocking as tb

torch = pytest.importorskip("torch", reason="torch is an extra")

pytestmark = [pytest.mark.real, pytest.mark.torch]


async def total(mesh: trimesh.ProcMesh, *, size: int) -> float:
    with mesh.activate():
        local = torch.ones(size)
    whole = trimesh.distribute(torch.ones(2 * size), mesh, ["gpus"])
    return float((await trimesh.fetch(local.sum())).item(gpus=1) + await trimesh.fetch(whole.sum()))


def test_function_gets_the_mesh_of_trimesh() -> None:
    """K06, N1: the blocking one has no tensors, and says what to write."""
    with tb.spawn_procs({"gpus": 2}, preload=("torch",)) as procs:
        untyped = cast("Any", procs)
        for refused in (lambda: trimesh.distribute(torch.ones(2), untyped, ["gpus"]), lambda: untyped.activate):
            with pytest.raises((TypeError, AttributeError), match=r"write trimesh\.blocking\.run\(function, procs\)"):
                refused()
        with pytest.raises(AttributeError, match="object has no attribute 'spam'"):
            _ = untyped.spam
        assert tb.run(total, untyped, size=2) == 6
