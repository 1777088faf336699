"""Hold a mesh open, with calls running on all its members, until the test says to leave it; then tell how that went.

Whenever the test says "dump", tell what `dump` writes.
"""

from __future__ import annotations

import io
import logging
import os
import signal
import socket
import time
from typing import Any

import actors
import trio
from guest import run_as_guest
from stage import describe, hear, plan, say

from trimesh import ProcDied, cancel_on, dump, limits, this_host
from trimesh._runtime.watch import report

PLAN = plan(
    size=2,  # processes
    grace=5.0,
    meshes=1,  # of actors on them
    actor="Quiet",
    arguments=[],  # of the actor
    ask=True,  # ask the actors for their pids before the block counts as open
    before=[],  # calls [endpoint, arguments...] that end before the block counts as open
    during=[],  # calls that run while it is open
    casts=[],  # broadcasts at its opening
    body="hear",  # or "raise", "cancel": how the body ends once the test says "leave"
    forked=0,  # children that the controller forks when the block is open
    rounds=1,  # how often all this is done
    outer=0,  # blocks around it, with a mesh of one process and one such actor each
    in_child=False,  # open it in another task than the main one
    ignored=None,  # signal that the program ignores
    cancel_on=None,  # signal that cancels it
    warm=False,  # one spawner for all rounds, which outlives deaths
    options={},  # of spawn_procs
    limits={},  # bounds of the controller, by name
    answer_seconds=None,  # for processes to say what they do, in reports of the controller
    rubbish=None,  # kind of own sockets that get bytes that are no messages
    terminal=None,  # path of the terminal that shall control this process
    runner="trio.run",  # or "guest": of an asyncio loop
)


async def hold(host: Any) -> None:
    """Open one mesh, hold it, leave it."""
    with trio.CancelScope() as scope:
        async with host.spawn_procs({"n": PLAN.size}, grace=PLAN.grace, **PLAN.options) as procs:
            say("started")
            for number in range(1, PLAN.meshes):
                await procs.spawn(f"held {number}", getattr(actors, PLAN.actor), *PLAN.arguments)
            held = await procs.spawn("held", getattr(actors, PLAN.actor), *PLAN.arguments)
            for name, *arguments in PLAN.before:
                say("done", name=name, values=list((await getattr(held, name).call(*arguments)).values()))
            for name, *arguments in PLAN.casts:
                await getattr(held, name).broadcast(*arguments)
            async with trio.open_nursery() as nursery:
                for name, *arguments in PLAN.during:
                    nursery.start_soon(getattr(held, name).call, *arguments)
                pids = list((await held.pid.call()).values()) if PLAN.ask else []
                say("open", pids=pids, forked=actors.fork_many(PLAN.forked))
                if PLAN.rubbish is not None:
                    actors.babble(socket.SocketKind[PLAN.rubbish], b"rubbish")
                while await hear("dump", "leave") == "dump":
                    text = io.StringIO()
                    dump(text)
                    say("dumped", text=text.getvalue())
                say("leaving")
                if PLAN.body == "raise":
                    raise LookupError("the body failed")
                if PLAN.body == "cancel":
                    scope.cancel()
    say("left")


async def hold_inside(host: Any, outer: int) -> None:
    """Hold a mesh inside of `outer` other blocks."""
    if outer == 0:
        await hold(host)
        return
    async with host.spawn_procs({"n": 1}, grace=PLAN.grace, name=f"outer {outer}") as procs:
        await procs.spawn("around", getattr(actors, PLAN.actor), *PLAN.arguments)
        await hold_inside(host, outer - 1)


async def hold_somewhere(host: Any) -> None:
    """Hold a mesh in this task or in another, perhaps until a signal comes."""
    if PLAN.cancel_on is not None:
        with cancel_on(signal.Signals[PLAN.cancel_on]) as scope:
            await hold(host)
        say("cancelled", caught=scope.cancelled_caught)
    elif PLAN.in_child:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hold, host)
    else:
        await hold_inside(host, PLAN.outer)


async def rounds() -> None:
    """Hold as often as told."""
    say("ready")
    await hear("open")
    begun = time.monotonic()
    try:
        say("opening")
        if PLAN.warm:
            async with this_host().warm() as host:
                for _ in range(PLAN.rounds):
                    try:
                        await hold_somewhere(host)
                    except* ProcDied as group:
                        say("died", error=describe(group))
                        await hear("on")
        else:
            for _ in range(PLAN.rounds):
                await hold_somewhere(this_host())
    except BaseException as error:  # noqa: BLE001 - what came is what the test wants to know
        say("raised", error=describe(error), seconds=time.monotonic() - begun)
    else:
        say("left all", seconds=time.monotonic() - begun)
    await hear("end")


class Telling(logging.Handler):
    """Tells the test what is logged."""

    def emit(self, record: logging.LogRecord) -> None:
        """Say it."""
        say("logged", level=record.levelname, text=record.getMessage())


logging.getLogger("trimesh").addHandler(Telling())
if PLAN.ignored is not None:
    signal.signal(signal.Signals[PLAN.ignored], signal.SIG_IGN)
for bound, value in PLAN.limits.items():
    setattr(limits, bound, value)
if PLAN.answer_seconds is not None:
    report.TASKS_SECONDS = PLAN.answer_seconds
if PLAN.terminal is not None:
    os.open(PLAN.terminal, os.O_RDWR)  # the first terminal that a session leader opens becomes its own
if PLAN.runner == "guest":
    run_as_guest(rounds)
else:
    trio.run(rounds)
