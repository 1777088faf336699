"""A payload to an actor and back, as `bytes` and as an array of numpy; results of 1 GiB, too, for trimesh.

A result of 1 GiB fills new memory each time, an echo of 64 MiB memory that was used before: the ratio says what each
byte costs more.
"""

from __future__ import annotations

import statistics
from typing import Any

from bench.meshes.mesh import Library
from bench.scale import Metric, Samples, Scale, timed_calls

SIZES = {"1 KiB": 1 << 10, "64 KiB": 1 << 16, "1 MiB": 1 << 20, "64 MiB": 1 << 26}
GOALS = {
    "bytes": {"1 KiB": 0.1, "64 KiB": 0.12, "1 MiB": 0.4, "64 MiB": 30},
    "array": {"64 MiB": 16},
}

RESULT_GOAL = 2.0

METRICS = [
    *(
        Metric(f"{kind}_{nbytes}", f"echo of {size} as {kind}", "ms", goals=(goals[size],) if size in goals else ())
        for kind, goals in GOALS.items()
        for size, nbytes in SIZES.items()
    ),
    *(
        Metric(
            f"{kind}_result",
            f"1 GiB as result by value, {kind}, per byte of the 64 MiB echo",
            "x",
            goals=(RESULT_GOAL,),
        )
        for kind in GOALS
    ),
]


def payload(kind: str, nbytes: int) -> Any:
    """Return a value of `GOALS` of so many bytes."""
    import numpy as np

    return b"\1" * nbytes if kind == "bytes" else np.ones(nbytes, dtype=np.uint8)


async def trimesh_side(scale: Scale) -> Samples:
    from bench.meshes import trimesh_mesh
    from bench.workloads.trimesh_actors import Holder
    from trimesh import this_host

    found = await any_side(trimesh_mesh, scale)
    nbytes, echoed = scale.link_mebibytes << 20, max(SIZES.values())
    async with this_host().spawn_procs({"procs": 1}) as procs:
        for kind in GOALS:
            async with procs.spawn(f"holder_{kind}", Holder, kind, nbytes) as holder:
                times = await timed_calls(scale, holder.give.call_one, share=max(1, scale.calls // scale.transfers))
            echo = statistics.median(found[f"{kind}_{echoed}"]) * 1e3 / echoed
            found[f"{kind}_result"] = [us / nbytes / echo for us in times]
    return found


async def any_side(library: Library, scale: Scale) -> Samples:
    found: Samples = {}
    async with library.open_mesh(1) as mesh:
        for nbytes in SIZES.values():
            share = max(4, min(nbytes >> 14, scale.calls // scale.transfers))
            for kind in GOALS:
                value = payload(kind, nbytes)
                answer = await mesh.one(value)
                if type(answer) is not type(value) or len(answer) != nbytes:
                    raise RuntimeError(f"{kind} of {nbytes} bytes came back as {type(answer)} of {len(answer)}")
                del answer
                times = await timed_calls(scale, lambda value=value: mesh.one(value), share=share)
                found[f"{kind}_{nbytes}"] = [us / 1e3 for us in times]
    return found
