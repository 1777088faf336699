"""Meshes in asyncio programs: the asyncio loop drives Trio, or uses a Trio run that exists already.

`async with trimesh.aio.spawn_procs({"gpus": 4}) as procs:` gives the same objects as in Trio. Await their coroutines in
tasks of this loop: a cancel of the asyncio task cancels the work in Trio, and a cancel in Trio cancels the task.

`async with trimesh.aio.fail_after(5):` is a deadline that travels with the calls of its body.

`class Engine(trimesh.aio.Actor)` is an actor whose own code runs in asyncio.
"""

from trimesh.actor.host_mesh import this_host, this_proc
from trimesh.aio.actor import Actor
from trimesh.aio.awaiting import watch_tasks
from trimesh.aio.body import open_trio
from trimesh.aio.time_limits import TimeLimit, fail_after, move_on_after

__all__ = [
    "Actor",
    "TimeLimit",
    "fail_after",
    "move_on_after",
    "open_trio",
    "spawn_procs",
    "this_host",
    "this_proc",
]

spawn_procs = this_host().spawn_procs
"""See `HostMesh.spawn_procs`."""

watch_tasks()
