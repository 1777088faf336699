"""Processes that give privileges up, or lack some: a mesh, and what its members may do."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import trio
from stage import describe, plan, say
from tests.native import sandbox

import trimesh
from trimesh import Actor, endpoint, this_host

NOBODY = 65534
NO_NEW_PRIVS = 38

PLAN = plan(drop=None, where="setup", refused=[], nested=None, modules="", pickle="on", threads=False)


def facts() -> dict[str, Any]:
    """Return what this process may do."""
    fields = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    return {
        "users": fields["Uid"].split(),
        "groups": [*fields["Gid"].split(), fields["Groups"].strip()],
        "capabilities": [fields[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")],
        "no_new_privs": fields["NoNewPrivs"],
        "cores": sorted(os.sched_getaffinity(0)),
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "filters": fields["Seccomp"],
    }


def drop_user() -> None:
    """Become nobody."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def drop_rest() -> None:
    """Give up what needs no privilege to be given up."""
    os.nice(3)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    assert ctypes.CDLL(None).prctl(NO_NEW_PRIVS, 1, 0, 0, 0) == 0


def drop_nothing() -> None:
    """Call what reaches every thread, with the group that this process has."""
    os.setgid(os.getgid())


def drop_calls() -> None:
    """Have the kernel refuse a call to this process."""
    sandbox.refuse("process_vm_readv")


DROPS = {"user": drop_user, "rest": drop_rest, "nothing": drop_nothing, "calls": drop_calls}


def drop() -> None:
    """Give up what the plan says."""
    if PLAN.threads:
        thread = threading.Thread(target=lambda: None)
        thread.start()
        thread.join()
    if PLAN.drop is not None:
        DROPS[PLAN.drop]()


class Member(Actor):
    """Says what it may do, and what those may that it starts."""

    def __init__(self) -> None:
        self.buffer = trimesh.RDMABuffer(bytearray(1 << 20))

    @endpoint
    async def handle(self) -> trimesh.RDMABuffer:
        """Return a megabyte."""
        return self.buffer

    @endpoint
    async def drop_after(self, handle: trimesh.RDMABuffer) -> bool:
        """Give up what the plan says, when all threads of this library run."""
        await handle.read_into(bytearray(1 << 20))
        drop()
        return True

    @endpoint
    async def facts(self) -> dict[str, Any]:
        """Return what it may do."""
        return facts()

    @endpoint
    async def nested(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a process may do that it starts."""
        sys.path.insert(0, PLAN.modules)
        async with this_host().spawn_procs({"n": 1}, **options) as procs:
            member = await procs.spawn("below", Member)
            return await member.facts.call_one()


async def use() -> None:
    """Use a mesh as the plan says."""
    setup = drop if PLAN.where == "setup" else None
    async with this_host().spawn_procs({"n": 2}, setup=setup) as procs:
        members = await procs.spawn("members", Member)
        if PLAN.where == "controller":
            drop()
        if PLAN.where == "worker":
            handle = await members.slice(n=0).handle.call_one()
            assert await members.slice(n=1).drop_after.call_one(handle)
        say("facts", of="worker", **(await members.slice(n=1).facts.call_one()))
        if PLAN.nested is not None:
            try:
                say("facts", of="nested", **(await members.slice(n=1).nested.call_one(PLAN.nested)))
            except Exception as error:  # noqa: BLE001 - what came is what the test wants to know
                say("failed", error=describe(error))
        say("leaving")
    say("left")


def main() -> None:
    """Give up what is to be lacking from the start, then use a mesh."""
    if PLAN.refused:
        sandbox.refuse(*PLAN.refused)
    try:
        trio.run(use)
    except BaseException as error:  # noqa: BLE001
        say("over", error=describe(error))
    else:
        say("over", error=None)


main()
