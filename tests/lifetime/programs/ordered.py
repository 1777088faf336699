"""Leave a block with several meshes of actors in it, and tell what happens in which order."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import actors
import trio
from actors import rank
from stage import PATH, describe, hear, plan, say

import trimesh
from trimesh import Actor, MeshStopped, RemoteCancelled, endpoint, this_host

PLAN = plan(
    body="end",  # or "raise"; then the second message of each actor runs until it is cancelled
    messages=3,
    until_refused=False,  # the last message of each actor runs until the stranger has been refused
)


def mesh() -> str:
    """Return the name of the mesh that the running code belongs to."""
    return trimesh.context().mesh


def touch(name: str) -> None:
    """Let the other processes know of something."""
    (Path(os.environ[PATH]).parent / name).touch()


async def wait_for(name: str) -> None:
    """Wait until one of them has done so."""
    while not (Path(os.environ[PATH]).parent / name).exists():  # noqa: ASYNC110 - it is another process
        await trio.sleep(0.001)


class Orderly(actors.Quiet):
    """Tells when it works and when it cleans up; one rank does not clean up before the other has begun to."""

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        """Meet the other rank at the end."""
        yield
        say("stopping", mesh=mesh(), rank=rank())
        touch(f"{mesh()}.{rank()}")
        await wait_for(f"{mesh()}.{1 - rank()}")
        say("stopped", mesh=mesh(), rank=rank())

    @endpoint
    async def work(self, number: int) -> None:
        """Take a moment."""
        say("begun", mesh=mesh(), rank=rank(), number=number)
        try:
            if PLAN.body == "raise" and number == 1:
                await trio.sleep_forever()
            if PLAN.until_refused and number == PLAN.messages - 1:
                await wait_for("refused")
            await trio.sleep(0.02)
            say("done", mesh=mesh(), rank=rank(), number=number)
        except trio.Cancelled:
            say("cut", mesh=mesh(), rank=rank(), number=number)
            raise


class Stranger(Actor):
    """Holds a reference on actors that others own."""

    @endpoint
    async def call_until_refused(self, other: Orderly) -> None:
        """Call, and tell of the end."""
        say("calling")
        while True:
            try:
                await other.slice(n=0).add.call_one(1, 2)
            except RemoteCancelled:
                continue
            except MeshStopped:
                say("refused")
                touch("refused")
                return


async def main() -> None:
    """Open, queue messages, leave."""
    async with this_host().spawn_procs({"n": 1}, name="strangers") as others, trio.open_nursery() as nursery:
        stranger = await others.spawn("stranger", Stranger)
        try:
            async with this_host().spawn_procs({"n": 2}) as procs:
                held = [await procs.spawn(f"mesh {number}", Orderly) for number in range(3)]
                nursery.start_soon(stranger.call_until_refused.call, held[0])
                await hear("leave")
                for number in range(PLAN.messages):
                    for one in held:
                        await one.work.broadcast(number)
                say("leaving")
                if PLAN.body == "raise":
                    raise LookupError("on purpose")
        except* LookupError as group:
            say("raised", error=describe(group))
        say("left")


trio.run(main)
