"""Actors that count what becomes of their calls, of Trio and of asyncio, for tests that cancel thousands of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import trio

import trimesh
from trimesh import Actor, endpoint

SLOTS = 64
"""Calls of a group that run at once."""


@attrs.frozen
class Tally:
    """What one actor knows about its calls.

    Attributes:
        begun: How often each number has begun.
        returned, cancelled, failed: Numbers that have ended so.
        unclean: Numbers whose task had a cancel request of another call when it began.
        calls_queued, calls_running: Of its mailbox, the call that asks included.
        tasks: Tasks in the asyncio loop of the actor, 0 in Trio.
    """

    begun: Counter[int]
    returned: set[int]
    cancelled: set[int]
    failed: set[int]
    unclean: list[int]
    calls_queued: int
    calls_running: int
    tasks: int


class Count:
    """Counters of one actor."""

    def __init__(self, event: Callable[[], Any]) -> None:
        self.begun = Counter[int]()
        self._event = event
        self._news = event()
        self.returned: set[int] = set()
        self.cancelled: set[int] = set()
        self.failed: set[int] = set()
        self.unclean: list[int] = []

    @contextmanager
    def running(self, number: int) -> Iterator[None]:
        """Count one run of a call."""
        self.begun[number] += 1
        self._news.set()
        self._news = self._event()
        try:
            yield
        except (asyncio.CancelledError, trio.Cancelled):
            self.cancelled.add(number)
            raise
        except Exception:
            self.failed.add(number)
            raise
        self.returned.add(number)

    async def wait_begun(self, number: int) -> None:
        """Wait until a call has begun."""
        while number not in self.begun:
            await self._news.wait()

    def tally(self, tasks: int = 0) -> Tally:
        """Return what has been counted, and what the mailbox of the running actor holds."""
        [mailbox] = [
            member.mailbox for member in trimesh.context().actors.statistics().members if member.mailbox is not None
        ]
        return Tally(
            self.begun,
            self.returned,
            self.cancelled,
            self.failed,
            self.unclean,
            mailbox.calls_queued,
            mailbox.calls_running,
            tasks,
        )


class TrioCounted(Actor):
    """Counts calls in Trio."""

    def __init__(self) -> None:
        self.count = Count(trio.Event)

    @endpoint(concurrency=SLOTS, group="many")
    async def hold(self, number: int) -> int:
        """Run until cancelled."""
        with self.count.running(number):
            await trio.sleep_forever()
        return number

    @endpoint(concurrency=SLOTS, group="many")
    async def turns(self, number: int, turns: int) -> int:
        """Let others run for some turns."""
        with self.count.running(number):
            for _ in range(turns):
                await trio.lowlevel.checkpoint()
        return number

    @endpoint
    async def one_by_one(self, number: int) -> int:
        """Run in the one slot of the actor."""
        with self.count.running(number):
            await trio.lowlevel.checkpoint()
        return number

    @endpoint(concurrency=SLOTS, group="watch")
    async def wait_begun(self, number: int) -> None:
        """Return when a call has begun."""
        await self.count.wait_begun(number)

    @endpoint(concurrency=SLOTS, group="watch")
    async def tally(self) -> Tally:
        """Return the counts."""
        return self.count.tally()


class AsyncioCounted(trimesh.aio.Actor):
    """Counts calls in asyncio."""

    def __init__(self) -> None:
        self.count = Count(asyncio.Event)

    def _look(self, number: int) -> None:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            self.count.unclean.append(number)

    @endpoint(concurrency=SLOTS, group="many")
    async def hold(self, number: int) -> int:
        """Run until cancelled."""
        self._look(number)
        with self.count.running(number):
            await asyncio.Event().wait()
        return number

    @endpoint(concurrency=SLOTS, group="many")
    async def turns(self, number: int, turns: int) -> int:
        """Let others run for some turns."""
        self._look(number)
        with self.count.running(number):
            for _ in range(turns):
                await asyncio.sleep(0)
        return number

    @endpoint(concurrency=SLOTS, group="many")
    async def relay(self, other: Any, number: int, name: str, *args: Any) -> int:
        """Call an endpoint of another actor with the same number."""
        self._look(number)
        with self.count.running(number):
            found: int = await getattr(other, name).call_one(number, *args)
        return found

    @endpoint
    async def one_by_one(self, number: int) -> int:
        """Run in the one slot of the actor."""
        self._look(number)
        with self.count.running(number):
            await asyncio.sleep(0)
        return number

    @endpoint(concurrency=SLOTS, group="watch")
    async def wait_begun(self, number: int) -> None:
        """Return when a call has begun."""
        await self.count.wait_begun(number)

    @endpoint(concurrency=SLOTS, group="watch")
    async def tally(self) -> Tally:
        """Return the counts."""
        return self.count.tally(len(asyncio.all_tasks()))
