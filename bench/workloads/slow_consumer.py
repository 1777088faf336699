"""Messages of 1 MiB to an actor that takes 1 ms for each: the most memory on either side, above what was there before.

Resident memory, shared or not. What Ray keeps in its object store is counted where it is mapped.
"""

from __future__ import annotations

import os

from bench.meshes.mesh import Library
from bench.processes import forget_peak, resident_bytes, resident_bytes_peak
from bench.scale import Metric, Samples, Scale

SECONDS_EACH = 1e-3

METRICS = [
    Metric("sender", "2 GiB to a slow consumer: sender grows by", "MiB", goals=(64,)),
    Metric("receiver", "2 GiB to a slow consumer: receiver grows by", "MiB", goals=(64,)),
]


async def any_side(library: Library, scale: Scale) -> Samples:
    async with library.open_mesh(1) as mesh:
        message = b"\1" * (1 << 20)
        await mesh.one(message)
        pids = {"sender": os.getpid(), "receiver": mesh.pids[0]}
        before = {side: resident_bytes(pid) for side, pid in pids.items()}
        for pid in pids.values():
            forget_peak(pid)
        for _ in range(scale.offered_mebibytes):
            await mesh.offer(message, SECONDS_EACH)
        await mesh.drain()
        return {side: [(resident_bytes_peak(pid) - before[side]) / 2**20] for side, pid in pids.items()}
