"""Round trip of `call_one` to an actor in another process, one call after the other."""

from __future__ import annotations

from bench.scale import Metric, Samples, Scale, timed_calls

METRICS = [Metric("call_one", "call_one round trip", "us", quantiles=(0.5, 0.99))]


async def trimesh_side(scale: Scale) -> Samples:
    from bench.workloads.trimesh_actors import Echo
    from trimesh import this_host

    async with this_host().spawn_procs({"gpus": 1}) as procs:
        echo = await procs.spawn("echo", Echo)
        return {"call_one": await timed_calls(scale, lambda: echo.echo.call_one(1))}


async def monarch_side(scale: Scale) -> Samples:
    from monarch.actor import this_host

    from bench.workloads.monarch_actors import Echo

    procs = this_host().spawn_procs(per_host={"gpus": 1})
    echo = procs.spawn("echo", Echo)
    found = await timed_calls(scale, lambda: echo.echo.call_one(1))
    await procs.stop()
    return {"call_one": found}
