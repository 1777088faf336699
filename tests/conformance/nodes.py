"""Actors that call each other and themselves, in one process or several."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import trio
from tests.conformance.meshes import Attempt, Backend, attempt
from tests.patience import HANG_SECONDS

import trimesh
from trimesh import Actor, DeadlockError, endpoint, limits, this_host, this_proc

PLACES = ["one process", "own processes", "the controller and a worker"]


@asynccontextmanager
async def no_deadline() -> AsyncGenerator[trio.Nursery]:
    """Take off the deadline that each test of this suite has: a wait with one is no deadlock. Fail after a miss."""

    async def fail(scope: trio.CancelScope) -> None:
        await trio.sleep(HANG_SECONDS)
        scope.cancel(reason="a deadlock was missed")

    with trio.CancelScope(shield=True) as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail, scope)
            yield nursery
            nursery.cancel_scope.cancel()
    assert not scope.cancelled_caught, "a deadlock was missed"


class Node(Actor):
    """Calls others, and itself."""

    def __init__(self) -> None:
        self.gate = trio.Event()
        self.entered = 0
        self.news = trio.Event()

    def enter(self) -> None:
        self.entered += 1
        self.news.set()
        self.news = trio.Event()

    @endpoint(group="watch", concurrency=100)
    async def wait_entered(self, count: int) -> None:
        while self.entered < count:
            await self.news.wait()

    @endpoint(group="watch", concurrency=100)
    async def open_gate(self) -> None:
        self.gate.set()

    @endpoint
    async def ping(self, *_: Any) -> int:
        return trimesh.current_rank()

    @endpoint
    async def visit(self, *way: Any) -> int:
        """Visit the first actor and have it visit the rest; return how many were visited."""
        return 1 + await way[0].visit.call_one(*way[1:]) if way else 0

    @endpoint
    async def visit_or_less(self, *way: Any) -> int:
        """Visit as many as can be."""
        try:
            return 1 + await way[0].visit_or_less.call_one(*way[1:]) if way else 0
        except DeadlockError:
            return 0

    @endpoint
    async def meet(self, other: Any) -> str:
        """Enter; when told so, call the other."""
        self.enter()
        await self.gate.wait()
        return await answer_of(other.ping)

    @endpoint(group="watch", concurrency=100)
    async def shut_gate(self) -> None:
        self.gate = trio.Event()

    @endpoint(concurrency=2, group="two")
    async def touch(self) -> None:
        """Take one of two slots for a moment."""

    @endpoint(concurrency=2, group="two")
    async def touch_again(self, me: Any) -> str:
        """Take one of two slots; when told so, take another."""
        self.enter()
        await self.gate.wait()
        return await answer_of(me.touch)

    @endpoint
    async def ask_all(self, nodes: Any) -> list[int]:
        return list((await nodes.ping.call()).values())

    @endpoint
    async def settle_all(self, nodes: Any) -> list[str]:
        return [type(outcome.error).__name__ for outcome in (await nodes.ping.call_settled()).values()]

    @endpoint
    async def wait_for_me(self, me: Any, seconds: float) -> str:
        with trio.move_on_after(seconds):
            return await answer_of(me.ping)
        return "too late"

    @endpoint
    async def ask_in_tasks(self, me: Any, other: Any) -> str:
        """Wait for another and, in a task, for oneself."""
        said: list[str] = []

        async def ask(whom: Any) -> None:
            said.append(await answer_of(whom.ping))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, me)
            nursery.start_soon(ask, other)
        return " ".join(sorted(said))

    @endpoint
    async def spawn_caller(self, me: Any) -> str:
        try:
            async with this_proc().spawn("caller", Caller, me):
                return "spawned"
        except* DeadlockError as group:
            [error] = trimesh.leaves(group)
        return f"deadlock of {len(error.cycle)}"

    @endpoint
    async def ask_by_child(self, me: Any) -> str:
        """Have an actor in a process of one's own call back."""
        async with this_host().spawn_procs({"gpus": 1}) as procs:
            child = await procs.spawn("child", Node)
            said = await answer_of(child.visit, me)
            return f"{said}, {await child.visit.call_one()}"

    @endpoint
    async def flood(self, target: Any) -> str:
        """Send messages for as long as somebody takes them."""
        try:
            while True:
                await target.ping.broadcast()
        except* DeadlockError as group:
            [error] = trimesh.leaves(group)
        return f"deadlock of {len(error.cycle)}"

    @endpoint
    async def flood_and_be_asked(self, other: Any) -> None:
        """Send more messages than find room to one that will only take them once it has met this actor."""
        await other.open_gate.call_one()
        for _ in range(2 * limits.MAILBOX_MESSAGES):
            await other.ping.broadcast()

    @endpoint
    async def count(self, number: int) -> AsyncIterator[int]:
        for index in range(number):
            yield index

    @endpoint
    async def count_all(self, nodes: Any, number: int) -> tuple[int, str]:
        """Take what the others count, oneself perhaps among them."""
        came = 0
        try:
            async with nodes.count.stream(number) as results:
                async for _ in results:
                    came += 1
        except* DeadlockError:
            said = "deadlock"
        else:
            said = "all"
        return came, said

    @endpoint
    async def stream_pings(self, nodes: Any) -> tuple[int, str]:
        came = 0
        try:
            async with nodes.ping.stream() as results:
                async for _ in results:
                    came += 1
        except* DeadlockError:
            said = "deadlock"
        else:
            said = "all"
        return came, said

    @endpoint
    async def map_pings(self, nodes: Any, number: int) -> tuple[int, str]:
        came = 0
        try:
            async with nodes.ping.map(range(number), window=2) as results:
                async for _ in results:
                    came += 1
        except* DeadlockError:
            said = "deadlock"
        else:
            said = "all"
        return came, said

    @endpoint(thread=True)
    def ask_in_thread(self, me: Any) -> str:
        return trio.from_thread.run(answer_of, me.ping)

    @endpoint
    async def relay(self, target: Any, seconds: float) -> int:
        if target is not None:
            return 1 + await target.relay.call_one(None, seconds)
        await trio.sleep(seconds)
        return 1


class Caller(Actor):
    """Calls another while it starts."""

    def __init__(self, target: Any) -> None:
        self.target = target

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None]:
        await self.target.ping.call_one()
        yield


async def answer_of(function: Any, *args: Any) -> str:
    """Call one; say what came of it."""
    try:
        await function.call_one(*args)
    except DeadlockError as error:
        return f"deadlock of {len(error.cycle)}"
    return "met"


@asynccontextmanager
async def nodes_in(backend: Backend, places: str, count: int) -> AsyncGenerator[Sequence[Any]]:
    """Spawn actors, each a mesh of one."""
    async with AsyncExitStack() as stack:
        if places == "own processes":
            procs = await stack.enter_async_context(backend.procs({"gpus": count}))
            nodes = await procs.spawn("nodes", Node)
            yield [nodes.slice(gpus=index) for index in range(count)]
            return
        procs = await stack.enter_async_context(backend.procs({"gpus": 1}))
        here = await stack.enter_async_context(this_proc().spawn("here", Node))
        made = [await procs.spawn(f"node{index}", Node) for index in range(count)]
        yield made if places == "one process" else [here, *made][:count]


async def cross(nursery: trio.Nursery, one: Any, other: Any) -> Sequence[Attempt]:
    """Let each enter `meet`, then call the other."""
    calls = [attempt(nursery, one.meet.call_one, other), attempt(nursery, other.meet.call_one, one)]
    for node in (one, other):
        await node.wait_entered.call_one(1)
    for node in (one, other):
        await node.open_gate.call_one()
    return calls
