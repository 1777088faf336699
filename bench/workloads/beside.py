"""Calls of 100 B while an argument of 1 GiB moves to the same process, on the same link.

They go to another actor, for the messages of one sender to one actor keep their order; Ray has one actor a process.
They are made one after the other, so a stall of the link or of either process is one slow call: look at the worst.
"""

from __future__ import annotations

import time

from bench.meshes.mesh import Library
from bench.scale import Metric, Samples, Scale

METRICS = [
    Metric("link", "100 B call while 1 GiB moves on its link", "ms", quantiles=(0.5, 0.99, 1.0), goals=(5, 5, 5)),
    Metric("moved", "those 1 GiB, meanwhile", "ms"),
]


async def any_side(library: Library, scale: Scale) -> Samples:
    found: Samples = {"link": [], "moved": []}
    large, small = b"\1" * (scale.link_mebibytes << 20), b"\1" * 100
    async with library.open_mesh(1) as mesh:
        call = await mesh.neighbour()

        async def move() -> None:
            start = time.perf_counter()
            if await mesh.size_one(large) != len(large):
                raise RuntimeError(f"{len(large)} bytes did not arrive whole")
            found["moved"].append((time.perf_counter() - start) * 1e3)

        async def look() -> None:
            start = time.perf_counter()
            await call(small)
            found["link"].append((time.perf_counter() - start) * 1e3)

        await look()
        found["link"].clear()
        for _ in range(max(1, scale.transfers // 10)):
            await library.while_running(move, look)
    return found
