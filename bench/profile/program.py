"""The program that is profiled. It repeats the step of one workload, and says in lines of JSON what it does.

    python -m bench.profile.program WORKLOAD SECONDS

After a warm-up it measures its sides for so long by the kernel's clocks and writes their pids and what they used; then
it goes on for whoever samples it, until its standard input ends.
"""

from __future__ import annotations

import json
import select
import sys
import time
from dataclasses import asdict

import trio

from bench.profile.clocks import read_clock
from bench.profile.workloads import WORKLOADS, Step, open_workload


async def profiled(name: str, seconds: float) -> None:
    """Be profiled."""
    workload = WORKLOADS[name]
    assert workload.step is not None
    async with open_workload(workload) as (subject, pids):
        await _repeat(workload.step, subject, seconds / 4)
        before = {side: read_clock(pid) for side, pid in pids.items()}
        items, elapsed = await _repeat(workload.step, subject, seconds)
        clocks = {side: asdict(read_clock(pid) - before[side]) for side, pid in pids.items()}
        print(json.dumps({"pids": pids, "items": items, "seconds": elapsed, "clocks": clocks}), flush=True)
        while not select.select([sys.stdin], [], [], 0)[0]:
            await workload.step(subject)


async def _repeat(step: Step, subject: object, seconds: float) -> tuple[int, float]:
    items, begin = 0, time.perf_counter()
    while True:
        items += await step(subject)
        if (elapsed := time.perf_counter() - begin) >= seconds:
            return items, elapsed


if __name__ == "__main__":
    trio.run(profiled, sys.argv[1], float(sys.argv[2]))
