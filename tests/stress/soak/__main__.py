"""Kill members of a loaded mesh for long, and show that nothing is lost and nothing grows.

    python -m tests.stress.soak --minutes 30 --every 2 --fast 2000

First come `--fast` restarts one after the other, which show what each of them leaves behind. Then a mixed load runs
(`load.py`) while a random member is killed every so many seconds (`saboteur.py`). Descriptors, threads and shared
memory of the controller, the spawner and the workers must be at the end what they were at the start; memory of the
controller and the spawner must not grow by more than 1 MiB in 1,000 restarts. Exit status 0 says that all of it holds.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import statistics
import sys
import time
from array import array
from random import Random

import attrs
import trio
from tests.stress.soak.gauges import Held, children, held, resident_bytes, slope
from tests.stress.soak.load import POOL, Load, Relay, Served
from tests.stress.soak.saboteur import Saboteur

from trimesh import Backoff, Restart, this_host

SLOPE_MAX = 1.0
"""MiB per 1,000 restarts."""

SLOPE_RESTARTS_MIN = 500
"""With fewer restarts the noise of a few hundred KiB would decide."""

SETTLE_ROUNDS = 30
"""Counts that differ after so many half seconds differ for good; threads of a pool that idle end after 10 s."""

PRELOAD = ("numpy",)

MIB = 1 << 20


@attrs.define(eq=False)
class Soak:
    """One run.

    Attributes:
        options: Of the command line.
        load, saboteur: What runs.
        pids: Who is looked at: "controller", "spawner", "relay".
        memory: How many restarts, and the bytes of each of them then, from one phase, in a row.
        problems: What does not hold.
    """

    options: argparse.Namespace
    load: Load
    saboteur: Saboteur
    pids: dict[str, int]
    memory: array[float] = attrs.field(factory=lambda: array("d"))
    problems: list[str] = attrs.field(factory=list[str])

    async def run(self) -> None:
        """Warm up, look, restart fast, strike under load, look again."""
        await self.warm_up()
        start = await self.counts()
        for name, one in start.items():
            say(f"at the start  {name:10} {describe(one)}")
        if self.options.fast:
            await self.restart_fast()
        await self.strike_under_load()
        await self.compare(start)

    async def warm_up(self) -> None:
        """Have every kind of request made under load, and every member restarted."""
        with trio.move_on_after(3):
            await self.load.run()
        for rank in range(POOL):
            self.saboteur.strike(rank=rank)
        await self.saboteur.healed()

    async def counts(self) -> dict[str, Held]:
        """Return what every process holds when nothing is under way."""
        await self.saboteur.healed()
        await self.load.once()
        gc.collect()
        workers = {f"worker {rank}": pid for rank, (pid, _) in sorted(self.saboteur.living.items())}
        return {name: held(pid) for name, pid in (self.pids | workers).items()}

    async def compare(self, start: dict[str, Held]) -> None:
        """Compare what is held with the start, as soon as it is the same."""
        for _ in range(SETTLE_ROUNDS):
            end = await self.counts()
            if end == start:
                break
            await trio.sleep(0.5)
        for name, one in end.items():
            say(f"at the end    {name:10} {describe(one)}")
            if one != start[name]:
                self.problems.append(f"{name} held {describe(start[name])} at the start, {describe(one)} at the end")

    # ---- phases ------------------------------------------------------------------------------------------------------

    async def restart_fast(self) -> None:
        """Restart members as fast as it goes, without any load."""
        del self.memory[:]
        first, began = self.saboteur.restarts, time.monotonic()
        with trio.CancelScope() as scope:

            def look() -> None:
                self.sample()
                if self.saboteur.restarts - first >= self.options.fast:
                    scope.cancel()

            await self.saboteur.run(0, look)
        await self.saboteur.healed()
        took, count = time.monotonic() - began, self.saboteur.restarts - first
        say(f"{count} restarts as fast as they go: {took:.0f} s, {1000 * took / count:.0f} ms each")
        self.judge_memory()

    async def strike_under_load(self) -> None:
        """Run the load for the minutes that were asked for, and strike."""
        del self.memory[:]
        self.sample()
        del self.saboteur.seconds[:]
        with trio.move_on_after(60 * self.options.minutes):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.load.run)
                nursery.start_soon(self.saboteur.run, self.options.every, self.sample)
                nursery.start_soon(self.tell)
        await self.saboteur.healed()
        self.sample()
        self.tell_now()
        if self.saboteur.restarts != self.saboteur.count:
            self.problems.append(f"{self.saboteur.count} kills, but {self.saboteur.restarts} restarts")
        silent = [kind for kind in self.load.kinds if not self.load.answered[kind]]
        if silent:
            self.problems.append(f"never answered: {silent}")
        self.judge_memory()

    # ---- what is seen ------------------------------------------------------------------------------------------------

    def sample(self) -> None:
        """Note the memory of the processes that stay."""
        self.memory.append(self.saboteur.restarts)
        self.memory.extend(resident_bytes(pid) for pid in self.pids.values())

    def judge_memory(self) -> None:
        """Say how memory has grown with the restarts of a phase, and whether that is too much."""
        width = 1 + len(self.pids)
        counts = self.memory[::width]
        restarts = counts[-1] - counts[0]
        for place, name in enumerate(self.pids, start=1):
            sizes = self.memory[place::width]
            growth = 1000 * slope(counts, sizes) / MIB
            is_judged = restarts >= SLOPE_RESTARTS_MIN and name != "relay"
            say(
                f"memory of the {name}: {sizes[0] / MIB:.2f} MiB, then {sizes[-1] / MIB:.2f} MiB; "
                f"slope {growth:+.2f} MiB per 1,000 restarts, from {restarts:.0f}{'' if is_judged else ' (not judged)'}"
            )
            if is_judged and growth > SLOPE_MAX:
                self.problems.append(f"memory of the {name} grows by {growth:.2f} MiB per 1,000 restarts")

    async def tell(self) -> None:
        """Say every minute how far it is."""
        while True:
            await trio.sleep(60)
            self.tell_now()

    def tell_now(self) -> None:
        """Say how far it is."""
        kills = ", ".join(f"{name} {count}" for name, count in sorted(self.saboteur.kills.items()))
        say(f"{self.saboteur.count} kills ({kills}), {self.saboteur.restarts} restarts")
        if self.saboteur.seconds:
            told = sorted(self.saboteur.seconds)
            say(f"from signal to restart: {1000 * statistics.median(told):.0f} ms half, {1000 * told[-1]:.0f} ms most")
        say(f"right answers: {sum(self.load.answered.values())} {dict(sorted(self.load.answered.items()))}")
        say(f"ended by a death: {sum(self.load.died.values())} {dict(sorted(self.load.died.items()))}")


def describe(one: Held) -> str:
    """Return counts as people read them."""
    return f"{one.fds} descriptors, {one.memfds} memfds, {one.maps} mappings of such, {one.threads} threads"


def say(text: str) -> None:
    """Print a line with the time."""
    print(f"{time.monotonic() - BEGAN:7.1f} s  {text}", flush=True)


async def main(options: argparse.Namespace) -> list[str]:
    """Run; return the problems."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    say(f"seed {options.seed}")
    policy = Restart(intensity=1000, period=10, backoff=Backoff(0))
    async with (
        this_host().spawn_procs(
            {"gpus": POOL}, supervision=policy, name="pool", output="discard", preload=("numpy",)
        ) as procs,
        this_host().spawn_procs({}, name="steady", preload=("numpy",)) as steady,
    ):
        pool = await procs.spawn("pool", Served, list(range(1000)))
        relay = await steady.spawn("relay", Relay, pool)
        [spawner] = children(os.getpid())
        load = Load(pool, relay, Random(options.seed))
        soak = Soak(
            options,
            load,
            Saboteur(Random(options.seed)),
            {"controller": os.getpid(), "spawner": spawner, "relay": await relay.pid.call_one()},
        )
        async with trio.open_nursery() as nursery:
            await nursery.start(soak.saboteur.watch, procs)
            await soak.run()
            nursery.cancel_scope.cancel()
    return soak.problems


if __name__ == "__main__":
    BEGAN = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30, help="of load and kills (default: %(default)s)")
    parser.add_argument("--every", type=float, default=2, help="seconds between two kills (default: %(default)s)")
    parser.add_argument("--fast", type=int, default=0, help="restarts before, without load (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of who is killed how (default: %(default)s)")
    found = trio.run(main, parser.parse_args())
    for problem in found:
        say(f"PROBLEM: {problem}")
    sys.exit(bool(found))
