"""Be busy with calls and get a SIGINT at a random moment, many times; count what came out."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter

import actors
import trio
from stage import plan, say

import trimesh
from trimesh import this_host

PLAN = plan(seed=0, rounds=10, size=2, tasks=4, window=0.01)


async def call_for_ever(held: actors.Quiet) -> None:
    """Call without a pause."""
    number = 0
    while True:
        number += 1
        assert (await held.add.call(number, number)).values() == (2 * number,) * PLAN.size


async def once(delay: float) -> None:
    """Open a block and be busy in it until the signal comes."""
    async with this_host().spawn_procs({"n": PLAN.size}) as procs:
        held = await procs.spawn("held", actors.Quiet)
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()
        async with trio.open_nursery() as nursery:
            for _ in range(PLAN.tasks):
                nursery.start_soon(call_for_ever, held)


chance = random.Random(PLAN.seed)
raised = Counter[str]()
for _ in range(PLAN.rounds):
    try:
        trio.run(once, chance.uniform(0, PLAN.window))
    except BaseException as error:  # noqa: BLE001 - what came is what the test wants to know
        raised[" ".join(sorted({type(leaf).__name__ for leaf in trimesh.leaves(error)}))] += 1
say("counted", raised=raised)
