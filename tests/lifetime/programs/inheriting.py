"""Change everything that a process takes over, after the spawner was started; compare what workers have."""

from __future__ import annotations

import os
import resource
import sys
import warnings
from typing import Any

import trio
from stage import plan, say

import trimesh
from trimesh import Actor, Point, endpoint, this_host

PLAN = plan(folder=".", python=None)


class Mirror(Actor):
    """Looks at its process."""

    @endpoint
    async def about(self) -> dict[str, Any]:
        """Return what it has."""
        return about()


def about() -> dict[str, Any]:
    """Return what is taken over from the caller."""
    umask = os.umask(0)
    os.umask(umask)
    return {
        "cwd": os.getcwd(),
        "umask": umask,
        "argv": sys.argv,
        "limit": resource.getrlimit(resource.RLIMIT_CORE),
        "path": "/some/folder" in sys.path,
        "main": hasattr(sys.modules["__main__"], "PLAN"),
        "kept": os.environ.get("KEPT"),
        "gone": os.environ.get("GONE"),
        "own": os.environ.get("OWN"),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "warnings": ("error", UserWarning) in {(entry[0], entry[2]) for entry in warnings.filters},
        "session": os.getsid(0) == os.getpid(),
        "tasks": len(os.listdir("/proc/self/task")),
    }


def env(point: Point) -> dict[str, str]:
    """Give each process a value of its own."""
    return {"OWN": f"{point['a']}{point['b']}"}


async def main() -> None:
    """Start a spawner, change, start workers."""
    os.environ["GONE"] = "1"
    os.environ.pop("OMP_NUM_THREADS", None)
    async with this_host().warm() as host:
        os.chdir(PLAN.folder)
        os.umask(0o027)
        sys.path.append("/some/folder")
        sys.argv.append("more")
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        warnings.simplefilter("error", UserWarning)
        os.environ["KEPT"] = "2"
        del os.environ["GONE"]
        async with host.spawn_procs({"a": 2, "b": 2}, env=env, python=PLAN.python) as procs:
            mirrors = await procs.spawn("mirrors", Mirror)
            say("found", own=about(), theirs=[value for _, value in (await mirrors.about.call()).items()])
    assert trimesh.this_proc() is not None


trio.run(main)
