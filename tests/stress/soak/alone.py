"""Do one kind of operation at a time for long, and show that none leaves anything behind.

    python -m tests.stress.soak.alone --minutes 60
    python -m tests.stress.soak.alone --minutes 2 large_transfer pin

Each kind has its share of the minutes. It is done by the controller and, where it can be, by an actor of another
process. After a warm-up, memory of every process must not grow by more than `GROWTH_MAX_BYTES` from the first half of
the samples to the second; descriptors, threads and shared memory must be at the end what they were after the warm-up.
Exit status 0 says that all of it holds. The longer it runs, the smaller the leaks that it finds: 2 KiB of each
operation take a minute of actor meshes.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable

import attrs
import trio
from tests.stress.soak.gauges import Held, children, held, resident_bytes
from tests.stress.soak.operations import Doer, Operations, Peer

import trimesh
from trimesh import Backoff, Restart, this_host

GROWTH_MAX_BYTES = 1 << 20
"""Between the halves. The allocators of glibc and of the interpreter keep up to half a MiB for later."""

WARM_UP = 0.25
"""The share of the time that does not count: pools fill up, code is compiled, tables reach their size."""

SAMPLES = 40
BURST = 5
"""Operations between two looks at the clock."""

SETTLE_ROUNDS = 60
"""Counts that differ after so many half seconds differ for good; threads that idle end after 10 s."""

FETCH_BYTES = 4 << 20

Do = Callable[[int], Awaitable[None]]
"""Does an operation so many times."""


@attrs.define(eq=False)
class Alone:
    """A run.

    Attributes:
        seconds: For each kind.
        pids: Of the processes that are measured, by name.
        problems: What does not hold.
    """

    seconds: float
    pids: dict[str, int]
    problems: list[str] = attrs.field(factory=list[str])

    async def watch(self, kind: str, do: Do) -> None:
        """Do one kind for its time, and compare."""
        before = await self._repeat(do, self.seconds * WARM_UP, None)
        start = self._held()
        samples: list[dict[str, int]] = []
        count = await self._repeat(do, self.seconds * (1 - WARM_UP), samples)
        growth = self._growth(samples)
        for name, grown in growth.items():
            if grown > GROWTH_MAX_BYTES:
                self.problems.append(f"{kind}: the {name} grew by {grown >> 10} KiB in {count / 2:.0f} operations")
        grew = ", ".join(f"{name} {grown / 1024:+.0f}" for name, grown in growth.items())
        say(f"{kind:24} {before + count:7} times; KiB between the halves: {grew}")
        await self._compare(kind, start, do)

    async def _repeat(self, do: Do, seconds: float, samples: list[dict[str, int]] | None) -> int:
        began, count, due = time.monotonic(), 0, 0.0
        while (passed := time.monotonic() - began) < seconds:
            await do(BURST)
            count += BURST
            if samples is not None and passed >= due:
                gc.collect()
                samples.append({name: resident_bytes(pid) for name, pid in self.pids.items()})
                due += seconds / SAMPLES
        return count

    def _growth(self, samples: list[dict[str, int]]) -> dict[str, int]:
        half = len(samples) // 2
        first, second = (
            {name: statistics.median(one[name] for one in part) for name in self.pids}
            for part in (samples[:half], samples[half:])
        )
        return {name: round(second[name] - first[name]) for name in self.pids}

    def _held(self) -> dict[str, Held]:
        gc.collect()
        return {name: held(pid) for name, pid in self.pids.items()}

    async def _compare(self, kind: str, start: dict[str, Held], do: Do) -> None:
        end = self._held()
        for _ in range(SETTLE_ROUNDS):
            if end == start:
                return
            await trio.sleep(0.5)
            await do(1)  # a segment that was given back is named in the next message
            end = self._held()
        for name, one in end.items():
            if one != start[name]:
                self.problems.append(f"{kind}: the {name} held {start[name]} after the warm-up, {one} at the end")


def say(text: str) -> None:
    """Print a line with the time."""
    print(f"{time.monotonic() - BEGAN:7.1f} s  {text}", flush=True)


def times(operation: Callable[[], Awaitable[None]]) -> Do:
    """Return what does an operation again and again."""

    async def do(count: int) -> None:
        for _ in range(count):
            await operation()

    return do


async def watch_restarts(alone: Alone) -> None:
    """Kill the only member of a mesh under `Restart`, and wait until its replacement serves."""
    policy = Restart(intensity=1000, period=10, backoff=Backoff(0))
    async with this_host().spawn_procs({}, supervision=policy, name="mortal") as procs:
        mortal = await procs.spawn("mortal", Peer)

        async def kill() -> None:
            os.kill(await mortal.pid.call_one(), 9)
            while True:
                try:
                    await mortal.echo.call_one(0)
                except trimesh.ProcDied:
                    continue
                return

        await alone.watch("restart", times(kill))


async def watch_fetches(alone: Alone) -> None:
    """Issue an operation on a mesh tensor, and fetch what comes of it."""
    import torch  # the other kinds run without it

    async with this_host().spawn_procs({"gpus": 2}, preload=("torch",), name="ranks") as ranks:
        with ranks.activate():
            x = torch.ones(FETCH_BYTES // 4)

        async def fetch() -> None:
            value = await trimesh.fetch_shard(x + 1, gpus=0)
            assert value[0] == 2

        async def reduce() -> None:
            assert (await trimesh.fetch_shard((x[:1000] * 2).reduce("gpus"), gpus=1))[0] == 4

        await alone.watch("fetch", times(fetch))
        await alone.watch("tensor_reduce", times(reduce))


async def watch_meshes(alone: Alone) -> None:
    """Start and leave process meshes on a warm host."""
    async with this_host().warm() as host:

        async def live() -> None:
            async with host.spawn_procs({"gpus": 2}) as procs:
                await (await procs.spawn("peer", Peer)).echo.call(0)

        await alone.watch("proc_mesh", times(live))


ELSEWHERE: dict[str, Callable[[Alone], Awaitable[None]]] = {
    "restart": watch_restarts,
    "fetch": watch_fetches,  # and reductions
    "proc_mesh": watch_meshes,
}
"""Kinds that need meshes of their own."""


async def main(options: argparse.Namespace) -> list[str]:
    """Run; return the problems."""
    async with (
        this_host().spawn_procs({"gpus": 2}, name="peers", output="discard", preload=("numpy",)) as procs,
        this_host().spawn_procs({}, name="doing", preload=("numpy",)) as doing,
    ):
        peers = await procs.spawn("peers", Peer)
        doer = await doing.spawn("doer", Doer, peers)
        [spawner] = children(os.getpid())
        operations = Operations(peers, procs)
        pids = {"controller": os.getpid(), "spawner": spawner, "doer": await doer.pid.call_one()}
        pids |= {f"peer {rank}": pid for rank, pid in enumerate((await peers.pid.call()).values())}
        names = options.kinds or [*operations.kinds, *ELSEWHERE]
        runs = sum(1 if name in ELSEWHERE else 2 for name in names)
        alone = Alone(60 * options.minutes / runs, pids)
        for name in names:
            if name in ELSEWHERE:
                await ELSEWHERE[name](alone)
                continue
            await alone.watch(name, times(operations.kinds[name]))

            async def do(count: int, name: str = name) -> None:
                await doer.do.call_one(name, count)

            await alone.watch(f"{name} by an actor", do)
    return alone.problems


if __name__ == "__main__":
    BEGAN = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="all by default")
    parser.add_argument("--minutes", type=float, default=60, help="for all kinds together (default: %(default)s)")
    found = trio.run(main, parser.parse_args())
    for problem in found:
        say(f"PROBLEM: {problem}")
    sys.exit(bool(found))
