"""Calls wait in order for a slot of their group (S01, S08; rule C4)."""

from __future__ import annotations

import inspect
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio
import trio.testing

from trimesh._runtime.actors.mailbox import Mailbox
from trimesh._runtime.values.endpoint_spec import EndpointKind, EndpointSpec


@attrs.define(eq=False)
class Call:
    """What a mailbox needs to know of a call."""

    number: int
    spec: EndpointSpec
    deadline: float = math.inf
    scope: trio.CancelScope | None = None
    cancelled_by: str | None = None
    ended: bool = False


def spec(concurrency: int = 1, group: str | None = None, name: str = "endpoint") -> EndpointSpec:
    signature = inspect.Signature()
    kind = EndpointKind.ASYNC
    return EndpointSpec(name, print, kind, concurrency, group=group, idempotent=False, signature=signature)


@attrs.define(eq=False)
class Server:
    """Serves calls until told to let them go."""

    nursery: trio.Nursery
    started: list[int] = attrs.field(factory=list)
    most: int = 0
    now: int = 0
    gate: trio.Event = attrs.field(factory=trio.Event)
    interrupted: list[Any] = attrs.field(factory=list)
    mailbox: Mailbox = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.mailbox = Mailbox(self.serve, self.start, self.interrupted.append)

    def start(self, slot: Callable[[], Awaitable[None]]) -> None:
        self.nursery.start_soon(slot)

    async def serve(self, call: Any) -> None:
        self.started.append(call.number)
        self.now += 1
        self.most = max(self.most, self.now)
        await self.gate.wait()
        self.now -= 1

    def put(self, *numbers: int, spec: EndpointSpec) -> list[Any]:
        calls: list[Any] = [Call(number, spec) for number in numbers]
        for call in calls:
            self.mailbox.put(call)
        return calls


@asynccontextmanager
async def serving(*, is_open: bool = True) -> AsyncGenerator[Server, None]:
    async with trio.open_nursery() as nursery:
        server = Server(nursery)
        if is_open:
            server.mailbox.open()
        yield server
        nursery.cancel_scope.cancel()


async def test_one_slot_serves_in_order():
    async with serving() as server:
        server.put(*range(50), spec=spec())
        await trio.testing.wait_all_tasks_blocked()
        assert server.started == [0]
        server.gate.set()
        await server.mailbox.wait_idle()
        assert server.started == list(range(50))
        assert server.most == 1


async def test_slot_takes_what_comes_without_a_turn_of_the_loop():
    """One that comes besides needs another slot, and a slot for which nothing comes waits in the loop."""
    async with serving() as server:
        server.gate.set()
        coming = [[2], [3, 4], []]
        turns: list[list[int]] = []

        def wait_here() -> bool:
            turns.append([*server.started])
            numbers = coming.pop(0) if coming else []
            server.put(*numbers, spec=spec(2))
            return bool(numbers)

        server.mailbox.wait_here = wait_here
        server.put(1, spec=spec(2))
        await server.mailbox.wait_idle()
        await trio.testing.wait_all_tasks_blocked()
        assert turns[:2] == [[1], [1, 2]]
        assert sorted(server.started) == [1, 2, 3, 4]
        server.put(5, spec=spec(2))
        await trio.testing.wait_all_tasks_blocked()
        assert server.started[-1] == 5


async def test_group_has_so_many_slots():
    """C4: endpoints of one group share them."""
    async with serving() as server:
        server.put(1, 2, spec=spec(3, "g", "left"))
        server.put(3, 4, spec=spec(3, "g", "right"))
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(server.started) == [1, 2, 3]
        assert len(list(server.mailbox.running())) == 3
        assert [call.number for call in server.mailbox.queued()] == [4]  # type: ignore[attr-defined]
        server.gate.set()
        await server.mailbox.wait_idle()
        assert server.most == 3


async def test_groups_do_not_wait_for_each_other():
    async with serving() as server:
        server.put(1, 2, spec=spec())
        server.put(3, spec=spec(2, name="other"))
        server.put(4, spec=spec(1, "alone"))
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(server.started) == [1, 3, 4]


async def test_slots_are_used_again():
    """A slot that has nothing to do waits for the next call; no more tasks are started than there are slots."""
    async with serving() as server:
        server.gate.set()
        for number in range(20):
            server.put(number, spec=spec(2))
            await server.mailbox.wait_idle()
        assert server.started == list(range(20))
        assert len(server.nursery.child_tasks) <= 2


async def test_what_comes_before_the_actor_is_ready_waits():
    """CE-1."""
    async with serving(is_open=False) as server:
        server.put(1, 2, spec=spec())
        await trio.testing.wait_all_tasks_blocked()
        assert server.started == []
        server.mailbox.open()
        server.put(3, spec=spec())
        server.gate.set()
        await server.mailbox.wait_idle()
        assert server.started == [1, 2, 3]


async def test_call_is_removed_while_it_waits():
    """C11: and only then."""
    async with serving(is_open=False) as server:
        early, other = server.put(1, 2, spec=spec())
        assert server.mailbox.remove(early)
        assert not server.mailbox.remove(early)
        server.mailbox.open()
        await trio.testing.wait_all_tasks_blocked()
        assert not server.mailbox.remove(other)
        waiting, last = server.put(3, 4, spec=spec())
        assert server.mailbox.remove(waiting)
        server.gate.set()
        await server.mailbox.wait_idle()
        assert server.started == [2, 4]
        assert not server.mailbox.remove(last)


async def test_everything_that_waits_is_taken_out():
    async with serving() as server:
        server.put(1, 2, 3, spec=spec())
        server.put(4, 5, spec=spec(1, "g"))
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(call.number for call in server.mailbox.take_queued()) == [2, 3, 5]  # type: ignore[attr-defined]
        assert list(server.mailbox.queued()) == []
        assert len(list(server.mailbox.running())) == 2


async def test_several_tasks_wait_until_it_is_idle():
    """M3: a stop may come while a drain waits."""
    async with serving() as server:
        server.put(1, spec=spec())
        await trio.testing.wait_all_tasks_blocked()
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(server.mailbox.wait_idle)
            await trio.testing.wait_all_tasks_blocked()
            server.gate.set()
    async with serving() as server:
        await server.mailbox.wait_idle()


async def test_endpoints_that_never_wait_let_others_run():
    """A slot with a long queue is no busy loop."""
    async with serving() as server:
        served = 0

        async def serve(call: Any) -> None:
            nonlocal served
            served += 1

        server.mailbox.serve = serve
        server.put(*range(200), spec=spec())
        await trio.lowlevel.checkpoint()
        await trio.lowlevel.checkpoint()
        assert 0 < served < 200
