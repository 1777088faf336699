"""A mixed load on a pool whose members die: every answer is checked, every error must be a `ProcDied`."""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from random import Random
from typing import Any

import attrs
import numpy as np
import trio
import trio.lowlevel

import trimesh
from trimesh import Actor, ProcDied, Retry, endpoint

POOL = 4
BODY_BYTES = 600_000
"""Far above what travels inline, so that it takes a segment."""

BODIES_HELD = 6
"""Bodies of one sender that are held at once: more than the load ever holds. Segments are kept for the next bodies, so
that their number is that of the busiest moment; it can be compared if all have had the same."""

ITEMS = 40
AGAIN = Retry(8, on=(ProcDied,))


class Served(Actor):
    """A member of the pool, which may die at any moment."""

    def __init__(self, table: list[int]) -> None:
        self.table = table
        self.noted = 0

    @endpoint(concurrency=8, idempotent=True)
    async def square(self, number: int) -> int:
        """Return the square, after a moment."""
        await trio.sleep(0.002)
        return number * number

    @endpoint(idempotent=True)
    async def checksum(self, data: Any) -> int:
        """Return what a body comes to, after having spoilt this process's own view of it."""
        found = zlib.crc32(data)
        data[:] = 0
        return found

    @endpoint(idempotent=True)
    async def body(self, seed: int) -> Any:
        """Return a body."""
        return make_body(seed)

    @endpoint(concurrency=4, group="items")
    async def count(self, items: int) -> AsyncGenerator[int, None]:
        """Count to `items`."""
        for number in range(items):
            await trio.lowlevel.checkpoint()
            yield number

    @endpoint(concurrency=4, group="feeding")
    async def feed(self, port: Any, items: int) -> None:
        """Send so many items, and let go of the port."""
        async with port:
            for number in range(items):
                await port.send(number)

    @endpoint
    async def note(self) -> None:
        """Count a broadcast."""
        self.noted += 1

    @endpoint(concurrency=16, group="waiting")
    async def never(self) -> None:
        """Wait for the cancel."""
        await trio.sleep_forever()

    @endpoint(concurrency=4, group="asking", idempotent=True)
    async def ask(self, pool: Any, number: int) -> int:
        """Ask the next member, over a link between the two."""
        rank = (trimesh.current_rank() + 1) % POOL
        answer: int = await pool.slice(gpus=rank).square.options(retry=AGAIN).call_one(number)
        return answer


