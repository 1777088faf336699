"""Actors of Trio and of asyncio in one process: they call each other, and asyncio ones come and go beside Trio's."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from tests.patience import HANG_SECONDS

import trimesh
from trimesh import Actor, MeshErrorGroup, RemoteCancelled, endpoint, leaves, this_host

pytestmark = pytest.mark.real

TIMES = 10
"""How often asyncio actors come and go."""


class OfTrio(Actor):
    """Waits for each thing that a Trio task can wait for."""

    def __init__(self) -> None:
        self.gate = trio.Event()
        self.woken = threading.Event()
        self.begun: set[str] = set()
        self.news = trio.Event()
        self.left, self.right = socket.socketpair()

    def note(self, text: str) -> None:
        self.begun.add(text)
        self.news.set()
        self.news = trio.Event()

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        with self.left, self.right:
            yield

    @endpoint(concurrency=50, group="quick")
    async def echo(self, number: int) -> int:
        await trio.lowlevel.checkpoint()
        return number

    @endpoint(concurrency=50, group="held")
    async def wait_gate(self) -> str:
        self.note("gate")
        await self.gate.wait()
        return "gate"

    @endpoint(concurrency=50, group="held")
    async def wait_thread(self) -> str:
        self.note("thread")
        await trio.to_thread.run_sync(self.woken.wait)
        return "thread"

    @endpoint(concurrency=50, group="held", thread=True)
    def wait_in_thread(self) -> str:
        trio.from_thread.run_sync(self.note, "in thread")
        self.woken.wait()
        trio.from_thread.run(trio.sleep, 0)
        return "in thread"

    @endpoint(concurrency=50, group="held")
    async def wait_socket(self) -> str:
        self.note("socket")
        await trio.lowlevel.wait_readable(self.left)
        return self.left.recv(100).decode()

    @endpoint(concurrency=50, group="held")
    async def wait_deadline(self, seconds: float) -> str:
        self.note("deadline")
        with trio.move_on_after(seconds) as scope:
            await trio.sleep_forever()
        return "deadline" if scope.cancelled_caught else "no deadline"

    @endpoint(concurrency=50, group="held")
    async def hold(self, note: str = "hold") -> None:
        self.note(note)
        await trio.sleep_forever()

    @endpoint(concurrency=50, group="watch")
    async def wait(self, note: str) -> None:
        while note not in self.begun:
            await self.news.wait()

    @endpoint(concurrency=50, group="watch")
    async def let_go(self) -> None:
        self.gate.set()
        self.woken.set()
        self.right.send(b"socket")

    @endpoint(concurrency=50, group="relay")
    async def relay(self, others: list[Any], number: int) -> int:
        """Call the first of some actors, which calls the next one."""
        if not others:
            return number
        found: int = await others[0].relay.call_one(others[1:], number + 1)
        return found

    @endpoint(concurrency=50, group="relay")
    async def relay_hold(self, others: list[Any], note: str = "hold") -> None:
        if others:
            await others[0].relay_hold.call_one(others[1:], note)
        else:
            await OfTrio.hold(self, note)


class OfAsyncio(trimesh.aio.Actor):
    """Is called, and calls on."""

    def __init__(self) -> None:
        self.cancelled = 0

    @endpoint(concurrency=50, group="quick")
    async def echo(self, number: int) -> int:
        await asyncio.sleep(0)
        return number

    @endpoint(concurrency=50, group="relay")
    async def relay(self, others: list[Any], number: int) -> int:
        if not others:
            return number
        found: int = await others[0].relay.call_one(others[1:], number + 1)
        return found

    @endpoint(concurrency=50, group="relay")
    async def relay_hold(self, others: list[Any], note: str = "hold") -> None:
        try:
            await others[0].relay_hold.call_one(others[1:], note)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    @endpoint(concurrency=50, group="watch")
    async def count_cancelled(self) -> int:
        return self.cancelled


async def test_actors_of_both_kinds_call_each_other_in_one_process() -> None:
    """K05: through each other and back, from one loop to the other, ten chains at once."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        of_trio = await procs.spawn("of_trio", OfTrio)
        of_asyncio = await procs.spawn("of_asyncio", OfAsyncio)
        other = await procs.spawn("other", OfAsyncio)
        chain = [of_asyncio, of_trio, other, of_asyncio, of_trio]
        found: list[int] = []

        async def call(number: int) -> None:
            found.append(await of_trio.relay.call_one(chain, number))

        async with trio.open_nursery() as nursery:
            for number in range(0, 100, 10):
                nursery.start_soon(call, number)
        assert sorted(found) == [number + len(chain) for number in range(0, 100, 10)]


