"""Asyncio actors with `own_thread=True`: their loop has a thread, so that what blocks it blocks nothing else."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from random import Random
from typing import Any

import pytest
import trio
from tests.aio.counted import AsyncioCounted
from tests.aio.loops import Test
from tests.aio.storm import Storm, check, check_idle
from tests.patience import HANG_SECONDS

import trimesh
from trimesh import Actor, MeshErrorGroup, endpoint, leaves, this_host

pytestmark = pytest.mark.real

colour: ContextVar[str] = ContextVar("colour", default="none")

blocked, go = threading.Event(), threading.Event()
"""Of one process: each actor of it has them."""


class OwnThread(trimesh.aio.Actor, own_thread=True):
    """Has a loop in a thread."""

    def __init__(self) -> None:
        self.thread_of_init = threading.current_thread()
        self.begun = asyncio.Event()

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        colour.set("of lifespan")
        yield

    @endpoint
    async def where(self) -> dict[str, Any]:
        return {
            "main thread": threading.current_thread() is threading.main_thread(),
            "one thread": threading.current_thread() is self.thread_of_init,
            "in Trio": trio.lowlevel.in_trio_run(),
            "colour": colour.get(),
        }

    @endpoint
    async def block(self) -> bool:
        """Block the thread until another actor of the process lets it go."""
        blocked.set()
        return go.wait(HANG_SECONDS)

    @endpoint(concurrency=4)
    async def hold(self) -> None:
        self.begun.set()
        await asyncio.Event().wait()

    @endpoint(concurrency=4, group="watch")
    async def wait_begun(self) -> None:
        await self.begun.wait()

    @endpoint(concurrency=4, group="relay")
    async def relay(self, others: list[Any], number: int) -> int:
        if not others:
            return number
        found: int = await others[0].relay.call_one(others[1:], number + 1)
        return found

    @endpoint
    async def fail(self) -> None:
        await asyncio.sleep(0)
        raise LookupError("in its thread")

    @endpoint
    async def cancel_itself(self) -> None:
        raise asyncio.CancelledError

    @endpoint
    async def items(self, count: int) -> AsyncGenerator[int, None]:
        for number in range(count):
            yield number

    @endpoint
    async def add_signal_handler(self) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print)


class Derived(OwnThread):
    """Says nothing of threads itself."""


class OnMain(trimesh.aio.Actor):
    """Is beside it, on the loop of the process."""

    @endpoint(concurrency=4)
    async def relay(self, others: list[Any], number: int) -> int:
        if not others:
            return number
        found: int = await others[0].relay.call_one(others[1:], number + 1)
        return found

    @endpoint(concurrency=4)
    async def let_go(self) -> None:
        go.set()


class OfTrio(Actor):
    """Is beside it, in Trio."""

    @endpoint(concurrency=4)
    async def relay(self, others: list[Any], number: int) -> int:
        if not others:
            return number
        found: int = await others[0].relay.call_one(others[1:], number + 1)
        return found

    @endpoint(concurrency=4)
    async def wait_blocked(self) -> None:
        await trio.to_thread.run_sync(blocked.wait)

    @endpoint(concurrency=4)
    async def let_go(self) -> None:
        go.set()


class OwnCounted(AsyncioCounted, own_thread=True):
    """Counts calls in its thread."""


@pytest.mark.parametrize("actor", [OwnThread, Derived])
async def test_endpoints_run_in_one_thread_beside_the_main_thread(actor: Any) -> None:
    """K05: those of a subclass, too."""
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        own = await procs.spawn("own", actor)
        for _ in range(3):
            assert (await own.where.call()).values() == (
                {"main thread": False, "one thread": True, "in Trio": False, "colour": "of lifespan"},
            ) * 2


@pytest.mark.parametrize("beside", [OfTrio, OnMain])
async def test_code_that_blocks_its_loop_holds_no_other_actor_of_the_process(beside: Any) -> None:
    """K05: whatever kind that is of; the other one ends the block."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        own = await procs.spawn("own", OwnThread)
        of_trio = await procs.spawn("of_trio", OfTrio)
        other = await procs.spawn("beside", beside)
        found: list[bool] = []

        async def block() -> None:
            found.append(await own.block.call_one())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(block)
            await of_trio.wait_blocked.call_one()
            assert await other.relay.call_one([of_trio], 0) == 1
            assert found == []
            await other.let_go.call_one()
        assert found == [True]


async def test_actors_of_all_kinds_call_each_other_in_one_process() -> None:
    """K05: Trio, the loop of the main thread, and that of the thread."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        own = await procs.spawn("own", OwnThread)
        on_main = await procs.spawn("on_main", OnMain)
        of_trio = await procs.spawn("of_trio", OfTrio)
        chain = [on_main, own, of_trio, own, on_main]
        for number in range(10):
            assert await of_trio.relay.call_one(chain, number) == number + len(chain)


async def test_errors_cancels_and_streams_are_those_of_all_asyncio_actors() -> None:
    """C01, C03, E01, T1, K05."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        own = await procs.spawn("own", OwnThread)
        with pytest.raises(LookupError, match="in its thread"):
            await own.fail.call_one()
        with pytest.raises(RuntimeError, match=r"must not raise asyncio\.CancelledError"):
            await own.cancel_itself.call_one()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(own.hold.call_one)
            await own.wait_begun.call_one()
            nursery.cancel_scope.cancel()
        async with own.items.stream(20) as items:
            assert [item async for _, item in items] == list(range(20))
        with pytest.raises(MeshErrorGroup) as caught:
            await own.add_signal_handler.call()
        assert [type(leaf) for leaf in leaves(caught.value)] == [RuntimeError]  # asyncio's: not the main thread
        assert await own.relay.call_one([], 1) == 1


async def test_it_comes_and_goes_beside_other_actors() -> None:
    """K05, Z15: its thread ends with the last of them; the others serve on."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        on_main = await procs.spawn("on_main", OnMain)
        of_trio = await procs.spawn("of_trio", OfTrio)
        for number in range(5):
            async with (
                procs.spawn(f"own_{number}", OwnThread) as own,
                procs.spawn(f"other_{number}", OwnThread) as other,
            ):
                assert await on_main.relay.call_one([own, of_trio, other], 0) == 3
            assert await on_main.relay.call_one([of_trio], 0) == 1


@pytest.mark.parametrize("ways", ["cancels", "deadlines"])
def test_calls_that_are_cut_at_any_moment_have_one_outcome(run: Callable[[Test], None], ways: str) -> None:
    """C01, C02, C03, C11, S02, D01, K04, K05: as in the main thread."""

    async def main() -> None:
        async with trimesh.aio.spawn_procs({"gpus": 2}) as procs:
            actor = await procs.slice(gpus=0).spawn("actor", OwnCounted)
            relay = await procs.slice(gpus=1).spawn("relay", OwnCounted)
            storm = Storm(actor, relay, Random(f"own {ways}"))

            await storm.run(getattr(storm, ways))

            check(storm.outcomes, await actor.tally.call_one())
            check(storm.outcomes, await relay.tally.call_one(), storm.relayed)
            check_idle(actor, relay)
            assert await actor.one_by_one.call_one(0) == 0

    run(main)
