"""SIGKILL to one of four processes: until the caller that waits for it has an exception, and until all is cleaned up.

For trimesh the second figure is the end of the owning block, which raises `ProcDied` when every other process has
gone; for the others it is the end of stopping the rest after the exception: `ProcMesh.stop` of Monarch, `ray.kill` and
the end of the cluster, `stop` of xoscar's pool. Once idle, once beside four processes that only compute.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from bench.processes import busy_loops
from bench.scale import Metric, Samples, Scale

METRICS = [
    Metric("waiter", "SIGKILL to the waiter's exception", "ms", quantiles=(0.5, 0.99), goals=(5, 50)),
    Metric("block", "SIGKILL to out of the block", "ms", quantiles=(0.5, 0.99), goals=(20, 200)),
    Metric("waiter_busy", "the exception, beside 4 busy loops", "ms", quantiles=(0.5, 0.99), goals=(5, 50)),
    Metric("block_busy", "out of the block, beside 4 busy loops", "ms", quantiles=(0.5, 0.99), goals=(20, 200)),
]

SETTLE_SECONDS = 0.05
"""For the waiting call to arrive over there."""

BUSY_LOOPS = 4


async def trimesh_side(scale: Scale) -> Samples:
    found: Samples = {metric.name: [] for metric in METRICS}
    for busy in (0, BUSY_LOOPS):
        with busy_loops(busy):
            for _ in range(scale.kills):
                add(found, busy, *await kill_trimesh())
    return found


def add(found: Samples, busy: int, killed: float, raised: float, out: float) -> None:
    """Add the samples of one kill."""
    suffix = "_busy" if busy else ""
    found["waiter" + suffix].append((raised - killed) * 1e3)
    found["block" + suffix].append((out - killed) * 1e3)


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


async def any_side(library: Any, scale: Scale) -> Samples:
    """For the peers: all of them run in asyncio."""
    found: Samples = {metric.name: [] for metric in METRICS}
    for busy in (0, BUSY_LOOPS):
        with busy_loops(busy):
            for _ in range(scale.kills):
                add(found, busy, *await kill_peer(library))
    return found


async def kill_peer(library: Any) -> tuple[float, float, float]:
    import asyncio

    async with library.open_mesh(4) as mesh:
        waiter = asyncio.ensure_future(mesh.wait())
        await asyncio.sleep(SETTLE_SECONDS)
        killed = time.perf_counter()
        os.kill(mesh.pids[0], signal.SIGKILL)
        await asyncio.wait([waiter])
        raised = time.perf_counter()
        if waiter.exception() is None:
            raise RuntimeError(f"the call to the killed process returned {waiter.result()!r}")
    return killed, raised, time.perf_counter()
