"""`RDMABuffer.read_into` between two processes of this host, by each carrier; to eight readers; beside small calls.

The destination has been written to before, so that no page of it is new: what is measured is the copy. `new` is the
same by cma into memory that was never touched, as `np.empty` gives it.

Monarch has one kind of memory and one way here, its fallback: its read stands beside both of ours that copy, and beside
`map`, which is what a trimesh program would do to look at the same bytes.
"""

from __future__ import annotations

import time
from typing import Any

from bench.cores import on_one_core
from bench.scale import Metric, Samples, Scale, timed_calls

LARGE = 64 << 20
SMALL = 4 << 10
READERS = 8
HUGE = 1 << 30

METRICS = [
    Metric("shm", "64 MiB read, memory from allocate", "ms", goals=(6.7,)),
    Metric("cma", "64 MiB read, any memory (cma)", "ms", goals=(11.2,)),
    Metric("new", "64 MiB read into new memory (cma)", "ms"),
    Metric("tcp", "64 MiB read, tcp on loopback", "ms", goals=(22.4,)),
    Metric("small", "4 KiB read", "us", quantiles=(0.5, 0.99), goals=(70, 1000)),
    Metric("small_pinned", "4 KiB read, all on one core", "us", quantiles=(0.5, 0.99), goals=(25, 1000)),
    Metric("map", "64 MiB mapped and left", "us"),
    Metric("fan_out", "64 MiB to 8 readers", "ms", goals=(30,)),
    Metric("beside", "100 B call beside a 1 GiB read", "ms", quantiles=(0.5, 0.99), goals=(1, 5)),
]


LACKS = dict.fromkeys(("ray", "xoscar"), "it has no reads of the memory of another process")


async def trimesh_side(scale: Scale) -> Samples:
    found = await _within_a_host(scale)
    found["tcp"] = await _by_tcp(scale)
    return found


async def _within_a_host(scale: Scale) -> Samples:
    import trio

    from bench.workloads.trimesh_actors import Memory
    from trimesh import this_host

    found: Samples = {"beside": []}
    async with this_host().spawn_procs({"procs": 1 + READERS}) as procs:
        owner = await procs.slice(procs=0).spawn("owner", Memory)
        readers = await procs.slice(procs=slice(1, None)).spawn("readers", Memory)
        reader = readers.slice(procs=1)
        allocated = await owner.make.call_one(LARGE, allocated=True)
        foreign = await owner.make.call_one(LARGE)
        small = await owner.make.call_one(SMALL)
        found["shm"] = await _reads(reader, allocated, scale)
        found["cma"] = await _reads(reader, foreign, scale)
        found["new"] = [await reader.read.call_one(foreign, new=True) * 1e3 for _ in range(scale.transfers)]
        found["small"] = await reader.read_often.call_one(small, scale)
        with on_one_core(await owner.pid.call_one(), await reader.pid.call_one()):
            found["small_pinned"] = await reader.read_often.call_one(small, scale)

        async def look() -> None:
            async with allocated.map() as view:
                assert view[0] == 1

        found["map"] = await timed_calls(scale, look, share=20)
        await readers.read.call(allocated)  # every reader has it mapped
        found["fan_out"] = [us / 1e3 for us in await _repeat(scale, lambda: readers.read.call(allocated))]

        huge = await owner.make.call_one(HUGE if scale.transfers > 2 else LARGE)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reader.read_for_ever.call_one, huge)
            await reader.has_begun.call_one()
            for _ in range(max(10, scale.calls // 20)):
                start = time.perf_counter()
                await reader.echo.call_one(b"x" * 100)
                found["beside"].append((time.perf_counter() - start) * 1e3)
            nursery.cancel_scope.cancel()
    return found


async def _by_tcp(scale: Scale) -> list[float]:
    from bench.workloads.trimesh_actors import Memory
    from trimesh import this_host

    async with this_host().spawn_procs({"procs": 2}, env={"TRIMESH_RDMA": "tcp"}) as procs:
        memories = await procs.spawn("memories", Memory)
        buffer = await memories.slice(procs=0).make.call_one(LARGE)
        return await _reads(memories.slice(procs=1), buffer, scale)


async def _reads(reader: Any, buffer: Any, scale: Scale) -> list[float]:
    """Return the milliseconds of reads, as the reader measures them."""
    await reader.read.call_one(buffer)
    return [await reader.read.call_one(buffer) * 1e3 for _ in range(scale.transfers)]


async def _repeat(scale: Scale, call: Any) -> list[float]:
    found = []
    for _ in range(scale.transfers):
        start = time.perf_counter_ns()
        await call()
        found.append((time.perf_counter_ns() - start) / 1e3)
    return found


async def monarch_side(scale: Scale) -> Samples:
    from monarch.actor import this_host

    from bench.workloads.monarch_memory import Memory

    procs = this_host().spawn_procs(per_host={"gpus": 2})
    memories = procs.spawn("memories", Memory)
    owner, reader = memories.slice(gpus=0), memories.slice(gpus=1)
    found: Samples = {}
    large = await owner.make.call_one(LARGE)
    await reader.read.call_one(large, LARGE)
    reads = [await reader.read.call_one(large, LARGE) * 1e3 for _ in range(scale.transfers)]
    found["shm"] = found["cma"] = found["tcp"] = reads
    found["map"] = [milliseconds * 1e3 for milliseconds in reads]
    found["new"] = [await reader.read.call_one(large, LARGE, new=True) * 1e3 for _ in range(scale.transfers)]
    small = await owner.make.call_one(SMALL)
    found["small"] = await reader.read_often.call_one(small, SMALL, scale)
    with on_one_core(await owner.pid.call_one(), await reader.pid.call_one()):
        found["small_pinned"] = await reader.read_often.call_one(small, SMALL, scale)
    await procs.stop()
    return found
