"""An asyncio program that uses actors of both kinds: calls, a cancel, a stream, deadlines, errors.

It prints where its work was done, and what is left of it in the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import selectors
import sys
import threading
from collections.abc import AsyncGenerator, Callable
from typing import Any

import trio

import trimesh
from trimesh import Actor, endpoint
from trimesh.aio import trio_run
from trimesh.testing.zombie_guard import left_descriptors, left_threads, scan

HANG_SECONDS = 60.0


class Bare:
    """A selector which takes no attribute."""

    __slots__ = ("_selector",)
    hidden = ()

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def __getattr__(self, name: str) -> Any:
        if name in type(self).hidden:
            raise AttributeError(name)
        return getattr(self._selector, name)


class Mute(Bare):
    """One whose descriptor is not known, either; it takes attributes."""

    hidden = ("fileno",)


def uvloop() -> asyncio.AbstractEventLoop:
    import uvloop

    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


LOOPS: dict[str, Callable[[], Any]] = {
    "asyncio": asyncio.new_event_loop,
    "bare": lambda: asyncio.SelectorEventLoop(Bare()),  # type: ignore[arg-type]
    "mute": lambda: asyncio.SelectorEventLoop(Mute()),  # type: ignore[arg-type]
    "uvloop": uvloop,
}


def use_loops(kind: str) -> None:
    """Let the loops of actors be of one kind."""
    asyncio.new_event_loop = LOOPS[kind]
    asyncio.events.new_event_loop = LOOPS[kind]


def driver() -> str:
    """Return what drives the Trio run that the running loop uses."""
    run = trio_run.find_run(asyncio.get_running_loop())
    return type(None if run is None else run.driver).__name__


class TrioSide(Actor):
    @endpoint(concurrency=8)
    async def square(self, number: int) -> int:
        await trio.lowlevel.checkpoint()
        return number * number


class AsyncioSide(trimesh.aio.Actor):
    def __init__(self) -> None:
        self.held, self.released = asyncio.Event(), asyncio.Event()

    @endpoint(concurrency=8)
    async def square(self, number: int) -> int:
        await asyncio.sleep(0)
        return number * number

    @endpoint(concurrency=8)
    async def square_there(self, other: Any, number: int) -> int:
        both = await asyncio.gather(*(other.square.call_one(number) for _ in range(2)))
        assert both[0] == both[1]
        return int(both[0])

    @endpoint(concurrency=4, group="held")
    async def hold(self) -> None:
        self.held.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.released.set()
            raise
        finally:
            self.held.clear()

    @endpoint(concurrency=4, group="held")
    async def hold_there(self, other: Any) -> None:
        await other.hold.call_one()

    @endpoint(concurrency=4, group="watch")
    async def wait_held(self) -> None:
        await self.held.wait()

    @endpoint(concurrency=4, group="watch")
    async def wait_released(self) -> None:
        await self.released.wait()
        self.released.clear()

    @endpoint
    async def numbers(self, count: int) -> AsyncGenerator[int, None]:
        for number in range(count):
            await asyncio.sleep(0)
            yield number

    @endpoint
    async def sum_there(self, other: Any, count: int) -> int:
        async with other.numbers.stream(count) as items:
            return sum([number async for _, number in items])

    @endpoint
    async def send(self, port: trimesh.Port[int], count: int) -> None:
        for number in range(count):
            await port.send(number)

    @endpoint
    async def open_own(self) -> int:
        """Open a mesh in an endpoint."""
        async with trimesh.this_host().spawn_procs({"n": 1}) as procs:
            other = await procs.spawn("other", TrioSide)
            return await other.square.call_one(9)

    @endpoint
    async def fail(self) -> None:
        await asyncio.sleep(0)
        raise ValueError("trouble")

    @endpoint
    async def where(self) -> dict[str, object]:
        return {"main thread": threading.current_thread() is threading.main_thread(), "driver": driver()}


async def use(first: Any, second: Any, trio_side: Any) -> None:
    """Do a bit of everything."""
    for number in range(20):
        assert await first.square.call_one(number) == number * number
    assert await asyncio.gather(*(one.square.call_one(6) for one in (first, second, trio_side) * 5)) == [36] * 15
    assert await first.square_there.call_one(second, 7) == 49
    assert await first.square_there.call_one(trio_side, 8) == 64
    assert await first.open_own.call_one() == 81

    for work in (second.hold.call_one, lambda: first.hold_there.call_one(second)):
        task = asyncio.ensure_future(work())
        await second.wait_held.call_one()
        task.cancel()
        assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)
        await second.wait_released.call_one()

    for work in (second.hold.call_one, lambda: first.hold_there.call_one(second)):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                await work()
            raise AssertionError("no deadline")
    assert await second.square.call_one(3) == 9

    async with first.numbers.stream(30) as items:
        assert [number async for _, number in items] == list(range(30))
    assert await first.sum_there.call_one(second, 10) == 45
    async with trimesh.open_channel(int, capacity=8) as (port, receiver):
        sending = asyncio.ensure_future(first.send.call_one(port, 5))
        assert [await receiver.receive() for _ in range(5)] == list(range(5))
        await sending

    try:
        await first.fail.call_one()
    except ValueError as error:
        assert str(error) == "trouble"  # noqa: PT017 - no test
    else:
        raise AssertionError("no error")
    await asyncio.sleep(0.02)
    assert await first.square.call_one(5) == 25


def children() -> set[str]:
    found: set[str] = set()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/self/task/{task}/children") as file:
            found |= set(file.read().split())
    return found


async def main(kind: str) -> None:
    before = scan()
    async with asyncio.timeout(HANG_SECONDS):
        async with trimesh.aio.spawn_procs({"n": 2}, setup=lambda: use_loops(kind)) as procs:
            actors = await procs.spawn("actors", AsyncioSide)
            await use(actors.slice(n=0), actors.slice(n=1), await procs.slice(n=1).spawn("trio_side", TrioSide))
            found: dict[str, object] = {"caller": driver(), "actors": list((await actors.where.call()).values())}
            async with procs.spawn("others", AsyncioSide) as others:
                assert (await others.square.call(4)).values() == (16, 16)
        left = [str(one) for one in (*left_descriptors(before), *left_threads(before), *children())]
        left += [str(task) for task in asyncio.all_tasks() - {asyncio.current_task()}]
        left += [str(run) for run in trio_run._runs]
    print(json.dumps({**found, "left": left}))


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=LOOPS[sys.argv[1]]) as runner:
        runner.run(main(sys.argv[1]))
