"""Start a mesh of which one member fails, tell what was raised, and go on with a healthy one."""

from __future__ import annotations

import os
import resource
from contextlib import asynccontextmanager
from typing import Any

import actors
import trio
from stage import describe, hear, plan, say

import trimesh
from trimesh import Point, this_host

PLAN = plan(size=4, options={}, setup=None, env=None, output=None, spare=None, cls="Quiet")


def is_chosen() -> bool:
    """Whether this member is the one that fails."""
    return trimesh.current_rank() == 2


class FailsInit(actors.Quiet):
    """One constructor raises."""

    def __init__(self) -> None:
        if is_chosen():
            raise LookupError("no such weights")


class FailsLifespan(actors.Talking):
    """One lifespan raises before it serves."""

    @asynccontextmanager
    async def lifespan(self) -> Any:
        """Raise in one."""
        async with super().lifespan():
            if is_chosen():
                raise LookupError("no such weights")
            yield


class DiesInInit(actors.Quiet):
    """One constructor ends its process."""

    def __init__(self) -> None:
        if is_chosen():
            os._exit(7)


async def setup_raises() -> None:
    """Raise in one."""
    await trio.lowlevel.checkpoint()
    if is_chosen():
        raise LookupError("no such device")


def setup_dies() -> None:
    """End one process."""
    if is_chosen():
        os._exit(7)


def env_raises(point: Point) -> dict[str, str]:
    """Raise for one."""
    if point.rank == 2:
        raise LookupError("no such variable")
    return {}


def output_to_nowhere(point: Point) -> Any:
    """Name a file that cannot be opened for one."""
    return trimesh_path(os.devnull) if point.rank != 2 else trimesh_path("/nonexistent/folder/file")


def trimesh_path(path: str) -> os.PathLike[str]:
    """Return a path object."""
    from pathlib import Path

    return Path(path)


def leave_descriptors(count: int) -> None:
    """Allow this process `count` more descriptors than it has."""
    used = len(os.listdir("/proc/self/fd")) - 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + count, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


async def main() -> None:
    """Fail, then succeed."""
    options = dict(PLAN.options)
    for name in ("setup", "env", "output"):
        if getattr(PLAN, name) is not None:
            options[name] = globals()[getattr(PLAN, name)]
    unlimited = resource.getrlimit(resource.RLIMIT_NOFILE)
    if PLAN.spare is not None:
        leave_descriptors(PLAN.spare)
    is_open = False
    try:
        async with this_host().spawn_procs({"n": PLAN.size}, **options) as procs:
            is_open = True
            say("started")
            try:
                await procs.spawn("members", globals().get(PLAN.cls) or getattr(actors, PLAN.cls))
            except Exception as error:  # noqa: BLE001 - what came is what the test wants to know
                say("failed", where="spawn", error=describe(error))
                await hear("on")
            healthy = await procs.spawn("healthy", actors.Quiet)
            assert (await healthy.add.call(1, 2)).values() == (3,) * PLAN.size
            say("healthy")
    except BaseException as error:  # noqa: BLE001
        say("failed", where="body" if is_open else "spawn_procs", error=describe(error))
        await hear("on")
    resource.setrlimit(resource.RLIMIT_NOFILE, unlimited)
    async with this_host().spawn_procs({"n": 1}) as procs:
        healthy = await procs.spawn("healthy", actors.Quiet)
        assert await healthy.add.call_one(1, 2) == 3
    say("over")


trio.run(main)
