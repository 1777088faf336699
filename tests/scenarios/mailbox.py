"""Calls that wait for a slot of their group, in the mailbox of one actor.

endpoint add                   shares the one slot of the actor;  concurrency=2 group=io   has others (C4)
put add 1 2 3                  three calls come, with these numbers
open                           the actor has started, and takes calls
ends 1                         the endpoint of call 1 returns
cancel 2                       call 2 is cancelled: it leaves the queue, if it is still there
"""

from __future__ import annotations

import inspect
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio
import trio.testing
from tests.scenarios.script import Command, Scene

from trimesh._runtime.actors.mailbox import Mailbox
from trimesh._runtime.values.endpoint_spec import EndpointKind, EndpointSpec


@attrs.define(eq=False)
class Call:
    number: int
    spec: EndpointSpec
    may_end: trio.Event = attrs.field(factory=trio.Event)
    deadline: float = math.inf
    scope: trio.CancelScope | None = None
    cancelled_by: str | None = None
    ended: bool = False


class MailboxScene(Scene):
    """One mailbox, over tasks that end when they are told to."""

    def __init__(self) -> None:
        self.endpoints: dict[str, EndpointSpec] = {}
        self.calls: dict[int, Call] = {}
        self.news: list[str] = []
        self.nursery: trio.Nursery
        self.interrupted: list[Any] = []
        self.mailbox = Mailbox(self._serve, self._start, self.interrupted.append)

    @asynccontextmanager
    async def surroundings(self) -> AsyncGenerator[None, None]:
        async with trio.open_nursery() as self.nursery:
            yield
            self.nursery.cancel_scope.cancel()

    def _start(self, slot: Callable[[], Awaitable[None]]) -> None:
        self.nursery.start_soon(slot)

    async def _serve(self, call: Any) -> None:
        self.news.append(f"{call.spec.name} {call.number} starts")
        await call.may_end.wait()

    async def _settle(self) -> list[str]:
        await trio.testing.wait_all_tasks_blocked()
        news, self.news = self.news, []
        queued = " ".join(str(call.number) for call in self.mailbox.queued())  # type: ignore[attr-defined]
        return [*news, f"queued: {queued or 'none'}"]

    def endpoint(self, command: Command) -> None:
        (name,) = command.words
        concurrency, group = int(command.options.get("concurrency", 1)), command.options.get("group")
        self.endpoints[name] = EndpointSpec(
            name, print, EndpointKind.ASYNC, concurrency, group=group, idempotent=False, signature=inspect.Signature()
        )

    async def put(self, command: Command) -> list[str]:
        for word in command.words[1:]:
            call: Any = Call(int(word), self.endpoints[command.words[0]])
            self.calls[call.number] = call
            self.mailbox.put(call)
        return await self._settle()

    async def open(self, _: Command) -> list[str]:
        self.mailbox.open()
        return await self._settle()

    async def ends(self, command: Command) -> list[str]:
        for number in command.numbers:
            self.calls[number].may_end.set()
        return await self._settle()

    async def cancel(self, command: Command) -> list[str]:
        call: Any = self.calls[command.numbers[0]]
        is_taken = self.mailbox.remove(call)
        return [f"{call.number} {'never runs' if is_taken else 'has left the queue'}", *await self._settle()]
