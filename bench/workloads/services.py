"""A pool of replicas: requests a second, what a request costs beside `choose`, and how fast a pause aborts.

Ray's side is the least that stands for a pool there: actors that get calls in turn, without a queue, a bound or a look
at their load.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from bench.scale import Metric, Samples, Scale, timed_calls, timed_rates

REPLICAS = 8
IN_FLIGHT = 256
CONCURRENCY = 64

METRICS = [
    Metric("pool_requests", "pool of 8 replicas, a task a request", "1000/s", is_rate=True, goals=(10.0,)),
    Metric("pool_chosen", "the same by `choose`", "1000/s", is_rate=True),
    Metric("pool_request", "one request of a pool after the other", "us", (0.5, 0.99)),
    Metric("pool_overhead", "of that, more than `choose`", "us", goals=(30.0,)),
    Metric("pool_cpu", "a task a request: caller's processor time of each", "us"),
    Metric("pool_cpu_overhead", "of that, more than `choose`", "us"),
    Metric("pool_abort", 'paused("abort") with 256 requests running: until the body begins', "ms", (0.5, 1.0), (20.0,)),
]

LACKS = dict.fromkeys(("monarch", "xoscar"), "it has no pool of actors that route requests")


async def trimesh_side(scale: Scale) -> Samples:
    import trio

    from bench.workloads.trimesh_actors import Hanger
    from trimesh import this_host
    from trimesh.service import Paused, open_pool

    found: Samples = {}
    async with (
        this_host().spawn_procs({"procs": REPLICAS}) as procs,
        procs.spawn("actors", Hanger) as mesh,
        open_pool(mesh, concurrency=CONCURRENCY, queue=scale.rate_calls) as pool,
    ):

        async def at_once(call: Any, count: int) -> None:
            async with trio.open_nursery() as nursery:
                for _ in range(count):
                    nursery.start_soon(call)

        found["pool_requests"] = await timed_rates(scale, lambda count: at_once(pool.pid, count), scale.rate_calls)
        found["pool_chosen"] = await timed_rates(scale, lambda count: at_once(mesh.pid.choose, count), scale.rate_calls)
        found["pool_request"] = await timed_calls(scale, pool.pid)
        chosen = await timed_calls(scale, mesh.pid.choose)
        found["pool_overhead"] = [statistics.median(found["pool_request"]) - statistics.median(chosen)]
        found["pool_cpu"], found["pool_cpu_overhead"] = [], []
        for _ in range(scale.rates):
            spent: list[float] = []
            for call in (pool.pid, mesh.pid.choose):
                before = time.process_time()
                await at_once(call, scale.rate_calls)
                spent.append((time.process_time() - before) / scale.rate_calls * 1e6)
            found["pool_cpu"].append(spent[0])
            found["pool_cpu_overhead"].append(spent[0] - spent[1])
        found["pool_abort"] = [await _abort(mesh, pool, Paused) for _ in range(scale.rates)]
    return found


async def _abort(mesh: Any, pool: Any, paused: type[Exception]) -> float:
    """Return the milliseconds in which a pause ends many requests that run, at their replicas, too."""
    import trio
    import trio.testing

    async def hang() -> None:
        try:
            await pool.sleep()
        except paused:
            pass

    async with trio.open_nursery() as nursery:
        for _ in range(IN_FLIGHT):
            nursery.start_soon(hang)
        await trio.testing.wait_all_tasks_blocked()
        await mesh.pid.call()  # on its way after all of them
        assert pool.statistics().running == IN_FLIGHT
        start = time.perf_counter()
        async with pool.paused("abort"):
            return (time.perf_counter() - start) * 1e3


async def ray_side(scale: Scale) -> Samples:
    import asyncio
    from itertools import cycle

    import ray

    ray.init(num_cpus=REPLICAS, include_dashboard=False, log_to_driver=False)

    @ray.remote(num_cpus=0, max_concurrency=CONCURRENCY)
    class Answerer:
        async def pid(self) -> int:
            return 1

    actors = [Answerer.remote() for _ in range(REPLICAS)]
    ray.get([actor.pid.remote() for actor in actors])
    turn = cycle(actors)

    async def call() -> None:
        await next(turn).pid.remote()

    async def at_once(count: int) -> None:
        await asyncio.gather(*[call() for _ in range(count)])

    found: Samples = {
        "pool_requests": await timed_rates(scale, at_once, scale.rate_calls),
        "pool_request": await timed_calls(scale, call),
    }
    ray.shutdown()
    return found
