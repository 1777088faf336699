"""`call` over eight ranks: from the call to the last rank's answer."""

from __future__ import annotations

from bench.scale import Metric, Samples, Scale, timed_calls

METRICS = [Metric("call", "call over 8 ranks", "us", quantiles=(0.5, 0.99))]


async def trimesh_side(scale: Scale) -> Samples:
    from bench.workloads.trimesh_actors import Echo
    from trimesh import this_host

    async with this_host().spawn_procs({"gpus": 8}) as procs:
        echo = await procs.spawn("echo", Echo)
        return {"call": await timed_calls(scale, lambda: echo.echo.call(1), share=4)}


async def monarch_side(scale: Scale) -> Samples:
    from monarch.actor import this_host

    from bench.workloads.monarch_actors import Echo

    procs = this_host().spawn_procs(per_host={"gpus": 8})
    echo = procs.spawn("echo", Echo)
    found = await timed_calls(scale, lambda: echo.echo.call(1), share=4)
    await procs.stop()
    return {"call": found}
