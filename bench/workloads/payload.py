"""A payload to an actor and back, as `bytes` and as an array of numpy."""

from __future__ import annotations

from bench.meshes.mesh import Library
from bench.scale import Metric, Samples, Scale, timed_calls

SIZES = {"1 KiB": 1 << 10, "64 KiB": 1 << 16, "1 MiB": 1 << 20, "64 MiB": 1 << 26}
GOALS = {
    "bytes": {"1 KiB": 0.1, "64 KiB": 0.12, "1 MiB": 0.4, "64 MiB": 30},
    "array": {"64 MiB": 16},
}

METRICS = [
    Metric(f"{kind}_{nbytes}", f"echo of {size} as {kind}", "ms", goals=(goals[size],) if size in goals else ())
    for kind, goals in GOALS.items()
    for size, nbytes in SIZES.items()
]


async def any_side(library: Library, scale: Scale) -> Samples:
    import numpy as np

    found: Samples = {}
    async with library.open_mesh(1) as mesh:
        for nbytes in SIZES.values():
            share = max(4, min(nbytes >> 14, scale.calls // scale.transfers))
            for kind, value in (("bytes", b"\1" * nbytes), ("array", np.ones(nbytes, dtype=np.uint8))):
                answer = await mesh.one(value)
                if type(answer) is not type(value) or len(answer) != nbytes:
                    raise RuntimeError(f"{kind} of {nbytes} bytes came back as {type(answer)} of {len(answer)}")
                del answer
                times = await timed_calls(scale, lambda value=value: mesh.one(value), share=share)
                found[f"{kind}_{nbytes}"] = [us / 1e3 for us in times]
    return found
