"""Items of one endpoint that yields integers, until its caller has taken the last, one by one."""

from __future__ import annotations

from bench.meshes.mesh import Library
from bench.scale import Metric, Samples, Scale, timed_rates

METRICS = [Metric("stream", "items of one stream", "k/s", goals=(100,), is_rate=True)]


async def any_side(library: Library, scale: Scale) -> Samples:
    async with library.open_mesh(1) as mesh:
        return {"stream": await timed_rates(scale, mesh.stream, scale.stream_items)}
