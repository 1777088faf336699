"""The actors of the mixed workload, and what they note: all simulated processes of a run share this memory."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio

import trimesh
from trimesh import Actor, endpoint, this_host
from trimesh._runtime.life.current import current_proc
from trimesh.ids import ProcId

ENDLESS = 1_000.0
"""Virtual seconds that outlast every run."""


class Planned(Exception):
    """Raised by an endpoint because its step says so; carries the number of the step."""


class BackgroundError(Exception):
    """Raised by a background task because a step says so."""


@attrs.define(eq=False)
class Journal:
    """What the actors of a run have noted.

    Attributes:
        starts: How often each message has started, by (step, mesh, rank).
        made: Names of the actor meshes whose members were made in each process, in order.
    """

    starts: Counter[tuple[int, str, int]] = attrs.field(factory=Counter)
    made: defaultdict[ProcId, list[str]] = attrs.field(factory=lambda: defaultdict(list))

    def started(self, token: int) -> None:
        point = trimesh.current_point()
        self.starts[token, trimesh.context().mesh, point.rank] += 1


journal = Journal()


def new_journal() -> Journal:
    """Begin the notes of a run."""
    global journal  # noqa: PLW0603 - actors are made by name and find it here
    journal = Journal()
    return journal


async def behave(token: int, how: str, seconds: float) -> int:
    """Do what a step says."""
    journal.started(token)
    try:
        if how == "hold":
            await trio.sleep(ENDLESS)
        elif how != "at once":
            await trio.sleep(seconds)
    except trio.Cancelled:
        if how == "unwind slowly":
            with trio.CancelScope(shield=True):
                await trio.sleep(seconds)
        if how == "fail when cancelled":
            raise Planned(token) from None
        raise
    if how == "fail":
        raise Planned(token)
    return token


def at_once(token: int, how: str) -> int:
    """Do what a step says, in a plain function."""
    journal.started(token)
    if how == "fail":
        raise Planned(token)
    return token


class Worker(Actor):
    """Does what messages say."""

    def __init__(self, fails_at: int | None = None) -> None:
        journal.made[current_proc().proc_id].append(trimesh.context().mesh)
        if trimesh.current_rank() == fails_at:
            raise Planned(-1)
        self.failing = trio.Event()

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.background)
            yield
            nursery.cancel_scope.cancel()

    async def background(self) -> None:
        await self.failing.wait()
        raise BackgroundError

    @endpoint
    async def one(self, token: int, how: str, seconds: float, ballast: bytes = b"") -> int:
        return await behave(token, how, seconds)

    @endpoint(concurrency=3)
    async def three(self, token: int, how: str, seconds: float, ballast: bytes = b"") -> int:
        return await behave(token, how, seconds)

    @endpoint(concurrency=8, idempotent=True)
    async def again(self, token: int, how: str, seconds: float, ballast: bytes = b"") -> int:
        return await behave(token, how, seconds)

    @endpoint
    def inline(self, token: int, how: str, seconds: float, ballast: bytes = b"") -> int:
        return at_once(token, how)

    @endpoint(thread=True)
    def threaded(self, token: int, how: str, seconds: float, ballast: bytes = b"") -> int:
        return at_once(token, how)

    @endpoint(concurrency=4)
    async def mapped(self, item: tuple[int, int, str, float]) -> tuple[int, int]:
        token, index, how, seconds = item
        await trio.sleep(seconds if how != "at once" else 0)
        if how == "fail" and index == 3:
            raise Planned(token)
        return token, index

    @endpoint(concurrency=4)
    async def items(self, token: int, count: int, how: str, seconds: float) -> AsyncGenerator[int, None]:
        for number in range(count):
            if how == "fail" and number == count - 1:
                raise Planned(token)
            yield number
            if how != "at once":
                await trio.sleep(seconds / count)

    @endpoint(concurrency=20)
    async def relay(self, target: Any, verb: str, name: str, args: tuple[Any, ...]) -> Any:
        """Be the caller."""
        return await getattr(getattr(target, name), verb)(*args)

    @endpoint(concurrency=20)
    async def burst(self, target: Any, token: int, count: int) -> list[Any]:
        """Call one actor several times at once."""
        found: list[Any] = []

        async def call(number: int) -> None:
            found.extend((await target.three.call_settled(token + number, "at once", 0.0)).values())

        async with trio.open_nursery() as nursery:
            for number in range(count):
                nursery.start_soon(call, number)
        return found

    @endpoint(concurrency=8)
    async def tell(self, port: Any, token: int, count: int, seconds: float) -> int:
        async with port:
            for number in range(count):
                await port.send((token, trimesh.current_rank(), number))
                if seconds:
                    await trio.sleep(seconds / count)
        return count

    @endpoint(concurrency=8)
    async def nest(self, token: int, seconds: float) -> int:
        """Own a process."""
        async with this_host().spawn_procs({"n": 1}, name=f"nested{token}") as procs:
            inner = await procs.spawn("inner", Inner)
            return await inner.echo.call_one(token, seconds)

    @endpoint
    async def fail_later(self) -> None:
        self.failing.set()


class Inner(Actor):
    """Lives in a process that a worker owns."""

    @endpoint
    async def echo(self, token: int, seconds: float) -> int:
        await trio.sleep(seconds)
        return token
