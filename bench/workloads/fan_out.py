"""One argument of 64 MiB to eight ranks: until each has answered its length.

A tensor of torch where the library's environment has torch (trimesh, Monarch), an array of numpy elsewhere: torch would
only be pickled there.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from bench.meshes.mesh import Library, Mesh
from bench.scale import Metric, Samples, Scale, timed_calls

NBYTES = 64 << 20
RANKS = 8

METRICS = [Metric("fan_out_argument", "64 MiB tensor argument to 8 ranks", "ms", goals=(20,))]


async def any_side(library: Library, scale: Scale) -> Samples:
    async with library.open_mesh(RANKS) as mesh:
        return await measure(mesh, scale)


async def trimesh_side(scale: Scale) -> Samples:
    from bench.meshes import trimesh_mesh

    async with trimesh_mesh.open_mesh(RANKS, preload=("torch",)) as mesh:  # one import, not eight
        return await measure(mesh, scale)


async def measure(mesh: Mesh, scale: Scale) -> Samples:
    value = make_value()
    times = await timed_calls(scale, lambda: mesh.size_all(value), share=max(1, scale.calls // scale.transfers))
    return {"fan_out_argument": [us / 1e3 for us in times]}


def make_value() -> Any:
    if importlib.util.find_spec("torch") is None:
        import numpy as np

        return np.ones(NBYTES, dtype=np.uint8)
    import torch

    return torch.ones(NBYTES, dtype=torch.uint8)
