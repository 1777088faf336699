"""SIGKILL to one of four supervised processes: until its follower answers a call, with its actor.

The policy restarts without a backoff.
"""

from __future__ import annotations

import os
import signal
import time

from bench.scale import Metric, Samples, Scale

METRICS = [
    Metric("restart", "SIGKILL to the restarted member answering", "ms", quantiles=(0.5, 1.0), goals=(60, 600)),
]

LACKS = {"monarch": "it has no restarts", "ray": "no side is written", "xoscar": "no side is written"}


async def trimesh_side(scale: Scale) -> Samples:
    from bench.workloads.trimesh_actors import Sleeper
    from trimesh import Backoff, ProcDied, Restart, this_host

    found: Samples = {"restart": []}
    policy = Restart(intensity=scale.kills, backoff=Backoff(0))
    async with this_host().spawn_procs({"gpus": 4}, supervision=policy) as procs:
        sleepers = await procs.spawn("sleepers", Sleeper)
        for kill in range(scale.kills):
            victim = sleepers.slice(gpus=kill % 4)
            pid = await victim.pid.call_one()
            start = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
            while True:
                try:
                    answer = await victim.pid.call_one()
                except ProcDied:  # it left before the death was known, and was in flight to the dead one
                    continue
                break
            found["restart"].append((time.perf_counter() - start) * 1e3)
            if answer == pid:
                raise RuntimeError(f"process {pid} was killed and answered")
    return found
