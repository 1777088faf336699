"""Random mixtures of streams and maps, cancels and deaths over simulated processes, and what must hold of each.

Everything is drawn from the seed, as in the random mixtures of calls. A failure is repeated by running its seed alone.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from typing import Any

import attrs
import pytest
import trio
from tests.conformance.meshes import Lag, SimBackend
from tests.conformance.seeds import run_hundred
from tests.conformance.test_seeds import Jitter, leaves_of

import trimesh
from trimesh import Actor, MeshErrorGroup, MeshStopped, ProcDied, RemoteCancelled, Retry, Unresponsive, endpoint, limits

SEEDS = 20
PROCS = 3
TASKS = 5
USES = 4
SLOWEST = 1.5 * limits.CANCEL_ACK_SECONDS
"""A generator that unwinds as slowly as this is given up by its consumer."""

MEMBERS = ["finish", "finish", "finish", "fail", "hold", "fail when cancelled", "unwind slowly"]
CONSUMERS = ["to the end", "to the end", "break", "raise", "deadline", "with children"]


class Planned(Exception):
    """Raised by an endpoint because the plan says so; carries (use, rank or item)."""


class Left(Exception):
    """Raised by the body of a block."""


@attrs.frozen
class Stream:
    """One use of `stream`, or of `map`.

    Attributes:
        number: Of the use.
        verb: "stream" of a generator, "plain" stream, "map", or "map again" with a retry.
        counts: Items of each rank; for a map the first says how many items there are.
        members: What each rank does after them; for a map, what it does with its items.
        paces: Seconds between the items of each rank.
        consumer: How the consumer leaves.
        after: Items after which it does.
        pace: Seconds that it takes for an item.
    """

    number: int
    verb: str
    counts: tuple[int, ...]
    members: tuple[str, ...]
    paces: tuple[float, ...]
    window: int
    merge: Any
    consumer: str
    after: int
    pace: float
    deadline: float


@attrs.define(eq=False)
class Ending:
    """What one use has come to."""

    found: dict[int, list[int]] = attrs.field(factory=lambda: defaultdict(list))
    error: BaseException | None = None
    cancelled: bool = False
    at_end: bool = False


class Journal:
    """What happened in all simulated processes of the running seed; they share this memory."""

    def __init__(self) -> None:
        self.log: list[tuple[int, int, str]] = []
        self.runs: Counter[tuple[int, int]] = Counter()
        self.endings: dict[int, Ending] = defaultdict(Ending)

    def add(self, use: int, rank: int, what: str) -> None:
        self.log.append((use, rank, what))


journal = Journal()


class Member(Actor):
    """Yields, or returns, what a use says."""

    @endpoint(concurrency=TASKS)
    async def items(self, use: Stream) -> AsyncIterator[int]:
        rank = trimesh.current_rank()
        journal.add(use.number, rank, "started")
        try:
            for number in range(use.counts[rank]):
                taken = len(journal.endings[use.number].found[rank])
                assert number + 1 - taken <= use.window + 1, "further ahead than its window"  # one is being handed over
                yield number
                await trio.sleep(use.paces[rank])
            await self.end(use, rank, use.members[rank])
        except trio.Cancelled:
            await self.unwind(use, rank, use.members[rank])
            raise
        journal.add(use.number, rank, "returned")

    @endpoint(concurrency=TASKS)
    async def result(self, use: Stream) -> int:
        rank = trimesh.current_rank()
        journal.add(use.number, rank, "started")
        try:
            await trio.sleep(use.paces[rank])
            await self.end(use, rank, use.members[rank])
        except trio.Cancelled:
            await self.unwind(use, rank, use.members[rank])
            raise
        journal.add(use.number, rank, "returned")
        return 0

    @endpoint(concurrency=TASKS, idempotent=True)
    async def work(self, item: tuple[Stream, int]) -> int:
        use, number = item
        journal.add(use.number, number, "started")
        journal.runs[use.number, number] += 1
        rank = trimesh.current_rank()
        how = use.members[number % PROCS] if use.verb == "map" else use.members[rank]
        try:
            await trio.sleep(use.paces[rank])
            if number % 3 == 0:
                await self.end(use, number, how)
        except trio.Cancelled:
            await self.unwind(use, number, how)
            raise
        journal.add(use.number, number, "returned")
        return number

    async def end(self, use: Stream, key: int, how: str) -> None:
        if how == "fail":
            journal.add(use.number, key, "raised")
            raise Planned(use.number, key)
        if how == "hold":
            await trio.sleep(1_000)

    async def unwind(self, use: Stream, key: int, how: str) -> None:
        if how == "unwind slowly":
            with trio.CancelScope(shield=True):
                await trio.sleep(SLOWEST)
        journal.add(use.number, key, "cancelled")
        if how == "fail when cancelled":
            journal.add(use.number, key, "raised")
            raise Planned(use.number, key) from None


class Plan:
    """All that happens under one seed."""

    def __init__(self, seed: int) -> None:
        self.random = draw = random.Random(seed)
        self.kill_at = draw.uniform(0, 8) if draw.random() < 0.3 else None
        self.victim = draw.randrange(PROCS)
        self.uses = [[self.use(USES * task + index) for index in range(USES)] for task in range(TASKS)]

    def use(self, number: int) -> Stream:
        draw = self.random
        consumer = draw.choice(CONSUMERS)
        members = tuple(draw.choice(MEMBERS) for _ in range(PROCS))
        if consumer == "to the end":  # somebody has to end it
            members = tuple("finish" if how == "hold" else how for how in members)
        return Stream(
            number,
            draw.choice(["stream", "stream", "stream", "plain", "map", "map again"]),
            tuple(draw.choice([0, 1, 5, 30]) for _ in range(PROCS)),
            members,
            tuple(draw.choice([0.0, 0.0, 0.1]) for _ in range(PROCS)),
            draw.choice([1, 2, 3, 7, 64]),
            draw.choice(["fail_fast", "collect"]),
            consumer,
            draw.choice([0, 1, 10]),
            draw.choice([0.0, 0.0, 0.05]),
            draw.uniform(0, 3),
        )


async def consume(members: Any, use: Stream) -> None:
    """Use the verb as the plan says; note what comes of it."""
    ending = journal.endings[use.number]
    scope = trio.CancelScope()
    if use.consumer in ("deadline", "with children"):
        scope.deadline = trio.current_time() + use.deadline
    try:
        with scope:
            await take(members, use, ending)
    except Exception as error:  # noqa: BLE001 - judged afterwards
        ending.error = error
    ending.cancelled = scope.cancelled_caught


async def take(members: Any, use: Stream, ending: Ending) -> None:
    if use.verb == "stream":
        results = members.items.options(window=use.window, merge=use.merge).stream(use)
    elif use.verb == "plain":
        results = members.result.options(merge=use.merge).stream(use)
    else:
        handle = members.work.options(merge=use.merge, window=use.window)
        if use.verb == "map again":
            handle = handle.options(retry=Retry(2, on=Planned, backoff=0.1))
        results = handle.map((use, number) for number in range(use.counts[0]))
    count = 0
    async with results:
        if use.consumer == "with children":  # consume in another task than the one that opened it
            async with trio.open_nursery() as nursery:
                nursery.start_soon(drain, results, use, ending)
            ending.at_end = True
            return
        while (found := await anext(results, None)) is not None:
            note(ending, use, found)
            await trio.sleep(use.pace)
            count += 1
            if count > use.after and use.consumer in ("break", "raise"):
                if use.consumer == "raise":
                    raise Left
                return
        ending.at_end = True


async def drain(results: Any, use: Stream, ending: Ending) -> None:
    async for found in results:
        note(ending, use, found)


def note(ending: Ending, use: Stream, found: tuple[Any, int]) -> None:
    key, value = found
    ending.found[key if isinstance(key, int) else key.rank].append(value)


# ---- judging ---------------------------------------------------------------------------------------------------------


def check_items(use: Stream, ending: Ending) -> None:
    """S01, S02: what came is in order, without gap, and each once."""
    for key, values in ending.found.items():
        if use.verb.startswith("map"):
            assert values == [key]
        else:
            assert values == list(range(len(values)))


def check_end(use: Stream, ending: Ending, *, killed: bool) -> None:
    """S05, S06: a stream at its end has given everything; one that failed what was sent before the failure."""
    failed = {leaf.args[1] for leaf in leaves_of(ending.error) if isinstance(leaf, Planned)}
    counts = (1,) * PROCS if use.verb == "plain" else use.counts
    if use.verb.startswith("map"):
        if ending.at_end and ending.error is None:
            assert sorted(ending.found) == list(range(use.counts[0]))
        return
    if ending.at_end and ending.error is None:
        assert {rank: len(values) for rank, values in ending.found.items() if values} == {
            rank: count for rank, count in enumerate(counts) if count
        }
    if use.verb == "stream" and use.consumer == "to the end" and not killed:  # a death cancels consumers
        for rank in failed:
            if use.members[rank] == "fail":
                assert len(ending.found[rank]) == counts[rank], "an item before the failure is missing"


def check_errors(plan: Plan, *, killed: bool) -> None:
    """E02, E08: nothing that an endpoint raised is lost, and nothing comes out that nothing explains."""
    raised: dict[int, set[int]] = defaultdict(set)
    for use, key, what in journal.log:
        if what == "raised":
            raised[use].add(key)
    for use in (use for task in plan.uses for use in task):
        ending = journal.endings[use.number]
        told = {leaf.args[1] for leaf in leaves_of(ending.error) if isinstance(leaf, Planned)}
        assert told <= raised[use.number]
        for leaf in leaves_of(ending.error):
            if isinstance(leaf, Planned):
                assert leaf.args[0] == use.number
            elif isinstance(leaf, Left):
                assert use.consumer == "raise"
            elif isinstance(leaf, Unresponsive):
                assert "unwind slowly" in use.members
            else:
                assert isinstance(leaf, ProcDied | MeshStopped | RemoteCancelled), repr(leaf)
                assert killed
        if use.verb != "map again" and not killed:
            assert raised[use.number] == told, (use, ending.error)


def check_unwound(plan: Plan, *, killed: bool) -> None:
    """S04, S02: what started has ended, in one way; a map runs no item more often than it may."""
    ended: dict[tuple[int, int], list[str]] = defaultdict(list)
    for use, key, what in journal.log:
        ended[use, key].append(what)
    uses = {use.number: use for task in plan.uses for use in task}
    for (use, key), found in ended.items():
        if not killed:
            outcomes = sum(what in ("returned", "cancelled") for what in found)
            failed = sum(a == "raised" and b != "cancelled" for a, b in zip(found, [None, *found], strict=False))
            assert found.count("started") == outcomes + failed, (uses[use], key, found)
        assert found.count("started") <= (3 if uses[use].verb == "map again" else 1)


async def main(plan: Plan, backend: SimBackend) -> BaseException | None:
    """Run the plan; return what its block has raised."""

    async def task(members: Any, uses: list[Stream]) -> None:
        for use in uses:
            await consume(members, use)

    async def kill(procs: Any) -> None:
        assert plan.kill_at is not None
        await trio.sleep(plan.kill_at)
        backend.kill(procs, plan.victim)

    try:
        async with backend.procs({"n": PROCS}) as procs:
            members = await procs.spawn("members", Member)
            async with trio.open_nursery() as killer:
                if plan.kill_at is not None:
                    killer.start_soon(kill, procs)
                async with trio.open_nursery() as nursery:
                    for uses in plan.uses:
                        nursery.start_soon(task, members, uses)
                await trio.sleep(SLOWEST)  # what was given up ends, too
                killer.cancel_scope.cancel()
    except MeshErrorGroup as group:
        return group
    return None


def run_seed(seed: int) -> None:
    """Run one seed and judge it."""
    global journal  # noqa: PLW0603 - the simulated processes find it by this name
    journal = Journal()
    plan = Plan(seed)
    backend = SimBackend(seed)
    backend.lag = Jitter(random.Random(seed)) if seed % 2 else Lag()
    error: BaseException | None = None

    async def run() -> None:
        nonlocal error
        async with backend.open():
            error = await main(plan, backend)
            await backend.check_clean()

    backend.run(run)
    killed = error is not None
    for leaf in leaves_of(error):
        assert isinstance(leaf, ProcDied), repr(leaf)
    for use in (use for task in plan.uses for use in task):
        ending = journal.endings[use.number]
        check_items(use, ending)
        check_end(use, ending, killed=killed)
    check_errors(plan, killed=killed)
    check_unwound(plan, killed=killed)


@pytest.mark.seeds(SEEDS)
def test_random_streams_keep_the_promises(seed: int):
    """S01-S06, C01-C03, C12, E01-E03, E08; rules T1, C6, C7, X3."""
    run_seed(seed)


@pytest.mark.stress
@pytest.mark.parametrize("hundred", range(1, 31))
def test_many_random_streams_keep_the_promises(hundred: int):
    """The same for 3,000 more seeds."""
    run_hundred(hundred, run_seed)
