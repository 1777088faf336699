"""Many calls to one actor at once, and many messages without an answer.

With a task a call, and in the way that a library has for many calls: `map` of trimesh, `ray.get` of a list, `batch` of
xoscar; Monarch has none, its first figure stands for both. Broadcasts are counted until the last has been taken: sent
without waiting while the mailbox has room, as Monarch and Ray do, and each awaited.
"""

from __future__ import annotations

from bench.meshes.mesh import Library
from bench.scale import Metric, Samples, Scale, timed_rates

METRICS = [
    Metric("tasks", "pipelined call_one, a task a call", "k/s", goals=(25,), is_rate=True),
    Metric("batch", "pipelined call_one, map", "k/s", goals=(50,), is_rate=True),
    Metric("broadcast", "broadcast, sent and drained", "k/s", goals=(150,), is_rate=True),
    Metric("broadcast_awaited", "the same, each awaited", "k/s", is_rate=True),
]


async def any_side(library: Library, scale: Scale) -> Samples:
    async with library.open_mesh(1) as mesh:

        async def broadcast(count: int) -> None:
            for value in range(count):
                await mesh.offer(value, 0)
            await mesh.drain()

        async def broadcast_awaited(count: int) -> None:
            for value in range(count):
                await mesh.post(value, 0)
            await mesh.drain()

        return {
            "tasks": await timed_rates(scale, mesh.tasks, scale.rate_calls),
            "batch": await timed_rates(scale, mesh.batch, scale.rate_calls),
            "broadcast": await timed_rates(scale, broadcast, scale.rate_calls),
            "broadcast_awaited": await timed_rates(scale, broadcast_awaited, scale.rate_calls),
        }
