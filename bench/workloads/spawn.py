"""From nothing to the first answer of all of some new processes; and the way back.

Cold is the first mesh of a program: it pays for the runtime (Ray's cluster, Monarch's runtime, trimesh's native library
and spawner). It counts for every library from just before the first call of it, in a new program that has imported it.
An import may do a part of that already: trimesh's starts nothing, Monarch's the threads of its runtime. So the same
start is counted from the exec of the program, too: interpreter, imports, runtime, processes, first answer.

Warm is a later mesh of a program that keeps the runtime: for trimesh inside `this_host().warm()`, for Ray in one
cluster.
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
        Metric(f"program_{size}", "the same, from the start of the program", "ms"),
        Metric(f"warm_{size}", f"spawn {size} + first call, warm", "ms", goals=GOALS[size][1:]),
        Metric(f"stop_{size}", f"stop {size}", "ms"),
    )
]


async def any_side(library: Library, scale: Scale) -> Samples:
    found: Samples = {}
    for size in scale.spawn_sizes:
        starts = [cold_start(library, size) for _ in range(scale.spawns)]
        found[f"cold_{size}"], found[f"program_{size}"] = map(list, zip(*starts, strict=True))
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


async def spawn_first(library: Library, ranks: int, begun: float) -> tuple[float, float]:
    """Return the milliseconds to the first answer from here, and from when the program was started."""
    before = (time.perf_counter() - begun) * 1e3
    answered, _ = await spawn(library, ranks)
    return answered, before + answered


def cold_start(library: Library, ranks: int) -> tuple[float, float]:
    """Return what `spawn_first` does, in a new program; its clock is the machine's."""
    name = library.__name__
    program = (
        f"import json; from bench.workloads.spawn import spawn_first; import {name} as library; "
        f"print(json.dumps(library.run(spawn_first, library, {ranks}, {time.perf_counter()})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=True
    )
    return tuple(json.loads(done.stdout.splitlines()[-1]))
