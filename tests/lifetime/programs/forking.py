"""Fork inside a block, in the program and in a worker; tell what the child has, and whether the mesh still works."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from typing import Any

import actors
import trio
from stage import hear, plan, say

from trimesh import Actor, endpoint, this_host

PLAN = plan(where="controller", how="fork")


def has() -> list[str]:
    """Return what the open descriptors of this process refer to, but for the standard streams and the stage."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if int(number) > 2 and not target.startswith("/"):
            found.append(target)
    return sorted(found)


def use(handle: Any) -> str:
    """Use a handle as a forked child would by mistake; name the error."""
    try:
        handle.add.broadcast_nowait(1, 2)
    except BaseException as error:  # noqa: BLE001 - what came is what the test wants to know
        return f"{type(error).__name__}: {error}"
    return "no error"


def in_child(work: Callable[[], None]) -> None:
    """Run `work` in a forked child and wait for its end."""
    if PLAN.how == "multiprocessing":
        child = multiprocessing.get_context("fork").Process(target=work)
        child.start()
        child.join()
        assert child.exitcode == 0
        return
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except Exception:  # noqa: BLE001 - the child must not go on
            traceback.print_exc()
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0


class Forker(Actor):
    """Forks in its own process, while it has a link to another worker and a mesh of its own."""

    @endpoint
    async def fork(self, peer: actors.Quiet) -> None:
        """Fork, look, go on."""
        async with this_host().spawn_procs({"n": 1}, name="inner") as inner:
            own = await inner.spawn("own", actors.Quiet)
            assert await own.add.call_one(1, 2) == await peer.add.call_one(1, 2) == 3
            before = has()
            in_child(lambda: say("child", before=before, has=has(), used=[use(own), use(peer)]))
            assert await own.add.call_one(1, 2) == await peer.add.call_one(1, 2) == 3


async def main() -> None:
    """Fork where the test wants it."""
    say("baseline", has=[target.partition(":")[0] for target in has()])
    async with this_host().spawn_procs({"n": 2}) as procs:
        held = await procs.spawn("held", actors.Quiet)
        if PLAN.where == "controller":
            before = has()
            in_child(lambda: say("child", before=before, has=has(), used=[use(held)]))
        else:
            forker = await procs.spawn("forker", Forker)
            await forker.slice(n=0).fork.call_one(held.slice(n=1))
        assert (await held.add.call(1, 2)).values() == (3, 3)
        say("works")
        await hear("leave")


trio.run(main)