async def test_cancel_goes_through_actors_of_both_kinds_in_one_process() -> None:
    """C01, C10, K05: each task of asyncio on the way sees it, and the next call works."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        of_trio = await procs.spawn("of_trio", OfTrio)
        of_asyncio = await procs.spawn("of_asyncio", OfAsyncio)
        chain = [of_trio, of_asyncio, of_trio]
        for count in range(1, 6):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(of_asyncio.relay_hold.call_one, chain, f"hold {count}")
                await of_trio.wait.call_one(f"hold {count}")
                nursery.cancel_scope.cancel()
            assert await of_asyncio.count_cancelled.call_one() == 2 * count
            assert await of_asyncio.relay.call_one(chain, 0) == 3


async def test_waits_of_a_trio_actor_last_while_asyncio_actors_come_and_go() -> None:
    """K05: for events, threads, sockets, deadlines and calls: each ends as if it were alone in its process."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        of_trio = await procs.spawn("of_trio", OfTrio)
        found: list[str] = []

        async def keep(name: str, *args: Any) -> None:
            found.append(await getattr(of_trio, name).call_one(*args))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep, "wait_gate")
            nursery.start_soon(keep, "wait_thread")
            nursery.start_soon(keep, "wait_in_thread")
            nursery.start_soon(keep, "wait_socket")
            nursery.start_soon(keep, "wait_deadline", 0.3)
            for note in ("gate", "thread", "in thread", "socket", "deadline"):
                await of_trio.wait.call_one(note)
            for number in range(TIMES):
                async with procs.spawn(f"of_asyncio_{number}", OfAsyncio) as of_asyncio:
                    assert await of_asyncio.echo.call_one(number) == number
                    assert await of_asyncio.relay.call_one([of_trio], number) == number + 1
                assert await of_trio.echo.call_one(number) == number
            async with procs.spawn("last", OfAsyncio) as last:
                assert await last.echo.call_one(1) == 1
                await of_trio.let_go.call_one()
        assert sorted(found) == ["deadline", "gate", "in thread", "socket", "thread"]


async def test_calls_to_a_trio_actor_go_on_while_asyncio_actors_come_and_go() -> None:
    """C01, D01, S02, K05: under load, with cancels and deadlines that end while the process changes."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        of_trio = await procs.spawn("of_trio", OfTrio)
        answered = 0

        async def load() -> None:
            nonlocal answered
            number = 0
            while True:
                number += 1
                assert await of_trio.echo.call_one(number) == number
                with trio.move_on_after(0.002) as scope:
                    await of_trio.hold.call_one()
                assert scope.cancelled_caught
                answered += 1

        with trio.fail_after(HANG_SECONDS):
            async with trio.open_nursery() as nursery:
                for _ in range(5):
                    nursery.start_soon(load)
                for number in range(TIMES):
                    before = answered
                    async with procs.spawn(f"of_asyncio_{number}", OfAsyncio) as of_asyncio:
                        assert await of_asyncio.echo.call_one(number) == number
                        while answered < before + 5:
                            await of_trio.echo.call_one(0)
                nursery.cancel_scope.cancel()
        assert await of_trio.echo.call_one(-1) == -1
        assert of_trio.statistics().calls_unended == 0


async def test_asyncio_actors_come_and_go_at_the_same_time() -> None:
    """K05: several at once, so that the first that starts and the last that ends differ; calls among them work."""
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        of_trio = await procs.spawn("of_trio", OfTrio)

        async def come_and_go(number: int) -> None:
            for turn in range(3):
                async with procs.spawn(f"of_asyncio_{number}_{turn}", OfAsyncio) as mine:
                    assert (await mine.echo.call(number)).values() == (number, number)
                    first, second = mine.slice(gpus=0), mine.slice(gpus=1)
                    chain = [second, of_trio.slice(gpus=0), first]
                    assert await first.relay.call_one(chain, 0) == 3

        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(come_and_go, number)
        assert (await of_trio.echo.call(1)).values() == (1, 1)


async def test_failing_asyncio_actor_leaves_the_trio_actor_of_its_process_alone() -> None:
    """P1, K05: one that does not start, and one whose spawn is cancelled."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        of_trio = await procs.spawn("of_trio", OfTrio)
        for number in range(5):
            with pytest.raises(MeshErrorGroup) as caught:
                await procs.spawn(f"broken_{number}", Broken)
            assert [type(leaf) for leaf in leaves(caught.value)] == [LookupError]
            with trio.move_on_after(0.002 * number):
                async with procs.spawn(f"cut_{number}", OfAsyncio) as of_asyncio:
                    await of_asyncio.echo.call_one(number)
            assert await of_trio.echo.call_one(number) == number
        async with procs.spawn("of_asyncio", OfAsyncio) as of_asyncio:
            assert await of_asyncio.echo.call_one(1) == 1


class Broken(trimesh.aio.Actor):
    """Does not start."""

    def __init__(self) -> None:
        raise LookupError("no start")

    @endpoint
    async def never(self) -> None: ...


async def test_call_into_an_asyncio_actor_that_ends_is_ended() -> None:
    """M3, K05: from a Trio actor of the same process, which goes on."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        of_trio = await procs.spawn("of_trio", OfTrio)
        caught: list[BaseException] = []
        async with trio.open_nursery() as nursery:

            async def call(of_asyncio: Any) -> None:
                try:
                    await of_trio.relay_hold.call_one([of_asyncio, of_trio])
                except (trimesh.MeshStopped, RemoteCancelled) as error:
                    caught.append(error)

            with trio.CancelScope() as scope:
                async with procs.spawn("of_asyncio", OfAsyncio) as of_asyncio:
                    nursery.start_soon(call, of_asyncio)
                    await of_trio.wait.call_one("hold")
                    scope.cancel()
                    await trio.lowlevel.checkpoint()
        assert len(caught) == 1
        assert await of_trio.echo.call_one(1) == 1