class Relay(Actor):
    """Lives in a process of its own that nobody kills, and calls the pool through a handle."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool

    @endpoint
    async def pid(self) -> int:
        """Return the process id."""
        return os.getpid()

    @endpoint(concurrency=4)
    async def square(self, rank: int, number: int) -> int:
        """Ask a member."""
        answer: int = await self.pool.slice(gpus=rank).square.options(retry=AGAIN).call_one(number)
        return answer

    @endpoint(concurrency=4, group="bodies")
    async def body(self, rank: int, seed: int) -> int:
        """Fetch a body from a member and return what it comes to."""
        return zlib.crc32(await self.pool.slice(gpus=rank).body.options(retry=AGAIN).call_one(seed))

    @endpoint
    async def hold(self, rank: int) -> None:
        """Hold bodies of a member, all at once."""
        await hold_bodies(self.pool.slice(gpus=rank))


async def hold_bodies(member: Any) -> None:
    """Hold so many bodies of one member at once that no load makes it need more segments, and give them back."""
    bodies: list[Any] = []

    async def fetch(seed: int) -> None:
        bodies.append(await member.body.call_one(seed))

    await say_what_is_held(member)
    async with trio.open_nursery() as nursery:
        for seed in range(BODIES_HELD):
            nursery.start_soon(fetch, seed)
    bodies.clear()
    await say_what_is_held(member)


async def say_what_is_held(member: Any) -> None:
    """See to it that a member knows which of its segments have been given back: that goes along with messages."""
    for number in range(3):
        await trio.sleep(0.01)
        await member.square.call_one(number)


def make_body(seed: int) -> Any:
    """Return a body that follows from the seed."""
    return np.arange(seed, seed + BODY_BYTES // 8, dtype=np.int64)


@attrs.define(eq=False)
class Load:
    """What is asked of the pool, and what came of it.

    Attributes:
        pool: Of `Served`, under `Restart`.
        relay: One `Relay`.
        chance: Decides who is asked.
        pause: Seconds between two requests of one kind.
        answered: Right answers, by kind.
        died: `ProcDied` instead of one, by kind.
    """

    pool: Any
    relay: Any
    chance: Random
    pause: float = 0.05
    answered: Counter[str] = attrs.field(factory=Counter[str])
    died: Counter[str] = attrs.field(factory=Counter[str])

    @property
    def kinds(self) -> dict[str, Callable[[int], Awaitable[None]]]:
        """Every kind of request, by name."""
        return {
            "call_one": self.call_one,
            "call": self.call,
            "choose": self.choose,
            "map": self.map,
            "stream": self.stream,
            "channel": self.channel,
            "body": self.body,
            "broadcast": self.broadcast,
            "cancel": self.cancel,
            "relay": self.ask_relay,
            "neighbour": self.ask_neighbour,
        }

    async def run(self) -> None:
        """Ask for ever, one task for each kind."""
        async with trio.open_nursery() as nursery:
            for kind, request in self.kinds.items():
                nursery.start_soon(self._repeat, kind, request)

    async def _repeat(self, kind: str, request: Callable[[int], Awaitable[None]]) -> None:
        number = 0
        while True:
            number += 1
            try:
                await request(number)
            except* ProcDied:
                self.died[kind] += 1
            await trio.sleep(self.pause)

    async def once(self) -> None:
        """Ask each kind of every member, so that everything that is made on demand is there."""
        for request in self.kinds.values():
            for number in range(POOL):
                await request(number)
        for rank in range(POOL):
            await hold_bodies(self.pool.slice(gpus=rank))
            await self.relay.hold.call_one(rank)
        data = [make_body(number) for number in range(BODIES_HELD)]
        async with trio.open_nursery() as nursery:
            for one in data:
                nursery.start_soon(self.pool.checksum.call, one)

    def _check(self, kind: str, found: object, expected: object) -> None:
        if found != expected:
            raise AssertionError(f"{kind}: expected {expected!r}, got {found!r}")
        self.answered[kind] += 1

    # ---- the kinds of requests ---------------------------------------------------------------------------------------

    async def call_one(self, number: int) -> None:
        """One member, not tried again."""
        member = self.pool.slice(gpus=self.chance.randrange(POOL))
        self._check("call_one", await member.square.call_one(number), number**2)

    async def call(self, number: int) -> None:
        """All members; those that die do not harm the others."""
        for outcome in (await self.pool.square.call_settled(number)).values():
            if outcome.ok:
                self._check("call", outcome.value, number**2)
            else:
                self.died["call"] += 1
                assert isinstance(outcome.error, ProcDied), outcome.error

    async def choose(self, number: int) -> None:
        """Whoever is there; tried again, so that it must be answered."""
        self._check("choose", await self.pool.square.options(retry=AGAIN).choose(number), number**2)

    async def map(self, number: int) -> None:
        """Each item exactly once."""
        async with self.pool.square.options(retry=AGAIN).map(range(number, number + ITEMS)) as results:
            found = [result async for result in results]
        self._check("map", sorted(found), [(index, (number + index) ** 2) for index in range(ITEMS)])

    async def stream(self, number: int) -> None:
        """Of each member all items in order, or the first of them and its death."""
        items: dict[int, list[int]] = {rank: [] for rank in range(POOL)}
        dead: list[int] = []
        try:
            async with self.pool.count.options(merge="collect", window=8).stream(ITEMS) as results:
                async for point, item in results:
                    items[point["gpus"]].append(item)
        except* ProcDied as group:
            self.died["stream"] += 1
            dead = [point["gpus"] for point in trimesh.coords(group)]
        for rank, found in items.items():
            self._check("stream", found, list(range(len(found) if rank in dead else ITEMS)))

    async def channel(self, number: int) -> None:
        """Items of a member's own port, in order; all of them unless it has died."""
        member = self.pool.slice(gpus=number % POOL)
        async with trimesh.open_channel(int, capacity=8) as (port, receiver), trio.open_nursery() as nursery:
            is_dead = False

            async def ask() -> None:
                nonlocal is_dead
                try:
                    await member.feed.call_one(port, ITEMS)
                except ProcDied:
                    is_dead = True
                    self.died["channel"] += 1
                finally:
                    await port.aclose()

            nursery.start_soon(ask)
            found = [item async for item in receiver]
        self._check("channel", found, list(range(len(found) if is_dead else ITEMS)))

    async def body(self, number: int) -> None:
        """Large bodies to all and from one."""
        data = make_body(number)
        for outcome in (await self.pool.checksum.call_settled(data)).values():
            if outcome.ok:
                self._check("body", outcome.value, zlib.crc32(data))
            else:
                assert isinstance(outcome.error, ProcDied), outcome.error
        came = await self.pool.slice(gpus=number % POOL).body.call_one(number)
        self._check("body", zlib.crc32(came), zlib.crc32(data))

    async def broadcast(self, _: int) -> None:
        """Nobody waits for it."""
        await self.pool.note.broadcast()
        self.answered["broadcast"] += 1

    async def cancel(self, _: int) -> None:
        """A call that is given up while it runs."""
        with trio.move_on_after(0.01) as scope:
            await self.pool.never.call()
        self._check("cancel", scope.cancelled_caught, expected=True)

    async def ask_relay(self, number: int) -> None:
        """By way of a process that follows the pool through a handle."""
        rank = number % POOL
        self._check("relay", await self.relay.square.call_one(rank, number), number**2)
        if number % 8 == rank:
            self._check("relay", await self.relay.body.call_one(rank, number), zlib.crc32(make_body(number)))

    async def ask_neighbour(self, number: int) -> None:
        """By way of a member that may die itself."""
        member = self.pool.slice(gpus=number % POOL)
        self._check("neighbour", await member.ask.call_one(self.pool, number), number**2)
