"""What the parts of a call cost by themselves: Trio's, the kernel's, memory's. No library below can be faster."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Awaitable, Callable

from bench.scale import Metric, Samples, Scale

LARGE = 64 << 20

METRICS = [
    Metric("checkpoint", "floor: a checkpoint of Trio", "us"),
    Metric("scope", "floor: a cancel scope and a checkpoint in it", "us"),
    Metric("task", "floor: a task, started and run", "us"),
    Metric("nursery", "floor: a nursery with one task", "us"),
    Metric("readable", "floor: waiting for a descriptor that is ready", "us"),
    Metric("wake", "floor: two tasks of one program, a byte to and fro", "us"),
    Metric("copy", "floor: 64 MiB copied to memory with pages", "ms"),
    Metric("copy_new", "floor: 64 MiB copied to new memory", "ms"),
]

LACKS = dict.fromkeys(("monarch", "ray", "xoscar"), "the floors are those of trimesh")


async def trimesh_side(scale: Scale) -> Samples:
    import trio

    found: Samples = {}

    async def nothing() -> None: ...

    async def scope() -> None:
        with trio.CancelScope():
            await trio.lowlevel.checkpoint()

    async def nursery() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(nothing)

    found["checkpoint"] = await _each(scale, trio.lowlevel.checkpoint)
    found["scope"] = await _each(scale, scope)
    found["nursery"] = await _each(scale, nursery)
    found["task"] = []
    for _ in range(scale.rates):
        start = time.perf_counter()
        async with trio.open_nursery() as tasks:
            for _ in range(scale.rate_calls):
                tasks.start_soon(nothing)
        found["task"].append((time.perf_counter() - start) / scale.rate_calls * 1e6)
    ready = os.eventfd(1)

    async def readable() -> None:
        await trio.lowlevel.wait_readable(ready)

    try:
        found["readable"] = await _each(scale, readable)
    finally:
        os.close(ready)
    found["wake"] = await _to_and_fro(scale)
    found["copy"], found["copy_new"] = _copies(scale)
    return found


async def _each(scale: Scale, part: Callable[[], Awaitable[object]]) -> list[float]:
    """Return the microseconds of a part: too short to be timed by itself, so a round is one sample."""
    found = []
    for _ in range(scale.rates):
        start = time.perf_counter()
        for _ in range(scale.rate_calls):
            await part()
        found.append((time.perf_counter() - start) / scale.rate_calls * 1e6)
    return found


async def _to_and_fro(scale: Scale) -> list[float]:
    import trio

    there, back = os.eventfd(0), os.eventfd(0)

    async def answer() -> None:
        while True:
            await trio.lowlevel.wait_readable(there)
            os.eventfd_read(there)
            os.eventfd_write(back, 1)

    async def ask() -> None:
        os.eventfd_write(there, 1)
        await trio.lowlevel.wait_readable(back)
        os.eventfd_read(back)

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer)
            found = await _each(scale, ask)
            nursery.cancel_scope.cancel()
    finally:
        os.close(there)
        os.close(back)
    return found


def _copies(scale: Scale) -> tuple[list[float], list[float]]:
    """Return the milliseconds of copies into memory that has pages, and into memory that has none."""
    source = memoryview(bytearray(b"\1") * LARGE)
    used, new = [], []
    with mmap.mmap(-1, LARGE, mmap.MAP_PRIVATE) as target:
        target[:] = source
        for _ in range(scale.transfers):
            start = time.perf_counter()
            target[:] = source
            used.append((time.perf_counter() - start) * 1e3)
    for _ in range(scale.transfers):
        with mmap.mmap(-1, LARGE, mmap.MAP_PRIVATE) as target:
            start = time.perf_counter()
            target[:] = source
            new.append((time.perf_counter() - start) * 1e3)
    return used, new
