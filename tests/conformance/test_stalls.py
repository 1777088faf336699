"""A process whose Trio loop does not run while its native thread answers: said with a stack, never a death (P2, P2)."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from tests.conformance.meeting import come, make_meetings, meet
from tests.conformance.meshes import Backend, SimBackend, member, only_real, only_sim

from trimesh import Actor, endpoint, limits, observe


class Sleeper(Actor):
    @endpoint
    def doze(self, path: str) -> str:
        come(path)
        return "awake"

    @endpoint
    def hold_the_gil(self, path: str) -> str:
        libc = ctypes.PyDLL(None)  # keeps the GIL while C runs
        while (pipe := libc.open(path.encode(), os.O_WRONLY)) < 0:  # waits for the other side; a signal ends it
            pass
        os.close(pipe)
        return "awake"

    @endpoint
    async def answer(self) -> str:
        return "here"


class Said(logging.Handler):
    """Keeps what the logger of trimesh says at WARNING and when."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[tuple[float, str]] = []
        self._news = trio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append((trio.current_time(), record.getMessage()))
        self._news.set()
        self._news = trio.Event()

    async def wait(self, count: int) -> None:
        while len(self.texts) < count:
            await self._news.wait()


@asynccontextmanager
async def listening() -> AsyncGenerator[Said, None]:
    handler = Said()
    logger = logging.getLogger("trimesh")
    logger.addHandler(handler)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)


@only_real
async def test_stall_is_logged_with_the_stack_of_the_stuck_thread(backend: Backend, tmp_path: Path):
    """P2: an endpoint that blocks, and C code that keeps the GIL, are both told by name while they last."""
    paths = make_meetings(tmp_path, "dozing", "holding")
    async with listening() as said, backend.procs({"gpus": 3}, name="sleepy") as procs:
        sleepers = await procs.spawn("sleepers", Sleeper)
        begun = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sleepers.slice(gpus=0).doze.call_one, paths[0])
            nursery.start_soon(sleepers.slice(gpus=1).hold_the_gil.call_one, paths[1])
            assert await sleepers.slice(gpus=2).answer.call_one() == "here"
            await said.wait(2)
            await meet(*paths)
        # Both calls have returned: nothing was killed.
        assert (await sleepers.answer.call()).values() == ("here",) * 3

    assert len(said.texts) == 2
    assert all(at - begun >= limits.STALL_SECONDS for at, _ in said.texts)
    first, second = sorted(text for _, text in said.texts)
    assert first.startswith("sleepy[gpus=0]")
    assert "in doze" in first
    assert second.startswith("sleepy[gpus=1]")
    assert "in hold_the_gil" in second


@only_sim
async def test_stall_of_a_simulated_loop_is_logged_and_told_to_listeners(backend: Backend):
    """P2: the same under a virtual clock, where a fault makes the loop lag."""
    assert isinstance(backend, SimBackend)
    async with listening() as said, backend.procs({"gpus": 2}, name="sleepy") as procs:
        sleepers = await procs.spawn("sleepers", Sleeper)
        told: list[tuple[float, str]] = []
        watched = procs._owned.members.members[1]
        watched.stall.listeners.append(lambda seconds, stack: told.append((seconds, stack)))

        backend.world.proc(member(sleepers, 1).proc_id).transport.lag(7.0)
        begun = trio.current_time()
        assert await sleepers.slice(gpus=1).answer.call_one() == "here"

        assert trio.current_time() - begun == 7.0
        assert [at - begun for at, _ in said.texts] == [limits.STALL_SECONDS]
        assert said.texts[0][1].startswith("sleepy[gpus=1]")
        assert told == [(limits.STALL_SECONDS, "")]
        assert (watched.stall.seconds, watched.stall.count) == (0.0, 1)


@only_sim
async def test_stall_lasts_until_now_and_not_until_its_last_report(backend: Backend):
    """P2: reports come at 5, 10, 20, 40 s; who looks in between sees the same start each time."""
    assert isinstance(backend, SimBackend)
    async with backend.procs({"gpus": 2}, name="sleepy") as procs, trio.open_nursery() as nursery:
        sleepers = await procs.spawn("sleepers", Sleeper)
        watched = procs._owned.members.members[1]
        backend.world.proc(member(sleepers, 1).proc_id).transport.lag(60.0)
        begun = trio.current_time()
        nursery.start_soon(sleepers.slice(gpus=1).answer.call_one)
        starts = list[float]()
        for seconds in (7.0, 33.0, 10.0):
            await trio.sleep(seconds)
            starts.append(trio.current_time() - watched.stall.seconds - begun)
        [row] = [proc for proc in (await observe.snapshot()).procs if proc.name == "sleepy[gpus=1]"]

    assert starts == pytest.approx([0.0] * 3)
    assert row.stalled_seconds >= 50.0


@only_sim
async def test_stalls_that_go_on_are_said_again_only_after_a_while(backend: Backend):
    assert isinstance(backend, SimBackend)
    async with listening() as said, backend.procs({"gpus": 1}, name="sleepy") as procs:
        sleepers = await procs.spawn("sleepers", Sleeper)
        transport = backend.world.proc(member(sleepers, 0).proc_id).transport
        begun = trio.current_time()
        for _ in range(20):
            transport.lag(limits.STALL_SECONDS + 1.0)
            await sleepers.answer.call_one()

    # 20 stalls in 120 s: one is said, then the first one after STALL_AGAIN_SECONDS, and so on.
    times = [at - begun for at, _ in said.texts]
    assert times == [5.0, 35.0, 65.0, 95.0]
