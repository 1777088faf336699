"""What the tests of supervision share: readers of events, and waits for what they say."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio
from tests.conformance.probe import Probe

from trimesh import ActorFailed, Backoff, Died, Lagged, ProcDied, Restart, Restarted, endpoint
from trimesh._runtime.watch.events import EventStream
from trimesh.events import Event, MemberEvent

AT_ONCE = Backoff(0)


def restart(strategy: Any = "one_for_one", **options: Any) -> Restart:
    """Return a policy that restarts without a wait."""
    return Restart(strategy, **({"backoff": AT_ONCE} | options))


def remake(**options: Any) -> Restart:
    """Return a policy that makes actors anew without a wait."""
    return restart(**({"on": (ActorFailed,)} | options))


@attrs.define(eq=False)
class Log:
    """The events of a mesh so far, in order."""

    events: list[Event] = attrs.field(factory=list[Event])
    _news: trio.Event = attrs.field(factory=trio.Event)

    async def fill(self, stream: EventStream) -> None:
        async for event in stream:
            self.events.append(event)
            self._news.set()
            self._news = trio.Event()

    def of(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def ranks(self, kind: type[Event]) -> list[int]:
        """Return the ranks that records of one kind are about, in order."""
        return [event.point.rank for event in self.of(kind)]

    async def wait(self, kind: type[Event], count: int = 1) -> Any:
        """Wait until there are that many records of a kind; return the last of them."""
        while len(self.of(kind)) < count:
            await self._news.wait()
        return self.of(kind)[count - 1]

    def names(self) -> list[str]:
        """Return the records as text: `Died 1.0` is the death of incarnation 0 of rank 1."""
        return [
            f"{type(event).__name__} {event.point.rank}.{event.incarnation}"
            for event in self.events
            if isinstance(event, MemberEvent)
        ]

    @property
    def lost(self) -> int:
        return sum(event.count for event in self.of(Lagged))


@asynccontextmanager
async def reading(mesh: Any) -> AsyncGenerator[Log, None]:
    """Read the events of a mesh beside the body."""
    log = Log()
    async with mesh.events() as stream, trio.open_nursery() as nursery:
        nursery.start_soon(log.fill, stream)
        yield log
        nursery.cancel_scope.cancel()


async def kill_and_wait(backend: Any, procs: Any, log: Log, rank: int) -> Any:
    """Kill a process and wait until its replacement serves; return the record that says so."""
    count = len(log.of(Restarted))
    backend.kill(procs, rank)
    return await log.wait(Restarted, count + 1)


async def kill_and_see(backend: Any, procs: Any, log: Log, rank: int) -> Died:
    """Kill a process and wait until its owner knows."""
    count = len(log.of(Died))
    backend.kill(procs, rank)
    died: Died = await log.wait(Died, count + 1)
    assert isinstance(died.error, ProcDied)
    return died


class Ledger(Probe):
    """Remembers what it was made from, and counts."""

    def __init__(self, *made_from: Any, **named: Any) -> None:
        super().__init__()
        self.made_from = (made_from, named)
        self.count = 0

    @endpoint
    async def origin_of(self) -> Any:
        return self.made_from

    @endpoint
    async def bump(self) -> int:
        self.count += 1
        return self.count


class Fragile(Probe):
    """Does not start while there is a file at a path."""

    def __init__(self, path: str) -> None:
        super().__init__()
        if os.path.exists(path):
            raise ValueError("still broken")
