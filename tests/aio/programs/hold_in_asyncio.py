"""Hold a mesh open in an asyncio program until a signal comes; then tell how that went."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from typing import Any

import actors
import trio
from stage import describe, plan, say

import trimesh
from trimesh.aio import trio_run

PLAN = plan(
    size=2,  # processes
    grace=5.0,
    actor="Quiet",
    arguments=[],  # of the actor
    during=[],  # calls that run while it is open
    runner="asyncio.run",  # or "loop": without asyncio's own handler of SIGINT; or "thread": of a Trio program
    block_in="main",  # or "child", "stray": a task of a TaskGroup, or one that nobody waits for
    ask=True,  # ask the actors for their pids before the block counts as open
    body="wait",  # or "leave" when the test says so, "swallow" the first cancel, "spin" in Python without a pause
)


async def hold() -> None:
    """Open one mesh and hold it."""
    async with trimesh.aio.spawn_procs({"n": PLAN.size}, grace=PLAN.grace) as procs:
        held = await procs.spawn("held", getattr(actors, PLAN.actor), *PLAN.arguments)
        async with asyncio.TaskGroup() as group:
            for name, *arguments in PLAN.during:
                group.create_task(getattr(held, name).call(*arguments))
            say("open", pids=list((await held.pid.call()).values()) if PLAN.ask else [])
            if PLAN.body == "leave":
                await hear_in_asyncio("leave")
                say("leaving")
                return
            if PLAN.body == "spin":
                spin()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if PLAN.body != "swallow":
                    raise
                try:
                    say("swallowed")
                    await asyncio.Event().wait()
                finally:
                    say("ending")


async def hear_in_asyncio(word: str) -> None:
    """Wait until the test says a word."""
    loop, heard = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(0, heard.set)
    await heard.wait()
    loop.remove_reader(0)
    assert sys.stdin.readline().strip() == word


def spin() -> None:
    """Compute for ever."""
    try:
        say("spinning")
        while True:
            pass
    finally:
        say("ending")


async def main() -> None:
    """Hold it in the task that is asked for."""
    if PLAN.block_in == "child":
        async with asyncio.TaskGroup() as group:
            group.create_task(hold())
    elif PLAN.block_in == "stray":
        stray = asyncio.create_task(hold())
        await asyncio.Event().wait()
        del stray
    else:
        await hold()


def run() -> None:
    """Run it on the loop that is asked for."""
    if PLAN.runner == "thread":
        trio.run(trio.to_thread.run_sync, lambda: asyncio.run(main()))
    elif PLAN.runner == "loop":
        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(main())
        finally:
            loop.close()
    else:
        asyncio.run(main())


def threads() -> list[str]:
    """Name the threads but for the idle ones that Trio keeps."""
    return [thread.name for thread in threading.enumerate() if not thread.name.startswith("Trio thread")]


def left() -> dict[str, Any]:
    """Return what is left in this process."""
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return {"is_default": is_default, "threads": threads(), "runs": len(trio_run._runs)}


say("ready", descriptors=len(os.listdir("/proc/self/fd")))
try:
    run()
except BaseException as error:  # noqa: BLE001 - what came is what the test wants to know
    say("raised", error=describe(error), **left())
else:
    say("left all", **left())
sys.stdin.readline()
