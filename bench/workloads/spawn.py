"""From nothing to the first answer of all of eight new processes; and the way back.

The first mesh of a program pays for what later ones find ready (Monarch's runtime, trimesh's native library).
"""

from __future__ import annotations

import time

from bench.scale import Metric, Samples, Scale

METRICS = [
    Metric("first", "spawn 8, first mesh of a program", "ms"),
    Metric("again", "spawn 8, later meshes", "ms"),
    Metric("stop", "stop 8", "ms"),
]


def sorted_by_turn(starts: list[float], stops: list[float]) -> Samples:
    """Split what was measured into the first mesh and the later ones."""
    return {"first": starts[:1], "again": starts[1:], "stop": stops}


async def trimesh_side(scale: Scale) -> Samples:
    from bench.workloads.trimesh_actors import Echo
    from trimesh import this_host

    starts, stops = [], []
    for _ in range(1 + scale.spawns):
        start = time.perf_counter()
        async with this_host().spawn_procs({"gpus": 8}) as procs:
            echo = await procs.spawn("echo", Echo)
            await echo.echo.call(1)
            answered = time.perf_counter()
        starts.append((answered - start) * 1e3)
        stops.append((time.perf_counter() - answered) * 1e3)
    return sorted_by_turn(starts, stops)


async def monarch_side(scale: Scale) -> Samples:
    from monarch.actor import this_host

    from bench.workloads.monarch_actors import Echo

    starts, stops = [], []
    for _ in range(1 + scale.spawns):
        start = time.perf_counter()
        procs = this_host().spawn_procs(per_host={"gpus": 8})
        echo = procs.spawn("echo", Echo)
        await echo.echo.call(1)
        answered = time.perf_counter()
        await procs.stop()
        starts.append((answered - start) * 1e3)
        stops.append((time.perf_counter() - answered) * 1e3)
    return sorted_by_turn(starts, stops)
