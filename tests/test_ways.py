"""How many functions and modules of ours a request passes, so that ways of reading stay as short as they are.

A count of what runs in the caller's process, not a time: it means the same on every machine. What waits for a message
varies with the moment, so a request is made several times and its shortest way counts.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FrameType
from typing import Any, Self

import attrs
import pytest

import trimesh
from trimesh import Actor, Isolate, endpoint, this_host
from trimesh.service import open_pool

OWN = f"{Path(trimesh.__file__).parent}/"
TRIES = 7

pytestmark = pytest.mark.real


@attrs.define
class Way:
    """What has run: functions of ours by file and name, and how many calls of them."""

    functions: set[tuple[str, str]] = attrs.field(factory=set)
    calls: int = 0
    transfers: int = 0

    def note(self, frame: FrameType, event: str, _: object) -> None:
        """Take a step of the profiler."""
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(OWN):
            self.functions.add((code.co_filename, code.co_qualname))
            self.calls += 1
            self.transfers += code.co_qualname == "NativeAttachment.begin"

    def __enter__(self) -> Self:
        sys.setprofile(self.note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    @property
    def size(self) -> tuple[int, int, int]:
        """Functions, modules, calls."""
        return len(self.functions), len({file for file, _ in self.functions}), self.calls


class Served(Actor):
    """Answers, publishes and dies."""

    def __init__(self) -> None:
        self.published = trimesh.rdma.Published()

    @endpoint
    async def add(self, number: int) -> int:
        return number + 1

    @endpoint
    async def publish(self) -> Any:
        await self.published.publish({"a": bytearray(1024), "b": bytearray(1024)})
        return self.published

    @endpoint
    async def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


async def ways_of(request: Callable[[], Awaitable[object]]) -> list[Way]:
    """Return the ways of a request that was made before."""
    await request()
    ways = []
    for _ in range(TRIES):
        with Way() as way:
            await request()
        ways.append(way)
    return ways


async def shortest(request: Callable[[], Awaitable[object]]) -> tuple[int, int, int]:
    """Return the size of the shortest way of a request that was made before."""
    return min(way.size for way in await ways_of(request))


def fits(size: tuple[int, int, int], *, functions: int, modules: int, calls: int) -> bool:
    """Return whether no part of a way is longer than it may be."""
    return all(is_one <= may_be for is_one, may_be in zip(size, (functions, modules, calls), strict=True))


async def test_call_to_one_member() -> None:
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        served = await procs.spawn("served", Served)

        size = await shortest(lambda: served.add.call_one(1))

    assert fits(size, functions=47, modules=18, calls=52), size  # 41, 18, 45 if the loop takes the reply


async def test_request_of_a_pool() -> None:
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        served = await procs.spawn("served", Served)
        async with open_pool(served) as pool:
            size = await shortest(lambda: pool.add(1))

    assert fits(size, functions=76, modules=25, calls=92), size  # 72, 25, 85 if the loop takes the reply


async def test_version_of_two_small_tensors() -> None:
    """Pinned, read and let go."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        served = await procs.spawn("served", Served)
        weights = await served.publish.call_one()

        async def read() -> None:
            async with weights.pin() as version:
                await version.read()

        ways = await ways_of(read)

    size = min(way.size for way in ways)
    assert fits(size, functions=89, modules=21, calls=199), size
    assert min(way.transfers for way in ways) <= 4


async def test_death_of_a_member() -> None:
    """From its signal to the event that tells of it."""
    ways = []
    for _ in range(TRIES):
        async with this_host().spawn_procs({"gpus": 1}, supervision=Isolate()) as procs:
            served = await procs.spawn("served", Served)
            await served.add.call_one(1)
            async with procs.events() as events:
                with Way() as way:
                    await served.die.broadcast()
                    async for event in events:
                        if isinstance(event, trimesh.Died):
                            break
        ways.append(way)

    size = min(way.size for way in ways)
    assert fits(size, functions=170, modules=57, calls=245), size
