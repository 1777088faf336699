"""Actors that are asyncio programs, for the tests of `trimesh.aio.Actor`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import trio
from tests.conformance.probe import Probe

import trimesh
from trimesh import endpoint

shade: ContextVar[str] = ContextVar("shade", default="none")


class Engine(trimesh.aio.Actor):
    """An actor with what asyncio programs have: a queue, a task in the background, gates."""

    def __init__(self) -> None:
        self.loop_of_init = asyncio.get_running_loop()
        self.seen: list[str] = []
        self.jobs: asyncio.Queue[tuple[int, asyncio.Future[int]]] = asyncio.Queue()
        self.changed = asyncio.Event()
        self.gate = asyncio.Event()

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        shade.set("of lifespan")
        async with asyncio.TaskGroup() as group:
            worker = group.create_task(self._work())
            yield
            worker.cancel()
        self.note("left")

    async def _work(self) -> None:
        while True:
            number, answer = await self.jobs.get()
            answer.set_result(number * number)

    def note(self, text: str) -> None:
        self.seen.append(text)
        self.changed.set()

    @endpoint
    async def square(self, number: int) -> int:
        answer = asyncio.get_running_loop().create_future()
        self.jobs.put_nowait((number, answer))
        result: int = await answer
        return result

    @endpoint(reply="later")
    async def answer_later(self, reply: trimesh.Reply[str], word: str) -> None:
        asyncio.get_running_loop().call_later(0.01, reply.send, word)

    @endpoint
    async def ask_both(self, first: Probe, second: Probe) -> list[int]:
        """Call two others at once."""
        started = [first.rank.call_one.start(), second.rank.call_one.start()]
        return [await one for one in started]

    @endpoint
    def where(self) -> dict[str, Any]:
        return {
            "one loop": asyncio.get_running_loop() is self.loop_of_init,
            "in Trio": trio.lowlevel.in_trio_run(),
            "main thread": threading.current_thread() is threading.main_thread(),
            "rank": trimesh.current_rank(),
            "shade": shade.get(),
            "actor": trimesh.context().actor is self,
        }

    @endpoint(concurrency=8)
    async def hold(self, name: str = "hold", *, after: int = 0) -> str:
        """Wait for the gate; on a cancel let `after` turns of the loop pass before it is noted."""
        self.note(name)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            for _ in range(after):
                await asyncio.sleep(0)
            self.note(f"{name} cancelled")
            raise
        return name

    @endpoint(concurrency=8)
    async def open_gate(self) -> None:
        self.gate.set()

    @endpoint(concurrency=8)
    async def wait_for(self, name: str) -> None:
        while name not in self.seen:
            self.changed.clear()
            await self.changed.wait()

    @endpoint(concurrency=8)
    async def seen_so_far(self) -> list[str]:
        return list(self.seen)

    @endpoint
    async def fail(self) -> None:
        await asyncio.sleep(0)
        raise ValueError("engine trouble")

    @endpoint
    async def cancel_itself(self) -> None:
        raise asyncio.CancelledError("of its own making")

    @endpoint
    async def exit(self) -> None:
        raise SystemExit(3)

    @endpoint
    async def swallow(self) -> str:
        self.note("swallow")
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            return "all the same"
        return "gate"

    @endpoint
    async def leave_behind(self, name: str) -> None:
        """Start a task and return before it has ended."""
        self.kept = asyncio.create_task(self._background(name))
        await asyncio.sleep(0)

    async def _background(self, name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.note(f"{name} ended")

    @endpoint(concurrency=2)
    async def numbers(self, count: int) -> AsyncGenerator[int, None]:
        try:
            async with asyncio.timeout(None):  # a scope around `yield`: one task runs the whole generator
                for number in range(count):
                    yield number
        finally:
            self.note("numbers over")

    @endpoint(concurrency=2)
    async def numbers_of(self, source: Engine, count: int) -> AsyncGenerator[int, None]:
        async with source.numbers.stream(count) as items:
            async for _, number in items:
                yield number * 10

    @endpoint(concurrency=2)
    async def hold_there(self, other: Probe) -> None:
        self.note("there")
        try:
            await other.hold.call()
        finally:
            for _ in range(20):  # a second cancel would come here
                await asyncio.sleep(0)
            task = asyncio.current_task()
            assert task is not None
            self.note(f"back {task.cancelling()}")

    @endpoint(concurrency=2)
    async def remaining_there(self, other: Budget) -> float:
        return await other.remaining.call_one()

    @endpoint(thread=True)
    def in_thread(self) -> bool:
        return threading.current_thread() is threading.main_thread()

    @endpoint
    async def report_end_to(self, note: trimesh.Port[str]) -> None:
        self.kept = asyncio.create_task(self._tell(note))
        await asyncio.sleep(0)

    async def _tell(self, note: trimesh.Port[str]) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await note.send("unwound")
            raise


class Keeper(trimesh.aio.Actor):
    """Has a port until it is told to drop it."""

    def __init__(self, port: trimesh.Port[int]) -> None:
        self.port: trimesh.Port[int] | None = port

    @endpoint
    async def send_and_drop(self, number: int) -> None:
        assert self.port is not None
        await self.port.send(number)
        self.port = None


class Broken(trimesh.aio.Actor):
    """One whose background task fails when it is told to."""

    def __init__(self, *, now: bool = False) -> None:
        if now:
            raise ValueError("no start")
        self.trouble = asyncio.Event()

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._break())
            yield

    async def _break(self) -> None:
        await self.trouble.wait()
        raise LookupError("background trouble")

    @endpoint(concurrency=2)
    async def cause_trouble(self) -> None:
        self.trouble.set()

    @endpoint
    async def wait_forever(self) -> None:
        await asyncio.Event().wait()


class Budget(trimesh.Actor):
    @endpoint
    async def remaining(self) -> float:
        return trio.current_effective_deadline() - trio.current_time()
