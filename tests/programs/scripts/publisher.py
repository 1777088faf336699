"""Publish two judges under a name, until the test says how to leave."""

from __future__ import annotations

import os

import trio
from judges import Judge
from stage import describe, hear, plan, say

import trimesh

PLAN = plan(name="judge", pickle="on", seconds=0.0, words=["leave"])


async def main() -> None:
    async with trimesh.this_host().spawn_procs({"gpus": 2}, pickle=PLAN.pickle, supervision=trimesh.Isolate()) as procs:
        judges = await procs.spawn("judges", Judge)
        try:
            with trimesh.configured(grace=60):
                async with trimesh.publish_as(PLAN.name, judges):
                    say("published", fds=len(os.listdir("/proc/self/fd")))
                    await hear(PLAN.words[0])
                    say("leaving")
                    if PLAN.words[0] == "fail":
                        raise LookupError("the body")
        except BaseException as error:  # noqa: BLE001 - the test wants to know
            say("raised", **describe(error))
        say("left", fds=len(os.listdir("/proc/self/fd")))
        await hear("end")


with trimesh.configured(history=0):  # its file would be counted
    trio.run(main)
