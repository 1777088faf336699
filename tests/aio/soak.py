"""Tasks of asyncio that call asyncio actors whose processes are killed: each call has one outcome, nothing is kept.

    python -m tests.aio.soak --minutes 10 --every 1

Tasks use each verb, with timeouts and cancels, on a mesh that restarts its members, while one of these gets SIGKILL by
its pid every second. At the end no call is under way, no task is left in either loop, and the controller and its
spawner have the descriptors, threads and shared memory that they had at the start, and not much more memory. Exit
status 0 says that all of it holds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine
from contextlib import suppress
from random import Random
from typing import Any

import attrs
from tests.aio.counted import SLOTS, AsyncioCounted
from tests.patience import HANG_SECONDS
from tests.stress.soak.gauges import Held, changes, children, holdings, resident_bytes

import trimesh
from trimesh import Backoff, ProcDied, Restart, Retry, endpoint
from trimesh.errors import leaves

MEMBERS, CALLERS = 3, 24
SECONDS = 0.01
"""Until calls are cut, at most: some have begun by then, some have ended."""

GROWTH_MIB_MAX = 24
"""Of the controller: some for caches and the allocator, which does not grow with the minutes."""

SETTLE_ROUNDS = 60
"""Counts that differ after so many half seconds differ for good; idle threads end after 10 s."""

HEALED = Restart("one_for_one", intensity=10_000, period=60, backoff=Backoff(0.01, cap=0.05))
"""The cap lets all members be there at once most of the time: calls to all of them wait for that."""


class Worker(AsyncioCounted):
    """Counts its calls, and streams."""

    @endpoint(concurrency=SLOTS, group="many")
    async def items(self, count: int) -> AsyncGenerator[int, None]:
        """Yield numbers."""
        for number in range(count):
            yield number

    @endpoint(concurrency=SLOTS, group="many", idempotent=True)
    async def again(self, number: int) -> int:
        """Return a number, some turns later."""
        for _ in range(number % 10):
            await asyncio.sleep(0)
        return number


@attrs.define(eq=False)
class Load:
    """Callers, what happens to them, and what it has come to."""

    procs: Any
    workers: Any
    dice: Random
    outcomes: Counter[str] = attrs.field(factory=Counter[str])
    problems: list[str] = attrs.field(factory=list[str])
    made: int = 0
    kills: int = 0

    # ---- calls -------------------------------------------------------------------------------------------------------

    @property
    def one(self) -> Any:
        """A member."""
        return self.workers.slice(gpus=self.dice.randrange(MEMBERS))

    async def call_one(self, number: int) -> object:
        return await self.one.turns.call_one(number, number % 20) == number

    async def queue(self, number: int) -> object:
        return await self.one.one_by_one.call_one(number) == number

    async def call(self, number: int) -> object:
        return set((await self.workers.turns.call(number, number % 20)).values()) == {number}

    async def settle(self, number: int) -> object:
        outcomes = (await self.workers.turns.call_settled(number, 3)).values()
        for outcome in outcomes:
            if not outcome.ok and not isinstance(outcome.error, ProcDied):
                raise outcome.error
        return all(outcome.value == number for outcome in outcomes if outcome.ok)

    async def choose(self, number: int) -> object:
        return await self.workers.turns.choose(number, 5) == number

    async def retry(self, number: int) -> object:
        retried = self.workers.again.options(retry=Retry(3, on=(ProcDied,)))
        return await retried.choose(number) == number

    async def relay(self, number: int) -> object:
        return await self.one.relay.call_one(self.one, number, "turns", 5) == number

    async def stream(self, number: int) -> object:
        async with self.one.items.stream(1000) as items:
            async for _, item in items:
                if item == number % 30:
                    return True
        return False

    async def start(self, number: int) -> object:
        started = [self.one.turns.call_one.start(number + step, 3) for step in range(3)]
        found = await asyncio.gather(*started, return_exceptions=True)
        for error in (one for one in found if isinstance(one, BaseException)):
            raise error
        return found == [number, number + 1, number + 2]

    async def time_out(self, number: int) -> object:
        try:
            async with asyncio.timeout(SECONDS * self.dice.random()):
                await self.one.hold.call_one(number)
        except TimeoutError:
            return True
        return False

    async def time_out_there(self, number: int) -> object:
        try:
            await asyncio.wait_for(self.one.relay.call_one(self.one, number, "hold"), SECONDS * self.dice.random())
        except TimeoutError:
            return True
        return False

    async def cancel(self, number: int) -> object:
        task = asyncio.create_task(self.one.hold.call_one(number))
        try:
            await asyncio.sleep(SECONDS * self.dice.random())
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return task.cancelled() or await task

    async def fail_group(self, number: int) -> object:
        async def fail() -> None:
            await asyncio.sleep(SECONDS * self.dice.random())
            raise LookupError

        async def together() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.one.hold.call_one(number))
                group.create_task(self.workers.hold.call(number))
                group.create_task(fail())

        # In a task of its own: before Python 3.13 a TaskGroup may forget to take back its cancel of this one.
        [error] = await asyncio.gather(asyncio.create_task(together()), return_exceptions=True)
        assert isinstance(error, BaseException)
        kinds = {type(leaf) for leaf in leaves(error)}
        if kinds == {LookupError}:
            return True
        raise error

    # ---- the load ----------------------------------------------------------------------------------------------------

    async def caller(self) -> None:
        """Make calls one after the other."""
        kinds = (
            *(self.call_one, self.queue, self.call, self.settle, self.choose, self.retry, self.relay, self.stream),
            *(self.start, self.time_out, self.time_out_there, self.cancel, self.fail_group),
        )
        task = asyncio.current_task()
        assert task is not None
        while not task.cancelling():  # an error of a call wins over a cancel that comes at the same time
            kind = self.dice.choice(kinds)
            self.made += 1
            await self.note(kind.__name__, kind(self.made))

    async def note(self, kind: str, call: Coroutine[Any, Any, object]) -> None:
        """Make a call, count how it ends."""
        try:
            async with asyncio.timeout(HANG_SECONDS) as limit:
                is_right = await call
        except asyncio.CancelledError:
            self.outcomes["cut"] += 1
            raise
        except Exception as error:  # noqa: BLE001 - counted
            found = Counter(type(leaf).__name__ for leaf in leaves(error))
            if limit.expired():
                self.problems.append(f"{kind} has hung for {HANG_SECONDS:.0f} s")
            elif not set(found) <= {"ProcDied", "LookupError"}:
                self.problems.append(f"{kind} raised {error!r} with {dict(found)}")
            self.outcomes["died"] += 1
        else:
            self.outcomes["right"] += 1
            if is_right is not True:
                self.problems.append(f"{kind} gave a wrong value")

    async def kill(self, every: float) -> None:
        """Kill a member now and then, by its pid."""
        while True:
            await asyncio.sleep(every)
            pid = self.dice.choice(self.procs.statistics().members).pid
            if pid is None:  # it is being started again
                continue
            with suppress(ProcessLookupError):  # its end is not known here yet
                os.kill(pid, signal.SIGKILL)
                self.kills += 1

    async def run(self, seconds: float, every: float) -> None:
        """Make calls for a while, with kills; cancel all of them in the midst, then look whether all is idle."""
        tasks = [asyncio.create_task(self.caller()) for _ in range(CALLERS)]
        tasks.append(asyncio.create_task(self.kill(every)))
        done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        _, stuck = await asyncio.wait(tasks, timeout=HANG_SECONDS)
        if stuck:
            self.problems.append(f"{len(stuck)} callers do not end by a cancel")
        self.problems += [f"a caller has ended by {task.exception()!r}" for task in done]
        await self.procs.settled()
        await self.check()

    async def tallies(self) -> Any:
        """Return the tallies of all members once their calls have ended: started ones outlive who awaits them."""
        for _ in range(SETTLE_ROUNDS):
            found = await self.workers.tally.call()
            if all((one.calls_queued, one.calls_running) == (0, 1) for one in found.values()):
                break
            await asyncio.sleep(0.5)
        return found

    async def check(self) -> None:
        """Look whether nothing is under way."""
        for point, tally in (await self.tallies()).items():
            unended = set(tally.begun) - tally.returned - tally.cancelled - tally.failed
            if unended or tally.unclean or (tally.calls_queued, tally.calls_running) != (0, 1):
                self.problems.append(f"{dict(point)} is not idle: {tally.calls_running} run, {sorted(unended)[:9]}")
            if max(tally.begun.values(), default=0) > 1 + CALLERS:  # a number goes to all members, or is relayed
                self.problems.append(f"{dict(point)} has run a call again and again: {tally.begun.most_common(3)}")
            if tally.tasks > 4 * SLOTS:
                self.problems.append(f"{dict(point)} has {tally.tasks} tasks left")
        if self.outcomes.total() != self.made:
            self.problems.append(f"{self.made} calls have {self.outcomes.total()} outcomes")
        for mesh in (self.procs, self.workers):
            statistics = mesh.statistics()
            if statistics.calls_unended or statistics.calls_waiting:
                self.problems.append(f"calls are under way: {statistics}")
        if left := asyncio.all_tasks() - {asyncio.current_task()}:
            self.problems.append(f"tasks are left: {left}")


async def settle(before: dict[str, Held]) -> list[str]:
    """Wait until what is held is as before; return what is not."""
    for _ in range(SETTLE_ROUNDS):
        now = holdings()
        if now == before:
            return []
        await asyncio.sleep(0.5)
    return changes(before, now)


async def main(options: argparse.Namespace) -> list[str]:
    """Run it; return what does not hold."""
    async with trimesh.aio.spawn_procs({"gpus": MEMBERS}, supervision=HEALED) as procs:
        workers = await procs.spawn("workers", Worker)
        load = Load(procs, workers, Random(options.seed))
        await load.run(2.0, 0.5)
        before, resident = holdings(), resident_bytes(os.getpid())
        await load.run(options.minutes * 60, options.every)
        load.problems += await settle(before)
        growth = (resident_bytes(os.getpid()) - resident) / (1 << 20)
        if growth > GROWTH_MIB_MAX:
            load.problems.append(f"the controller has grown by {growth:.1f} MiB")
        print(f"{load.kills} kills, {load.made} calls {dict(load.outcomes)}; grown by {growth:.1f} MiB")
    if left := children(os.getpid()):
        load.problems.append(f"processes are left: {left}")
    return load.problems


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.aio.soak")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two kills")
    parser.add_argument("--seed", type=int, default=0)
    found = asyncio.run(main(parser.parse_args()))
    print("\n".join(f"PROBLEM {one}" for one in found) or "all of it holds")
    sys.exit(bool(found))
