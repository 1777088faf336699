"""Hold a supervised mesh whose first process dies and whose restart does not end, until a signal comes."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import actors
import trio
from stage import describe, hear, plan, say

import trimesh
from trimesh import Backoff, Restart, Restarting, limits, this_host

PLAN = plan(
    phase="resting",  # where the restart stays: "resting", "taking down", "starting"
    grace=600.0,
)


class Lingering(actors.Quiet):
    """Starts again, or ends, only when it is cancelled or killed, if the plan says so."""

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        """Linger."""
        if PLAN.phase == "starting" and trimesh.context().incarnation:
            say("lingering")
            await trio.sleep_forever()
        yield
        if PLAN.phase == "taking down":
            say("lingering")
            await trio.sleep_forever()


async def main() -> None:
    """Open the mesh, kill its first process, wait."""
    say("ready")
    backoff = Backoff(1000.0, cap=1000.0) if PLAN.phase == "resting" else Backoff(0)
    try:
        async with this_host().spawn_procs(
            {"n": 2}, grace=PLAN.grace, supervision=Restart("one_for_all", backoff=backoff)
        ) as procs:
            held = await procs.spawn("held", Lingering)
            async with procs.events() as events:
                os.kill((await held.pid.call()).item(n=0), signal.SIGKILL)
                async for event in events:
                    if isinstance(event, Restarting):
                        say("restarting")
    except BaseException as error:  # noqa: BLE001 - what came is what the test wants to know
        say("raised", error=describe(error))
    await hear("end")


class Telling(logging.Handler):
    """Tells the test that the block is being left."""

    def emit(self, record: logging.LogRecord) -> None:
        """Say it; the death that the restart follows is logged, too."""
        if "has been stopping" in record.msg:
            say("stopping")


logging.getLogger("trimesh").addHandler(Telling())
limits.STOPPING_LOG_SECONDS = 0.05  # type: ignore[misc]
trio.run(main)
