"""SIGKILL to a controller that has four processes: until every process that it has started, at any depth, is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from bench.meshes.mesh import Library
from bench.processes import descendants, wait_for_ends
from bench.scale import Metric, Samples, Scale

METRICS = [
    Metric("gone", "SIGKILL of the controller to all are gone", "ms", quantiles=(0.5, 1.0), goals=(1000, 1000)),
]


async def any_side(library: Library, scale: Scale) -> Samples:
    return {"gone": [lose_controller(library.__name__) for _ in range(scale.kills)]}


def lose_controller(name: str) -> float:
    """Return the milliseconds from the SIGKILL of a new controller to the end of the last process of its family."""
    program = f"import {name} as library; from bench.workloads.loss import hold; library.run(hold, library)"
    controller = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    assert controller.stdout is not None
    while not (line := controller.stdout.readline()).startswith("workers:"):
        if not line:
            raise RuntimeError(f"the controller ended with status {controller.wait()} before it had workers")
    workers = {int(pid) for pid in line.split()[1:]}
    family = descendants(controller.pid)
    if not workers <= family:
        raise RuntimeError(f"workers {workers} are not among what the controller has started: {family}")
    pidfds = {pid: os.pidfd_open(pid) for pid in family}
    start = time.perf_counter()
    controller.kill()
    left = wait_for_ends(pidfds)
    found = (time.perf_counter() - start) * 1e3
    controller.wait()
    controller.stdout.close()
    for pid, pidfd in pidfds.items():
        if pid in left:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)
    return found


async def hold(library: Library) -> None:
    """Be a controller."""
    async with library.open_mesh(4) as mesh:
        print("workers:", *mesh.pids, flush=True)
        await mesh.wait()
