"""Be busy with calls from asyncio and get a SIGINT at a random moment, or two, many times; count what came out."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections import Counter

import actors
from stage import plan, say

import trimesh

PLAN = plan(seed=0, rounds=10, size=2, tasks=4, window=0.01, signals=1)


async def call_for_ever(held: actors.Quiet) -> None:
    """Call without a pause."""
    number = 0
    while True:
        number += 1
        assert (await held.add.call(number, number)).values() == (2 * number,) * PLAN.size


def strike(delays: list[float]) -> None:
    """Interrupt this process, once after each delay."""
    for delay in delays:
        threading.Event().wait(delay)
        os.kill(os.getpid(), signal.SIGINT)


async def once(striker: threading.Thread) -> None:
    """Open a block and be busy in it until the signal comes."""
    async with trimesh.aio.spawn_procs({"n": PLAN.size}, grace=0.5) as procs:
        held = await procs.spawn("held", actors.Quiet)
        striker.start()
        async with asyncio.TaskGroup() as group:
            for _ in range(PLAN.tasks):
                group.create_task(call_for_ever(held))


chance = random.Random(PLAN.seed)
raised = Counter[str]()
for _ in range(PLAN.rounds):
    delays = [chance.uniform(0, PLAN.window) for _ in range(PLAN.signals)]
    striker = threading.Thread(target=strike, args=(delays,))
    try:
        try:
            asyncio.run(once(striker))
        finally:
            while striker.is_alive():
                striker.join()
    except BaseException as error:  # noqa: BLE001 - what came is what the test wants to know
        raised[" ".join(sorted({type(leaf).__name__ for leaf in trimesh.leaves(error)}))] += 1
say("counted", raised=raised)
