"""What a process costs the machine and the program that owns it, by how many there are: real ones, up to hundreds.

A size is taken in a program of its own, as what one has touched stays with it. Memory is read after the calls, with all
processes alive.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from bench.processes import descendants, private_bytes, processor_seconds, proportional_bytes
from bench.scaling.actors import Rank
from bench.scaling.measure import least
from bench.scaling.simulate import VALUE
from trimesh import jobs, limits, this_host

RANKS = (8, 64, 128, 256, 512)
HOSTS = (8, 64)
"""Of one process each."""
CASTS = 50
IDLE_SECONDS = 5.0
"""Many beats of each link."""

LEASE_SECONDS = 30.0
"""Hundreds of processes that end at once on two cores may each be silent for longer than the usual three seconds."""

_ROOT = Path(__file__).resolve().parents[2]


def measure_size(kind: str, count: int) -> dict[str, Any]:
    """Measure one size in a new program; return a row of the table.

    Args:
        kind: "ranks" of one mesh on this host, or "hosts", agents on this machine with a process each.
        count: How many.
    """
    command = [sys.executable, "-m", "bench.scaling.sizes", kind, str(count)]
    found = subprocess.run(command, cwd=_ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True)
    row: dict[str, Any] = json.loads(found.stdout)
    print({name: round(value, 6) if isinstance(value, float) else value for name, value in row.items()}, flush=True)
    return row


async def _measured(kind: str, count: int) -> dict[str, Any]:
    async with _opened(kind, 1) as one:
        await one.cast.call(VALUE)  # the program has all that it needs for one
        before = Size.now()
        start = time.perf_counter()
        async with _opened(kind, count) as ranks:
            await ranks.cast.call(VALUE)
            costs = await _costs(count, time.perf_counter() - start, before, ranks)
    return {"kind": kind, "count": count} | costs


@asynccontextmanager
async def _opened(kind: str, count: int) -> AsyncGenerator[Any]:
    async with AsyncExitStack() as stack:
        hosts, extent = this_host(), {"ranks": count}
        if kind == "hosts":
            hosts, extent = await stack.enter_async_context(jobs.LocalJob(count)), {}
        procs = await stack.enter_async_context(hosts.spawn_procs(extent))
        yield await procs.spawn("ranks", Rank)


async def _costs(count: int, start_seconds: float, before: Size, ranks: Any) -> dict[str, Any]:
    spans: list[float] = []
    used: list[float] = []
    for _ in range(CASTS):
        own, start = time.process_time(), time.perf_counter()
        await ranks.cast.call(VALUE)
        spans.append(time.perf_counter() - start)
        used.append(time.process_time() - own)
    now, there = Size.now(), descendants(os.getpid())
    own = processor_seconds(os.getpid())
    await trio.sleep(IDLE_SECONDS)
    own = processor_seconds(os.getpid()) - own
    return {
        "processes": len(there) + 1,
        "start_seconds": start_seconds,
        "call_us": least(spans),
        "own_us": least(used),
        "own_bytes": (now.private - before.private) / count,
        "own_descriptors": (now.descriptors - before.descriptors) / count,
        "own_threads": now.threads,
        "idle_us": own / IDLE_SECONDS * 1e6 / count,
        "all_bytes": sum(map(proportional_bytes, (os.getpid(), *there))),
    }


@dataclass(frozen=True)
class Size:
    """What the program has.

    Attributes:
        private: Bytes of memory that no other process has mapped.
        descriptors: How many are open.
        threads: How many run.
    """

    private: int
    descriptors: int
    threads: int

    @classmethod
    def now(cls) -> Size:
        """Return what it has at this moment."""
        pid = os.getpid()
        return cls(private_bytes(pid), len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task")))


if __name__ == "__main__":
    limits.LEASE_SECONDS = LEASE_SECONDS
    print(json.dumps(trio.run(_measured, sys.argv[1], int(sys.argv[2]))))
