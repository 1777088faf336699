"""A program with one actor that makes calls when it is told to; `bench.workloads.observed` runs two of them.

It reads lines `KIND CALLS WARM_UP` and answers each with JSON: microseconds of a call, and of those the processor time
of the actor's process.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time

import trio

from bench.cores import on_one_core
from bench.meshes.trimesh_mesh import Mesh, open_mesh
from bench.processes import descendants, processor_seconds


async def make_calls(mesh: Mesh, kind: str, calls: int) -> None:
    """Make calls of one kind."""
    if kind == "tasks":
        await mesh.tasks(calls)
    elif kind == "batch":
        await mesh.batch(calls)
    elif kind == "broadcast":
        for value in range(calls):
            await mesh.offer(value, 0)
        await mesh.drain()
    else:
        for _ in range(calls):
            await mesh.one(1)


async def measure(mesh: Mesh, kind: str, calls: int, warm_up: int) -> tuple[float, float]:
    """Return what each call took, and the processor time of the actor's process for it, in microseconds."""
    is_pinned = kind.endswith("_pinned")
    with on_one_core(os.getpid(), *descendants(os.getpid())) if is_pinned else contextlib.nullcontext():
        await make_calls(mesh, kind, warm_up)
        busy, start = processor_seconds(mesh.pids[0]), time.perf_counter()
        await make_calls(mesh, kind, calls)
        took = time.perf_counter() - start
        return took / calls * 1e6, (processor_seconds(mesh.pids[0]) - busy) / calls * 1e6


async def main() -> None:
    """Answer until the lines end."""
    async with open_mesh(1) as mesh:
        print("ready", flush=True)
        while line := await trio.to_thread.run_sync(sys.stdin.readline):
            kind, calls, warm_up = line.split()
            print(json.dumps(await measure(mesh, kind, int(calls), int(warm_up))), flush=True)


if __name__ == "__main__":
    trio.run(main)
