"""Leave blocks open at the end of a script."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import trio
from stage import plan, say

import trimesh.blocking as tb
from trimesh import Actor, endpoint, limits

PLAN = plan(exit_seconds=limits.EXIT_SECONDS, hangs=False)


class Tidy(Actor):
    """Says when it cleans up."""

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        """Clean up at the end, maybe for ever."""
        yield
        say("cleaning")
        if PLAN.hangs:
            await trio.sleep_forever()
        print("cleaned up", flush=True)

    @endpoint
    async def rank(self) -> int:
        """Return a number."""
        return 0


limits.EXIT_SECONDS = PLAN.exit_seconds  # type: ignore[misc]
procs = tb.spawn_procs({"gpus": 1}, grace=math.inf).open()
inner = procs.spawning("inner", Tidy)
assert inner.open().rank.call_one() == 0
