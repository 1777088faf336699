"""A program on two hosts of a job that says where it is, and what it sees in the end; each as a line of JSON."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import trio
from tests.runtime.processes import parent_of

from trimesh import Actor, endpoint, jobs, leaves
from trimesh.jobs import local


class Worker(Actor):
    """Runs on each host."""

    @endpoint
    async def pids(self) -> list[int]:
        """Return the process ids of this process, its spawner, and the agent."""
        return [os.getpid(), os.getppid(), parent_of(os.getppid())]

    @endpoint
    async def sleep(self) -> None:
        await trio.sleep_forever()


def say(**what: Any) -> None:
    """Write a line."""
    print(json.dumps(what), flush=True)


async def run(job: jobs.Job, stage: str) -> None:
    """Enter the job, and stay until a line comes."""
    async with job as hosts, hosts.spawn_procs({"gpus": 1}) as procs, procs.spawn("w", Worker) as workers:
        say(at="running", pids=list(await workers.pids.call()))
        if stage != "stopping":
            await workers.sleep.call()


def main() -> None:
    """Run, and say what came of it."""
    expression, stage = sys.argv[1:]
    local.BOOT = "import sys; sys.path[:] = sys.argv[1:]; from tests.jobs.kills.staged_agent import serve; serve()"
    job = eval(expression, {"jobs": jobs})
    seen: list[BaseException] = []
    try:
        trio.run(run, job, stage)
    except KeyboardInterrupt:
        pass
    except BaseExceptionGroup as error:
        seen += [one for one in leaves(error) if not isinstance(one, KeyboardInterrupt)]
    say(
        at="end",
        seen=[{"type": type(one).__name__, "reason": getattr(one, "reason", ""), "text": str(one)} for one in seen],
    )


if __name__ == "__main__":
    main()
