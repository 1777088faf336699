"""What a program leaves on its hosts when it is killed: nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import trio
from tests.patience import HANG_SECONDS

PROGRAM = """
import os, sys, trio
from trimesh import jobs, Actor, endpoint

class W(Actor):
    @endpoint
    async def pids(self) -> list[int]:
        agent = int(open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()[1])
        return [os.getpid(), os.getppid(), agent]

async def main():
    job = eval(sys.argv[1], {"jobs": jobs})
    async with job as hosts, hosts.spawn_procs({"gpus": int(sys.argv[2])}) as procs, procs.spawn("w", W) as w:
        print(*[pid for pids in await w.pids.call() for pid in pids], flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


def check_killed_program(job: str, *, hosts: int, gpus: int) -> None:
    """Kill a program that runs on the hosts of a job, an expression, and wait until all that it started is gone."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, job, str(gpus)], stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        pids = [int(word) for word in program.stdout.readline().split()]
        pidfds = [os.pidfd_open(pid) for pid in set(pids)]
        program.kill()

    async def wait_gone() -> None:
        with trio.fail_after(HANG_SECONDS):
            for pidfd in pidfds:
                await trio.lowlevel.wait_readable(pidfd)

    try:
        assert len(pids) == 3 * hosts * gpus
        trio.run(wait_gone)
    finally:
        for pidfd in pidfds:
            os.close(pidfd)
