"""Publish one judge of two."""

from __future__ import annotations

import trio
from judges import Judge
from stage import hear, say

import trimesh


async def main() -> None:
    async with trimesh.this_host().spawn_procs({"gpus": 2}) as procs:
        judges = await procs.spawn("judges", Judge)
        async with trimesh.publish_as("part", judges.slice(gpus=slice(1, 2))):
            say("published")
            await hear("leave")
    say("left")


trio.run(main)
