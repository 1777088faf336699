"""An agent that stands still at a stage, once it has said so: it is put in the place of the one that a job starts.

starting   before it reads its order        joining   before it asks for a certificate
running    never                            stopping  when it was told to stop, before it ends what is on its host
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Final

import trio
from tests.patience import HANG_SECONDS

FOLDER: Final = "TRIMESH_TEST_STAGES"
"""Variable of the folder in which the stage is asked for, and its agent says its process id."""

PYTHON_TEXT: Final = """#!/bin/sh
export {variable}={folder}
export PYTHONPATH={root}
if [ "$1 $2" = "-m trimesh.jobs.agent" ]; then exec {python} -m tests.jobs.kills.staged_agent; fi
exec {python} "$@"
"""
"""An interpreter whose agents are these."""

POD_BOOT: Final = (
    "from tests.jobs.kills.staged_agent import stage_agents; stage_agents(); from trimesh.cli.main import main; main()"
)
"""What a pod runs whose agent is one of these."""


def comes_to(stage: str) -> bool:
    """Tell whether this is the stage that is asked for, and this agent the first one there; say so."""
    folder = Path(os.environ[FOLDER])
    if (folder / "stage").read_text() != stage:
        return False
    try:
        number = os.open(folder / "agent.new", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        return False
    os.write(number, str(os.getpid()).encode())
    os.close(number)
    (folder / "agent.new").rename(folder / "agent")
    return True


def may_go() -> bool:
    """Tell whether it is to go on: what was to be killed is."""
    return Path(os.environ[FOLDER], "go").exists()


async def stand_still(stage: str) -> None:
    """Stand still at a stage, as an agent that waits."""
    if comes_to(stage):
        while not may_go():  # noqa: ASYNC110 - of another process
            await trio.sleep(0.02)


def stage_agents() -> None:
    """Let what this process is to be, an agent, stand still at its stage."""
    from trimesh.jobs import agent

    program: Any = agent.HostProgram
    join, serve = program._join, program._serve_until_told

    async def joining(self: Any) -> Any:
        await stand_still("joining")
        return await join(self)

    async def serving(self: Any, host: Any) -> Any:
        reason = await serve(self, host)
        await stand_still("stopping")
        return reason

    program._join, program._serve_until_told = joining, serving
    if comes_to("starting"):
        until = time.monotonic() + HANG_SECONDS
        while not may_go() and time.monotonic() < until:  # a test that was itself killed lets nothing go
            time.sleep(0.02)


def main() -> None:
    """Be an agent."""
    from trimesh.jobs import agent

    stage_agents()
    agent.main()


def serve() -> None:
    """Be the template of agents."""
    from trimesh.jobs import agent, local

    be_agent: Any = agent.main

    def be_staged() -> None:
        stage_agents()
        be_agent()

    vars(agent)["main"] = be_staged
    local.serve()


if __name__ == "__main__":
    main()
