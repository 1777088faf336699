"""A loop of real processes, one of which is killed every second: nothing is lost, and nothing is kept.

    python -m tests.service.soak --minutes 10 --every 1

A pool of three generators, slots and a replay buffer are used by workers and a trainer while replicas are killed, the
pool is paused, resized and rolled. Each request has one outcome, each sample is accounted for once, and at the end the
controller and the spawner have the descriptors, threads and shared memory that they had at the start, and not much more
memory. Exit status 0 says that all of it holds.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import AsyncGenerator
from random import Random
from typing import Any

import attrs
import trio
from tests.stress.soak.gauges import Held, changes, holdings, resident_bytes

from trimesh import Actor, Backoff, ProcDied, RemoteCancelled, Restart, endpoint, this_host
from trimesh.errors import leaves
from trimesh.service import Paused, open_pool, open_replay, open_slots

REPLICAS, WORKERS, BATCH, STALENESS = 3, 6, 8, 1
GROWTH_MIB_MAX = 24
"""Of the controller: some for caches and the allocator, which does not grow with the minutes."""

SETTLE_ROUNDS = 60
"""Counts that differ after so many half seconds differ for good; idle threads end after 10 s."""

HEALED = Restart("one_for_one", intensity=10_000, period=60, backoff=Backoff(0.01))


class Generator(Actor):
    @endpoint(concurrency=4)
    async def generate(self, number: int) -> int:
        await trio.sleep(0.002)
        return number

    @endpoint(concurrency=4)
    async def count(self, number: int, items: int) -> AsyncGenerator[int, None]:
        for step in range(items):
            await trio.sleep(0.001)
            yield number + step

    @endpoint(idempotent=True)
    def pull(self, version: int) -> None:
        del version


@attrs.define(eq=False)
class Run:
    """What happens, and what it has come to."""

    procs: Any
    pool: Any
    slots: Any
    buffer: Any
    generators: Any
    dice: Random
    outcomes: Counter[str] = attrs.field(factory=Counter[str])
    trained: set[int] = attrs.field(factory=set[int])
    problems: list[str] = attrs.field(factory=list[str])
    asked: int = 0
    version: int = 0
    kills: int = 0

    async def work(self) -> None:
        while True:
            try:
                async with self.slots.lease() as lease:
                    number = self.asked = self.asked + 1
                    found = await self.ask(number)
                    if found != number:
                        self.problems.append(f"request {number} gave {found!r}")
                    self.outcomes["value"] += 1
                    await self.buffer.add((number, lease.version), version=lease.version)
            except (ProcDied, Paused, RemoteCancelled) as error:
                self.outcomes[type(error).__name__] += 1

    async def ask(self, number: int) -> int:
        """Make a request, or read a stream, to its end or not."""
        kind = self.dice.randrange(4)
        if kind < 2:
            return await self.pool.generate(number)
        read: list[int] = []
        async with self.pool.stream.count(number, 20) as items:
            async for item in items:
                read.append(item)
                if kind == 3 and len(read) == 5:
                    break
        if read != list(range(number, number + (5 if kind == 3 else 20))):
            self.problems.append(f"stream {number} gave {read}")
        return read[0]

    async def train(self) -> None:
        while True:
            async with self.buffer.taking(BATCH) as batch:
                await trio.sleep(0.01)
            for number, begun in batch:
                if number in self.trained or self.version - begun > STALENESS:
                    self.problems.append(f"sample {number} of version {begun} is trained at {self.version}")
                self.trained.add(number)
            async with self.pool.paused(self.dice.choice(["keep", "wait", "abort"])):
                await self.pull(self.version + 1)
            self.version += 1
            await self.slots.advance(version=self.version)

    async def pull(self, version: int) -> None:
        while True:
            try:
                await self.generators.pull.call(version)
                return
            except Exception as error:
                if not all(isinstance(leaf, ProcDied) for leaf in leaves(error)):
                    raise
                await trio.sleep(0.05)

    async def disturb(self, every: float) -> None:
        while True:
            await trio.sleep(every)
            await self.procs.kill([{"gpus": self.dice.randrange(REPLICAS)}])
            self.kills += 1
            match self.dice.randrange(4):
                case 0:
                    await self.pool.resize(2)
                    await self.pool.resize(REPLICAS)
                case 1:
                    async with self.pool.rolling() as replicas:
                        async for _ in replicas:
                            pass
                case _:
                    pass

    async def load(self, seconds: float, every: float) -> None:
        """Work for a while, with kills or without; then be idle."""
        async with trio.open_nursery() as nursery:
            for _ in range(WORKERS):
                nursery.start_soon(self.work)
            nursery.start_soon(self.train)
            if every:
                nursery.start_soon(self.disturb, every)
            await trio.sleep(seconds)
            nursery.cancel_scope.cancel()
        await self.procs.settled()
        await self.pull(self.version)
        self.check()

    def check(self) -> None:
        """Look whether counts close, with nothing under way."""
        requests, items, places = self.pool.statistics(), self.buffer.statistics(), self.slots.statistics()
        over = requests.succeeded + requests.failed + requests.cancelled
        if requests.made != over or requests.running or requests.reading or requests.queued:
            self.problems.append(f"requests do not close: {requests}")
        if items.added != items.stored + items.taken + sum(items.evicted.values()) or items.held:
            self.problems.append(f"items do not close: {items}")
        if places.begun != places.returned + places.handed_on or places.running:
            self.problems.append(f"slots do not close: {places}")


async def settle(before: dict[str, Held]) -> list[str]:
    """Wait until what is held is as before; return what is not."""
    for _ in range(SETTLE_ROUNDS):
        now = holdings()
        if now == before:
            return []
        await trio.sleep(0.5)
    return changes(before, now)


async def main(options: argparse.Namespace) -> list[str]:
    """Run it; return what does not hold."""
    async with (
        this_host().spawn_procs({"gpus": REPLICAS}, supervision=HEALED) as procs,
        open_slots(batch=BATCH, staleness=STALENESS) as slots,
        open_replay(capacity=100, slots=slots) as buffer,
    ):
        generators = await procs.spawn("generators", Generator)
        async with open_pool(generators, concurrency=4) as pool:
            run = Run(procs, pool, slots, buffer, generators, Random(options.seed))
            await run.load(2.0, 0.5)
            before, resident = holdings(), resident_bytes(os.getpid())
            await run.load(options.minutes * 60, options.every)
            run.problems += await settle(before)
            growth = (resident_bytes(os.getpid()) - resident) / (1 << 20)
            if growth > GROWTH_MIB_MAX:
                run.problems.append(f"the controller has grown by {growth:.1f} MiB")
            print(f"{run.kills} kills, {run.asked} requests {dict(run.outcomes)}, version {run.version}")
            print(f"{len(run.trained)} samples trained, {buffer.statistics()}; grown by {growth:.1f} MiB")
            return run.problems


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.service.soak")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two kills")
    parser.add_argument("--seed", type=int, default=0)
    found = trio.run(main, parser.parse_args())
    print("\n".join(f"PROBLEM {one}" for one in found) or "all of it holds")
    sys.exit(bool(found))
