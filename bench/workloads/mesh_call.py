"""`call` over 8 and over 16 ranks: from the call to the last rank's answer."""

from __future__ import annotations

from bench.meshes.mesh import Library
from bench.scale import Metric, Samples, Scale, timed_calls

METRICS = [
    Metric("call_8", "call over 8 ranks", "us", quantiles=(0.5, 0.99), goals=(450,)),
    Metric("call_16", "call over 16 ranks", "us", quantiles=(0.5, 0.99), goals=(900,)),
]


async def any_side(library: Library, scale: Scale) -> Samples:
    found: Samples = {}
    async with library.open_host() as host:
        for ranks in (8, 16):
            async with library.open_mesh(ranks, host) as mesh:
                found[f"call_{ranks}"] = await timed_calls(scale, lambda mesh=mesh: mesh.all(1), share=ranks // 2)
    return found
