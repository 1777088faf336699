"""Kill random workers during random verbs, and account for every call: its outcome, and when it came."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from typing import Any

import attrs
import trio
from stage import plan, say

import trimesh
from trimesh import Actor, MeshErrorGroup, ProcDied, endpoint, this_host

PLAN = plan(seed=0, rounds=10, size=3, tasks=6, window=0.03)


class Adder(Actor):
    """Adds, at once or after a moment, one at a time or not."""

    @endpoint
    async def pid(self) -> int:
        """Return the process id."""
        return os.getpid()

    @endpoint
    async def add(self, number: int) -> int:
        """Add one."""
        return number + 1

    @endpoint(concurrency=16)
    async def slowly(self, number: int) -> int:
        """Add one, after a moment."""
        await trio.sleep(0.001)
        return number + 1

    @endpoint(concurrency=64)
    async def never(self) -> None:
        """Wait for the end."""
        await trio.sleep_forever()


@attrs.define(eq=False)
class Round:
    """One mesh with a victim in it.

    Attributes:
        begun, ended: Calls, which must be equal in number when all is over.
        outcomes: How many calls ended how.
        last_cancelled: When the last call inside of the block was told.
        told: When a caller outside of it was.
        killed_at: When the victim was killed.
    """

    chance: random.Random
    adders: Any
    begun: int = 0
    ended: int = 0
    outcomes: Counter[str] = attrs.field(factory=Counter[str])
    last_cancelled: float = 0.0
    told: float = 0.0
    killed_at: float = 0.0

    async def call_for_ever(self) -> None:
        """Call random verbs; check what comes back; count how each call ended."""
        number = 0
        while True:
            number += 1
            self.begun += 1
            try:
                await self.call(
                    self.chance.choice(["call", "call_one", "choose", "settled", "broadcast", "never"]), number
                )
                outcome = "value"
            except trio.Cancelled:
                outcome = "cancelled"
                self.last_cancelled = time.monotonic()
                raise
            except BaseException as error:
                outcome = " ".join(sorted({type(leaf).__name__ for leaf in trimesh.leaves(error)}))
                raise
            finally:
                self.ended += 1
                self.outcomes[outcome] += 1

    async def call(self, verb: str, number: int) -> None:
        """Call one verb."""
        method = self.chance.choice([self.adders.add, self.adders.slowly])
        if verb == "call":
            assert (await method.call(number)).values() == (number + 1,) * PLAN.size
        elif verb == "call_one":
            one = self.adders.slice(n=self.chance.randrange(PLAN.size))
            assert await one.slowly.call_one(number) == number + 1
        elif verb == "choose":
            assert await method.choose(number) == number + 1
        elif verb == "settled":
            outcomes = (await method.call_settled(number)).values()
            assert [outcome.unwrap() for outcome in outcomes] == [number + 1] * PLAN.size
        elif verb == "broadcast":
            await method.broadcast(number)
        else:
            with trio.move_on_after(0.005):
                await self.adders.never.call()

    async def wait_outside(self, task_status: trio.TaskStatus[None]) -> None:
        """Wait in a task that is not the block's: it is told of the death itself (X3)."""
        task_status.started()
        self.begun += 1
        try:
            await self.adders.never.call()
        except* ProcDied:
            self.told = time.monotonic()
            self.outcomes["died"] += 1
        finally:
            self.ended += 1


async def kill_one(host: Any, chance: random.Random) -> dict[str, Any]:
    """Open a mesh, be busy, kill a member; return the account."""
    rank = chance.randrange(PLAN.size)
    async with trio.open_nursery() as outside:
        try:
            async with host.spawn_procs({"n": PLAN.size}, output="discard") as procs:
                adders = await procs.spawn("adders", Adder)
                pids = (await adders.pid.call()).values()
                one = Round(chance, adders)
                await outside.start(one.wait_outside)
                async with trio.open_nursery() as inside:
                    for _ in range(PLAN.tasks):
                        inside.start_soon(one.call_for_ever)
                    await trio.sleep(chance.uniform(0, PLAN.window))
                    one.killed_at = time.monotonic()
                    os.kill(pids[rank], signal.SIGKILL)
        except MeshErrorGroup as group:
            left = time.monotonic()
            points = [dict(point) for point in trimesh.coords(group)]
            kinds = [type(leaf).__name__ for leaf in trimesh.leaves(group)]
            signals = [getattr(leaf, "signal", None) for leaf in trimesh.leaves(group)]
    return {
        "expected": {"n": rank},
        "points": points,
        "kinds": kinds,
        "signals": signals,
        "begun": one.begun,
        "ended": one.ended,
        "outcomes": one.outcomes,
        "cancelled": one.last_cancelled - one.killed_at,
        "told": one.told - one.killed_at,
        "left": left - one.killed_at,
    }


async def main() -> None:
    """Kill as often as told."""
    chance = random.Random(PLAN.seed)
    async with this_host().warm() as host:
        for _ in range(PLAN.rounds):
            say("round", **await kill_one(host, chance))


trio.run(main)
