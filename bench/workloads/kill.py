"""SIGKILL to one of four processes: until the caller that waits for it has an exception, and until all is cleaned up.

For trimesh the second figure is the end of the owning block, which raises `ProcDied` when every other process has
gone; for Monarch it is the end of `ProcMesh.stop` after the exception.
"""

from __future__ import annotations

import os
import signal
import time

from bench.scale import Metric, Samples, Scale

METRICS = [
    Metric("waiter", "SIGKILL to the waiter's exception", "ms", quantiles=(0.5, 1.0), goals=(5, 50)),
    Metric("block", "SIGKILL to out of the block", "ms", quantiles=(0.5, 1.0), goals=(20, 200)),
]

SETTLE_SECONDS = 0.05
"""For the waiting call to arrive over there."""


async def trimesh_side(scale: Scale) -> Samples:
    found: Samples = {"waiter": [], "block": []}
    for _ in range(scale.kills):
        killed, raised, out = await kill_trimesh()
        found["waiter"].append((raised - killed) * 1e3)
        found["block"].append((out - killed) * 1e3)
    return found


async def kill_trimesh() -> tuple[float, float, float]:
    """Return when a process was killed, when its caller's call ended, and when the block was left."""
    import trio

    from bench.workloads.trimesh_actors import Sleeper
    from trimesh import ProcDied, this_host

    moments: dict[str, float] = {}
    try:
        async with this_host().spawn_procs({"gpus": 4}) as procs, trio.open_nursery() as nursery:
            sleepers = await procs.spawn("sleepers", Sleeper)
            victim = sleepers.slice(gpus=0)
            pid = await victim.pid.call_one()

            async def wait() -> None:
                try:
                    await victim.sleep.call_one()
                finally:
                    moments["raised"] = time.perf_counter()

            nursery.start_soon(wait)
            await trio.sleep(SETTLE_SECONDS)
            moments["killed"] = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
    except* ProcDied:
        moments["out"] = time.perf_counter()
    return moments["killed"], moments["raised"], moments["out"]


async def monarch_side(scale: Scale) -> Samples:
    import asyncio

    import monarch.actor

    from bench.workloads.monarch_actors import Sleeper

    monarch.actor.unhandled_fault_hook = lambda failure: None  # its default ends the program
    found: Samples = {"waiter": [], "block": []}
    for _ in range(scale.peer_kills):
        procs = monarch.actor.this_host().spawn_procs(per_host={"gpus": 4})
        victim = procs.spawn("sleepers", Sleeper).slice(gpus=0)
        pid = await victim.pid.call_one()
        waiter = asyncio.ensure_future(victim.sleep.call_one().as_asyncio())
        await asyncio.sleep(SETTLE_SECONDS)
        killed = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        await asyncio.wait([waiter])
        raised = time.perf_counter()
        if waiter.exception() is None:
            raise RuntimeError(f"the call to the killed process returned {waiter.result()!r}")
        await procs.stop()
        found["waiter"].append((raised - killed) * 1e3)
        found["block"].append((time.perf_counter() - killed) * 1e3)
    return found
