"""SIGKILL to a controller that has four processes: until every process that it has started, at any depth, is gone."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time

from bench.scale import Metric, Samples, Scale

METRICS = [
    Metric("gone", "SIGKILL of the controller to all are gone", "ms", quantiles=(0.5, 1.0), goals=(1000, 1000)),
]

PATIENCE_SECONDS = 60
"""Who is still there after this counts as never gone, and is killed."""


async def trimesh_side(scale: Scale) -> Samples:
    return {"gone": [lose_controller("hold_trimesh") for _ in range(scale.kills)]}


async def monarch_side(scale: Scale) -> Samples:
    return {"gone": [lose_controller("hold_monarch") for _ in range(scale.peer_kills)]}


def lose_controller(function: str) -> float:
    """Return the milliseconds from the SIGKILL of a new controller to the end of the last process of its family."""
    program = f"from bench.workloads.loss import {function}; {function}()"
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


def wait_for_ends(pidfds: dict[int, int]) -> set[int]:
    """Wait until all of some processes have ended, for as long as there is patience; return those that have not."""
    left = {pidfd: pid for pid, pidfd in pidfds.items()}
    ends = select.poll()
    for pidfd in left:
        ends.register(pidfd, select.POLLIN)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while left and (wait := deadline - time.monotonic()) > 0:
        for pidfd, _ in ends.poll(wait * 1e3):
            ends.unregister(pidfd)
            del left[pidfd]
    return set(left.values())


def descendants(pid: int) -> set[int]:
    """Return the pids of what a process has started, and of what those have."""
    found: set[int] = set()
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/children") as file:
            found.update(map(int, file.read().split()))
    return found.union(*map(descendants, found))


def hold_trimesh() -> None:
    """Be a controller for trimesh."""
    import trio

    from bench.workloads.trimesh_actors import Sleeper
    from trimesh import this_host

    async def main() -> None:
        async with this_host().spawn_procs({"gpus": 4}) as procs:
            sleepers = await procs.spawn("sleepers", Sleeper)
            pids = await sleepers.pid.call()
            print("workers:", *pids.values(), flush=True)
            await trio.sleep_forever()

    trio.run(main)


def hold_monarch() -> None:
    """Be a controller for Monarch."""
    import asyncio

    from monarch.actor import this_host

    from bench.workloads.monarch_actors import Sleeper

    async def main() -> None:
        sleepers = this_host().spawn_procs(per_host={"gpus": 4}).spawn("sleepers", Sleeper)
        pids = await sleepers.pid.call()
        print("workers:", *(pid for _, pid in pids.items()), flush=True)
        await asyncio.Event().wait()

    asyncio.run(main())
