"""Run meshes in threads that are not the main one, two at a time; then end the threads and the program."""

from __future__ import annotations

import threading

import actors
import trio
from stage import plan, say

from trimesh import this_host

PLAN = plan(threads=2, rounds=2)


async def main() -> None:
    """Use a mesh."""
    for _ in range(PLAN.rounds):
        async with this_host().spawn_procs({"n": 2}) as procs:
            held = await procs.spawn("held", actors.Talking)
            assert (await held.add.call(1, 2)).values() == (3, 3)


def run() -> None:
    """Run Trio here."""
    trio.run(main)
    say("ran")


threads = [threading.Thread(target=run) for _ in range(PLAN.threads)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
say("over", threads=threading.active_count())
