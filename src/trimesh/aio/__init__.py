"""Meshes in asyncio programs: Trio as a guest on their loop, or in the thread that already runs it.

`async with trimesh.aio.spawn_procs({"gpus": 4}) as procs:` gives the same objects as in Trio. What they await works in
the tasks of this loop: it is done in Trio, and a cancel of the asyncio task cancels it there.

`class Engine(trimesh.aio.Actor)` is an actor whose own code runs in asyncio.
"""

from trimesh.actor.host_mesh import this_host, this_proc
from trimesh.aio.actor import Actor
from trimesh.aio.portal import open_trio

__all__ = ["Actor", "open_trio", "spawn_procs", "this_host", "this_proc"]

spawn_procs = this_host().spawn_procs
"""`this_host().spawn_procs`; see there."""
