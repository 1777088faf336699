"""SIGKILL to one of four supervised processes: until its replacement answers a call, with its actor.

trimesh restarts without a backoff. Ray restarts the actor (`max_restarts`) and sends the call to it again
(`max_task_retries`). xoscar's pool looks twice a second whether a process has ended, then starts it and its actors
again; the call is tried until it succeeds.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from bench.scale import Metric, Samples, Scale

METRICS = [
    Metric("restart", "SIGKILL to the restarted member answering", "ms", quantiles=(0.5, 1.0), goals=(60, 600)),
]

LACKS = {"monarch": "it restarts nothing: who owns a mesh hears of a failure, and spawns another mesh"}

RETRY_SECONDS = 1e-3
"""Between two calls to a process that is not there."""


async def trimesh_side(scale: Scale) -> Samples:
    from bench.workloads.trimesh_actors import Sleeper
    from trimesh import Backoff, ProcDied, Restart, this_host

    async def ask(victim: Any) -> int:
        while True:
            try:
                return await victim.pid.call_one()
            except ProcDied:  # it left before the death was known, and was in flight to the dead one
                continue

    policy = Restart(intensity=scale.kills, backoff=Backoff(0))
    async with this_host().spawn_procs({"gpus": 4}, supervision=policy) as procs:
        sleepers = await procs.spawn("sleepers", Sleeper)
        return await time_restarts(ask, [sleepers.slice(gpus=rank) for rank in range(4)], scale)


async def ray_side(scale: Scale) -> Samples:
    import asyncio

    import ray

    from bench.meshes import ray_mesh

    async def ask(victim: Any) -> int:
        return await victim.pid.remote()

    async with ray_mesh.open_host():
        actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(ray_mesh.Restartable)
        members = [actor.remote() for _ in range(4)]
        await asyncio.gather(*map(ask, members))
        return await time_restarts(ask, members, scale)


async def xoscar_side(scale: Scale) -> Samples:
    import asyncio

    from xoscar.errors import ActorNotExist, ServerClosed

    from bench.meshes import xoscar_mesh

    async def ask(victim: Any) -> int:
        while True:
            try:
                return await victim.pid()
            except (ServerClosed, ActorNotExist, OSError):
                await asyncio.sleep(RETRY_SECONDS)

    async with xoscar_mesh.open_mesh(4, auto_recover="actor") as mesh:
        return await time_restarts(ask, mesh.members, scale)


async def time_restarts(ask: Callable[[Any], Awaitable[int]], members: Sequence[Any], scale: Scale) -> Samples:
    """Kill the process of one member after the other; take the milliseconds until another process answers for it.

    Args:
        ask: Calls a member, again where that is left to the caller; returns the pid of the process that has answered.
        members: Handles, which outlive the processes.
        scale: Says how many are killed.
    """
    found: Samples = {"restart": []}
    for kill in range(scale.kills):
        victim = members[kill % len(members)]
        pid = await ask(victim)
        start = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        answer = await ask(victim)
        found["restart"].append((time.perf_counter() - start) * 1e3)
        if answer == pid:
            raise RuntimeError(f"process {pid} was killed and answered")
    return found
