"""Cancelling a call whose endpoint has begun: from the cancel to the end of the call here.

A library may end the call before the endpoint has unwound over there; trimesh and Ray wait for it.
"""

from __future__ import annotations

from bench.meshes.mesh import Library
from bench.scale import Metric, Samples, Scale

METRICS = [Metric("cancel", "cancel round trip", "us", quantiles=(0.5, 0.99), goals=(300,))]

LACKS = {"monarch": "no cancellation crosses a call"}


async def any_side(library: Library, scale: Scale) -> Samples:
    async with library.open_mesh(1) as mesh:
        for _ in range(scale.warm_up // 10 + 1):
            await mesh.cancel()
        return {"cancel": [await mesh.cancel() * 1e6 for _ in range(scale.calls // 10)]}
