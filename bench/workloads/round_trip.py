"""Round trip of `call_one` to an actor in another process, one call after the other.

On all cores, then with every thread of this program and of all that it has started on one core.
"""

from __future__ import annotations

import os

from bench.cores import on_one_core
from bench.meshes.mesh import Library
from bench.processes import descendants
from bench.scale import Metric, Samples, Scale, timed_calls

METRICS = [
    Metric("call_one", "call_one round trip", "us", quantiles=(0.5, 0.99), goals=(50,)),
    Metric("call_one_pinned", "call_one round trip, all on one core", "us", quantiles=(0.5, 0.99), goals=(80,)),
]


async def any_side(library: Library, scale: Scale) -> Samples:
    async with library.open_mesh(1) as mesh:
        found = {"call_one": await timed_calls(scale, lambda: mesh.one(1))}
        with on_one_core(os.getpid(), *descendants(os.getpid())):
            found["call_one_pinned"] = await timed_calls(scale, lambda: mesh.one(1))
    return found
