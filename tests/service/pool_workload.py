"""A mixed workload over a pool: callers, sessions, groups, pauses, rolls and resizes while replicas die and stall.

Its rules, which name what they find:

- PW-1: each request ends once, by its value, or by an error that something explains.
- PW-2: a request starts once, unless its endpoint is idempotent or its replica has died before it started.
- PW-3: no request starts, and none runs, inside of a pause that waits or aborts.
- PW-4: the queue and the replicas keep their bounds.
- PW-5: when all requests are over the counts close, and no replica is said to run anything.
- PW-6: an idempotent request does not fail by a death, and no request by one before it was delivered.
- PW-7: a session that says that it has not moved was served by one replica.
- PW-8: a group that is cancelled is cancelled whole.
- PW-9: once replicas have come back, each gets requests again.
- PW-10: requests of one priority go in the order in which they were made, as far as one replica runs them together.
- PW-11: items of a stream come in order, none missing and none twice; all of them before its end, or its own error.
- PW-12: when the block of a stream is left, its generator has ended, unless its replica has not acknowledged in time.
- PW-13: a stream that has given an item does not start again.
- PW-14: a generator is at most the window ahead of its consumer.
- PW-15: a request runs on no replica that lacks the latest update, and no incarnation gets one twice.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import attrs
import trio

import trimesh
from trimesh import (
    Actor,
    Backoff,
    Overloaded,
    ProcDied,
    RemoteCancelled,
    Restart,
    Retry,
    Unresponsive,
    endpoint,
    limits,
)
from trimesh.service import Paused, Rate, open_pool
from trimesh.testing.simulated.seeded_run import SeededOptions, SeededOutcome, run_once

REPLICAS = 3
CONCURRENCY = 2
QUEUE = 3
CALLERS = 12
REQUESTS = 4
"""Of each caller."""

WINDOW = 2
"""Items that a stream may be ahead."""

FLAKY_SECONDS = 1.2
"""Idempotent requests that are to take longer fail once by an error that is retried; slow ones are hedged."""

POLICIES: dict[str, Any] = {"retry": Retry(1, on=ConnectionError), "hedge": 1.0, "budget": 1.0, "rate": Rate(50)}

HEALED = Restart("one_for_one", intensity=10_000, period=60, backoff=Backoff(0.5, cap=1))
STATES = (
    "a replica has died",
    "a request was made again",
    "the queue was full",
    "a request was aborted",
    "a move",
    "a stream was made again",
    "a stream was left early",
    "a replica has died in a stream",
    "a stream was aborted",
)


@attrs.define(eq=False)
class Ledger:
    """What has happened where. Simulated processes share this process, so it sees all of them."""

    starts: dict[int, int] = attrs.field(factory=dict[int, int])
    ranks: dict[int, int] = attrs.field(factory=dict[int, int])
    order: list[int] = attrs.field(factory=list[int])
    is_quiet: bool = False
    breaches: list[str] = attrs.field(factory=list[str])
    leaving: set[int] = attrs.field(factory=set[int])
    groups: dict[str, set[int]] = attrs.field(factory=dict[str, set[int]])
    version: int = 0
    is_flaky: bool = False
    generating: set[tuple[int, int]] = attrs.field(factory=set[tuple[int, int]])
    late: list[tuple[int, int]] = attrs.field(factory=list[tuple[int, int]])
    paused: list[tuple[int, int]] = attrs.field(factory=list[tuple[int, int]])
    replicas: dict[int, int] = attrs.field(factory=dict[int, int])
    given: dict[int, int] = attrs.field(factory=dict[int, int])

    def breach(self, rule: str, text: str) -> None:
        self.breaches.append(f"{rule}: {text}")

    def start(self, number: int) -> None:
        self.starts[number] = self.starts.get(number, 0) + 1
        self.ranks[number] = trimesh.current_rank()
        self.order.append(number)
        if self.is_quiet:
            self.breach("PW-3", f"request {number} starts inside of a pause")
        if self.given.get(number):
            self.breach("PW-13", f"stream {number} starts again after {self.given[number]} items")

    def generate(self, number: int, place: int) -> None:
        """Note that a generator makes an item."""
        if self.is_quiet:
            self.breach("PW-3", f"stream {number} goes on inside of a pause")
        if place > self.given.get(number, 0) + WINDOW + 1:  # the one that it makes, and one on its way
            self.breach("PW-14", f"stream {number} makes item {place}, and {self.given.get(number, 0)} were given")


LEDGERS: list[Ledger] = []
"""Of the run; the last one is the current."""

SERIALS = itertools.count()
"""Numbers of replicas: one that is restarted has another."""


class Replica(Actor):
    def __init__(self) -> None:
        self.serial = next(SERIALS)
        LEDGERS[-1].replicas[trimesh.current_rank()] = self.serial
        self.version = 0

    @endpoint(group="updates")
    async def load(self, version: int, seconds: float) -> None:
        await trio.sleep(seconds)
        if self.version >= version:
            LEDGERS[-1].breach("PW-15", f"update {version} follows {self.version}")
        self.version = version

    @endpoint(concurrency=CONCURRENCY, group="work")
    async def once(self, number: int, seconds: float, *, is_bad: bool) -> int:
        LEDGERS[-1].start(number)
        if self.version < LEDGERS[-1].version:
            LEDGERS[-1].breach("PW-15", f"request {number} runs on a replica with update {self.version}")
        await trio.sleep(seconds)
        if is_bad:
            raise ValueError(number)
        return number

    @endpoint(concurrency=CONCURRENCY, group="work", idempotent=True)
    async def again(self, number: int, seconds: float, *, is_bad: bool) -> int:
        if LEDGERS[-1].is_flaky and seconds > FLAKY_SECONDS and number not in LEDGERS[-1].starts:
            LEDGERS[-1].start(number)
            raise ConnectionError(number)
        return await Replica.once(self, number, seconds, is_bad=is_bad)

    @endpoint(concurrency=CONCURRENCY, group="work")
    async def items_once(self, number: int, seconds: float, count: int, *, is_bad: bool) -> AsyncGenerator[int, None]:
        ledger = LEDGERS[-1]
        ledger.start(number)
        ledger.generating.add((number, self.serial))
        try:
            await trio.sleep(3 * seconds)
            for place in range(count):
                await trio.sleep(seconds)
                ledger.generate(number, place)
                yield place
            if is_bad:
                raise ValueError(number)
        finally:
            ledger.generating.discard((number, self.serial))

    @endpoint(concurrency=CONCURRENCY, group="work", idempotent=True)
    async def items_again(self, number: int, seconds: float, count: int, *, is_bad: bool) -> AsyncGenerator[int, None]:
        async with aclosing(Replica.items_once(self, number, seconds, count, is_bad=is_bad)) as items:
            async for place in items:
                yield place


@attrs.define(eq=False)
class Caller:
    """One task that makes requests, one after the other."""

    name: int
    pool: Any
    chaos: Any
    ledger: Ledger

    async def run(self) -> None:
        for step in self.chaos.steps(range(REQUESTS), f"caller{self.name}"):
            dice = self.chaos.draw("request", self.name, step)
            number = self.name * 1_000 + step
            await trio.sleep(dice.uniform(0, 1))
            kind = dice.random()
            if kind < 0.2:
                await self.converse(number, dice)
            elif kind < 0.55:
                await self.read(self.pool, number, dice)
            else:
                await self.ask(self.pool, number, dice)

    async def ask(self, pool: Any, number: int, dice: Any) -> str:
        is_idempotent, is_bad = dice.random() < 0.5, dice.random() < 0.1
        group = dice.choice(["red", "blue"])
        when_full = dice.choice(["wait", "refuse"])
        some = pool.options(
            priority=dice.choice([0, 0, 1]), cost=dice.uniform(0.5, 2), group=group, when_full=when_full
        )
        verb = some.again if is_idempotent else some.once
        limit = dice.uniform(0.1, 3) if dice.random() < 0.2 else 1_000.0
        members = self.ledger.groups.setdefault(group, set())
        members.add(number)
        outcome = "left"
        try:
            with trio.move_on_after(limit) as scope:
                value = await verb(number, dice.uniform(0, 1.5), is_bad=is_bad)
                outcome = "value"
                if value != number or is_bad:
                    self.ledger.breach("PW-1", f"request {number} gave {value!r}")
            if scope.cancelled_caught and limit == 1_000.0:
                self.ledger.breach("PW-1", f"request {number} was never served")
        except Exception as error:  # noqa: BLE001 - judged
            outcome = self.judge(error, number, is_idempotent=is_idempotent, is_bad=is_bad)
        finally:
            members.discard(number)
        starts = self.ledger.starts.get(number, 0)
        if not is_idempotent and starts > 1:
            self.ledger.breach("PW-2", f"request {number} has started {starts} times")
        if is_idempotent and starts > 1:
            self.chaos.sometimes("a request was made again")
        return outcome

    def judge(self, error: Exception, number: int, *, is_idempotent: bool, is_bad: bool) -> str:
        match error:
            case ValueError() if is_bad and error.args == (number,):
                return "bad"
            case Overloaded():
                self.chaos.sometimes("the queue was full")
                return "refused"
            case Paused():
                self.chaos.sometimes("a request was aborted")
                return "aborted"
            case RemoteCancelled(reason="group"):
                return "cancelled"
            case Unresponsive():
                return "abandoned"
            case ProcDied():
                self.chaos.sometimes("a replica has died")
                if is_idempotent or not error.maybe_executed:
                    self.ledger.breach("PW-6", f"request {number} has failed by {error!r}")
                return "died"
            case _:
                self.ledger.breach("PW-1", f"request {number} has failed by {error!r}")
                return "unknown"

    async def read(self, pool: Any, number: int, dice: Any) -> str:
        """Read a stream: to its end or not, quickly or not."""
        is_idempotent, is_bad = dice.random() < 0.5, dice.random() < 0.1
        group, priority = dice.choice(["red", "blue"]), dice.choice([0, 0, 1])
        some = pool.options(priority=priority, cost=dice.uniform(0.5, 2), group=group)
        verb = some.stream.items_again if is_idempotent else some.stream.items_once
        limit = dice.uniform(0.1, 3) if dice.random() < 0.2 else 1_000.0
        count, leaves_after = dice.randrange(8), dice.randrange(8) if dice.random() < 0.3 else 1_000
        pause = dice.uniform(0, 1.5) if dice.random() < 0.3 else 0.0
        members = self.ledger.groups.setdefault(group, set())
        members.add(number)
        found: list[int] = []
        outcome, left_at, is_whole = "left", 0.0, False
        try:
            with trio.move_on_after(limit) as scope:
                async with verb(number, dice.uniform(0, 0.4), count, is_bad=is_bad) as items:
                    try:
                        await trio.sleep(pause)
                        async for item in items:
                            found.append(item)
                            self.ledger.given[number] = len(found)
                            if len(found) > leaves_after:
                                self.chaos.sometimes("a stream was left early")
                                break
                        else:
                            outcome, is_whole = "value", True
                    except Exception:
                        is_whole = True  # behind all items that have arrived
                        raise
                    finally:
                        left_at = trio.current_time()
            if scope.cancelled_caught and limit == 1_000.0:
                self.ledger.breach("PW-1", f"stream {number} was never served")
        except Exception as error:  # noqa: BLE001 - judged
            outcome = self.judge(error, number, is_idempotent=is_idempotent and not found, is_bad=is_bad)
        finally:
            members.discard(number)
        if outcome == "value" and is_bad:
            self.ledger.breach("PW-1", f"stream {number} has ended without its error")
        if found != list(range(len(found))) or (is_whole and outcome in ("value", "bad") and len(found) != count):
            self.ledger.breach("PW-11", f"stream {number} of {count} items gave {found}, then {outcome}")
        self.check_stream(number, outcome, is_idempotent=is_idempotent, left_at=left_at)
        return outcome

    def check_stream(self, number: int, outcome: str, *, is_idempotent: bool, left_at: float) -> None:
        ledger = self.ledger
        if left_at and trio.current_time() - left_at < limits.STALLED_ACK_SECONDS:  # else it was abandoned
            ledger.late += [one for one in ledger.generating if one[0] == number]
        starts = ledger.starts.get(number, 0)
        if starts > 1:
            self.chaos.sometimes("a stream was made again")
            if not is_idempotent:
                ledger.breach("PW-2", f"stream {number} has started {starts} times")
        if outcome == "died":
            self.chaos.sometimes("a replica has died in a stream")
        elif outcome == "aborted":
            self.chaos.sometimes("a stream was aborted")

    async def converse(self, number: int, dice: Any) -> None:
        async with self.pool.session(f"session {number}") as session:
            ranks: set[int] = set()
            for turn in range(3):
                outcome = await self.ask(session, number + 100_000 * (turn + 1), dice)
                if outcome == "value":
                    ranks.add(self.ledger.ranks[number + 100_000 * (turn + 1)])
            if session.moved:
                self.chaos.sometimes("a move")
            elif len(ranks) > 1:
                self.ledger.breach("PW-7", f"the session of request {number} was at {ranks}")


async def grow(pool: Any) -> None:
    """Take all replicas again; growth is all or nothing (P6), so it fails with a process that dies meanwhile."""
    while True:
        try:
            return await pool.resize(REPLICAS)
        except* trimesh.ProcDied:
            await trio.sleep(0.1)


async def disturb(pool: Any, chaos: Any, ledger: Ledger) -> None:
    """Pause, roll, resize and cancel groups, one after the other."""
    for step in chaos.steps(range(7), "disturber"):
        dice = chaos.draw("disturber", step)
        await trio.sleep(dice.uniform(0.2, 2))
        match dice.choice(["keep", "wait", "abort", "roll", "resize", "cancel", "update"]):
            case "update":
                await update(pool, ledger, dice.uniform(0, 0.5), at_most=dice.choice([1, 2, REPLICAS]))
            case "roll":
                async with pool.rolling(at_most=dice.choice([1, 2])) as replicas:
                    async for _ in replicas:
                        out = [one for one in pool.statistics().replicas if one.is_drained]
                        most = REPLICAS if ledger.version else 2  # one that is back waits for its update beside
                        if not 1 <= len(out) <= most or all(one.running for one in out):
                            ledger.breach("PW-4", f"replicas are out of service: {out}")
                        await trio.sleep(dice.uniform(0, 0.5))
            case "resize":
                await pool.resize(dice.choice([1, 2]))
                await trio.sleep(dice.uniform(0, 2))
                await grow(pool)
            case "cancel":
                group = dice.choice(["red", "blue"])
                members = ledger.groups.get(group, set())
                wanted, ended = len(members - ledger.leaving), pool.statistics()
                ledger.leaving |= members  # a replica that lags keeps them for a while
                under_way = ended.running + ended.queued + ended.arriving
                found = pool.cancel(group=group, reason="group")
                # A request whose caller is just being woken by its end is not under way any more.
                if found > wanted or (found < wanted and under_way == sum(map(len, ledger.groups.values()))):
                    ledger.breach("PW-8", f"{found} of {wanted} requests were cancelled")
            case mode:
                await pause(pool, mode, dice.uniform(0, 1), ledger)


async def pause(pool: Any, mode: str, seconds: float, ledger: Ledger) -> None:
    begun = trio.current_time()
    async with pool.paused(mode):
        if mode != "keep":
            if trio.current_time() - begun < limits.STALLED_ACK_SECONDS:  # else some may be abandoned
                read = set().union(*ledger.groups.values())
                ledger.paused += [one for one in ledger.generating if one[0] in read]
            if pool.statistics().running:
                ledger.breach("PW-3", f"requests run inside of a pause: {pool.statistics()}")
            ledger.is_quiet = True
        await trio.sleep(seconds)
        ledger.is_quiet = False


async def update(pool: Any, ledger: Ledger, seconds: float, at_most: int) -> None:
    version = ledger.version + 1

    async def load(replica: Any) -> None:
        await replica.load.call(version, seconds)

    await pool.each(load, at_most=at_most)
    ledger.version = version


async def sample(pool: Any, ledger: Ledger) -> None:
    """Look at the bounds."""
    while True:
        statistics = pool.statistics()
        again = min(statistics.retried, REPLICAS * CONCURRENCY)  # they come beside the bound
        if statistics.queued > QUEUE + again or any(one.running > CONCURRENCY for one in statistics.replicas):
            ledger.breach("PW-4", f"bounds are broken: {statistics}")
        await trio.sleep(0.05)


async def order_holds(pool: Any, ledger: Ledger) -> None:
    """Fill one replica with requests of one priority, and see them served in their order."""
    await pool.resize(1)
    numbers = [900_000 + number for number in range(CONCURRENCY + QUEUE)]
    async with trio.open_nursery() as nursery:
        for number in numbers:
            nursery.start_soon(lambda number=number: pool.again(number, 1.0, is_bad=False))
            await trio.sleep(0.01)
    await pool.resize(REPLICAS)
    found = [number for number in ledger.order if number >= 900_000]
    # Those that get their replica at one moment are sent by tasks of their own, in any order.
    if any(abs(found.index(number) - place) >= CONCURRENCY for place, number in enumerate(numbers)):
        ledger.breach("PW-10", f"requests were served in the order {found}")


async def serves_again(pool: Any, ledger: Ledger) -> None:
    """All replicas come back, and each gets requests."""
    ranks: set[int] = set()
    number = 800_000
    with trio.move_on_after(60):
        while len(ranks) < REPLICAS:
            number += 1
            await pool.again(number, 0.0, is_bad=False)
            ranks.add(ledger.ranks[number])
            await trio.sleep(0.1)
    if len(ranks) < REPLICAS:
        ledger.breach("PW-9", f"only the replicas {ranks} serve: {pool.statistics()}")


def counts_close(pool: Any, ledger: Ledger) -> None:
    found = pool.statistics()
    over = found.succeeded + found.failed + found.cancelled + found.refused
    idle = not (
        found.running or found.reading or found.queued or found.arriving or found.queued_bytes or found.is_paused
    )
    loads = [(one.running, one.cost) for one in found.replicas]
    if found.made != over or not idle or any(load != (0, 0.0) for load in loads):
        ledger.breach("PW-5", f"counts do not close: {found}")
    # A killed process runs no clean-up, so only those count that are the same to the end.
    living = ledger.replicas.values()
    if going := [one for one in (*ledger.late, *ledger.generating) if one[1] in living]:
        ledger.breach("PW-12", f"generators of streams that were left went on: {going}")
    if going := [one for one in ledger.paused if one[1] in living]:
        ledger.breach("PW-3", f"generators ran inside of a pause: {going}")


async def pool_workload(mesh: Any, chaos: Any, *, is_elastic: bool = False) -> None:
    """Run it, and raise what broke a rule first.

    Where the pool is elastic, resizes end and start processes, and requests are retried, hedged and limited.
    """
    ledger = Ledger()
    LEDGERS[:] = [ledger]
    replicas = await mesh.spawn("replicas", Replica)
    plan = chaos.plan(kill=2, lag=1, slow=1, delay=1, every=(0.5, 4), max_down=1)
    elastic: dict[str, Any] = {"along": "gpus", "procs": mesh, **POLICIES} if is_elastic else {}
    ledger.is_flaky = is_elastic
    pools = open_pool(replicas, concurrency=CONCURRENCY, queue=QUEUE, **elastic)
    with trimesh.configured(stream_window=WINDOW):
        await work_on(pools, chaos, plan, ledger)
    if ledger.breaches:
        raise AssertionError(ledger.breaches[0])


async def work_on(pools: Any, chaos: Any, plan: Any, ledger: Ledger) -> None:
    async with pools as pool, trio.open_nursery() as nursery:
        nursery.start_soon(sample, pool, ledger)
        async with chaos.safety(plan, duration=3_000), trio.open_nursery() as work:
            work.start_soon(disturb, pool, chaos, ledger)
            for name in range(CALLERS):
                work.start_soon(Caller(name, pool, chaos, ledger).run)
        async with chaos.liveness(within=200):
            await serves_again(pool, ledger)
            await order_holds(pool, ledger)
        counts_close(pool, ledger)
        nursery.cancel_scope.cancel()


def run_schedule(seed: int, body: Callable[..., Any] = pool_workload) -> SeededOutcome:
    """Run one schedule, as the simulated test does."""
    options = SeededOptions({"gpus": REPLICAS}, {"supervision": HEALED})
    return run_once(body, {"mesh": None, "chaos": None}, options, seed)
