"""Connect to the judges, and call one that never answers."""

from __future__ import annotations

import trio
from judges import Judge
from stage import hear, plan, say

import trimesh

PLAN = plan(name="judge")


async def main() -> None:
    async with trimesh.connect(PLAN.name, Judge) as judges:
        assert (await judges.score.call(2)).values() is not None
        say("connected")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(judges.slice(gpus=0).hang.call_one)
            await hear("leave")
            nursery.cancel_scope.cancel()
    say("left")


trio.run(main)
