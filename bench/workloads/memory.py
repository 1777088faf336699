"""Private memory of a worker that has answered one call: pages that no other process has mapped (USS)."""

from __future__ import annotations

from bench.meshes.mesh import Library
from bench.processes import private_bytes
from bench.scale import Metric, Samples, Scale

RANKS = 4

METRICS = [
    Metric("private", "private memory a worker", "MiB", goals=(10,)),
    Metric("private_preload", "the same, torch preloaded and shared", "MiB"),
]


async def any_side(library: Library, scale: Scale) -> Samples:
    del scale
    async with library.open_mesh(RANKS) as mesh:
        await mesh.all(1)
        return {"private": [private_bytes(pid) / 2**20 for pid in mesh.pids]}


async def trimesh_side(scale: Scale) -> Samples:
    from bench.meshes import trimesh_mesh

    found = await any_side(trimesh_mesh, scale)
    async with trimesh_mesh.open_mesh(RANKS, preload=("torch",)) as mesh:
        await mesh.all(1)
        found["private_preload"] = [private_bytes(pid) / 2**20 for pid in mesh.pids]
    return found
