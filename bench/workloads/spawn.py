"""From nothing to the first answer of all of some new processes; and the way back.

Cold is the first mesh of a program: it pays for the runtime (Ray's cluster, Monarch's runtime, trimesh's native library
and spawner). The program has imported the library before. Warm is a later mesh of a program that keeps the runtime: for
trimesh inside `this_host().warm()`, for Ray in one cluster.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

from bench.meshes.mesh import Library
from bench.scale import FULL, Metric, Samples, Scale

GOALS = {1: (250, 60), 8: (350, 150), 32: (700, 500)}

METRICS = [
    metric
    for size in FULL.spawn_sizes
    for metric in (
        Metric(f"cold_{size}", f"spawn {size} + first call, cold", "ms", goals=GOALS[size][:1]),
        Metric(f"warm_{size}", f"spawn {size} + first call, warm", "ms", goals=GOALS[size][1:]),
        Metric(f"stop_{size}", f"stop {size}", "ms"),
    )
]


async def any_side(library: Library, scale: Scale) -> Samples:
    found: Samples = {}
    for size in scale.spawn_sizes:
        found[f"cold_{size}"] = [cold_start(library, size) for _ in range(scale.spawns)]
    async with library.open_host() as host:
        await spawn(library, 1, host)
        for size in scale.spawn_sizes:
            times = [await spawn(library, size, host) for _ in range(scale.spawns)]
            found[f"warm_{size}"], found[f"stop_{size}"] = map(list, zip(*times, strict=True))
    return found


async def spawn(library: Library, ranks: int, host: object = None) -> tuple[float, float]:
    """Return the milliseconds to the first answer, and those of the way back."""
    start = time.perf_counter()
    async with library.open_mesh(ranks, host) as mesh:
        await mesh.all(1)
        answered = time.perf_counter()
    return (answered - start) * 1e3, (time.perf_counter() - answered) * 1e3


def cold_start(library: Library, ranks: int) -> float:
    """Return the milliseconds to the first answer in a new program."""
    name = library.__name__
    program = (
        f"import json; from bench.workloads.spawn import spawn; import {name} as library; "
        f"print(json.dumps(library.run(spawn, library, {ranks})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])[0]
