"""A pool of replicas: requests a second, what a request costs beside `choose`, and how fast a pause aborts.

Callers in a loop are those of a program that generates: each sends token ids, gets as many, and sends again. Ray's
figure of them is the better one of its deployment and of actors by hand, to the one with the fewest requests.

Ray's pool is a deployment of Ray Serve, used by its handle from the program: no HTTP. Monarch has no pool: what is
written by hand for it keeps a bound and the load of each replica, and gives a request to the least loaded; nothing of
it looks at deaths, pauses, deadlines or queues. "Chosen" is what either has without a pool: actors in turn.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable
from itertools import cycle
from typing import Any

from bench.processes import rates_and_costs
from bench.scale import Metric, Samples, Scale, timed_calls, timed_rates

REPLICAS = 8
IN_FLIGHT = 256
CALLERS = 64
TOKENS = list(range(100_000, 100_064))
"""Ids as large as a vocabulary."""

CONCURRENCY = 64
QUIET = {"log_level": "ERROR", "enable_access_log": False}
"""Otherwise Ray Serve writes a line for each request."""

METRICS = [
    Metric("pool_requests", "pool of 8 replicas, a task a request", "1000/s", is_rate=True, goals=(10.0,)),
    Metric("pool_all_cpu", "of each: processor time of all processes", "us"),
    Metric("pool_chosen", "the same by `choose`, of peers: actors in turn", "1000/s", is_rate=True),
    Metric("pool_request", "one request of a pool after the other", "us", (0.5, 0.99)),
    Metric("pool_overhead", "of that, more than `choose`", "us", goals=(30.0,)),
    Metric("pool_cpu", "a task a request: caller's processor time of each", "us"),
    Metric("pool_cpu_overhead", "of that, more than `choose`", "us"),
    Metric("pool_generate", "of 64 callers in a loop: a request of 64 token ids each way", "us"),
    Metric("pool_abort", 'paused("abort") with 256 requests running: until the body begins', "ms", (0.5, 1.0), (20.0,)),
]

LACKS = {"xoscar": "its pools are processes, not replicas that get requests by their load"}


async def trimesh_side(scale: Scale) -> Samples:
    from bench.meshes.trimesh_mesh import at_once
    from bench.workloads.trimesh_actors import Hanger
    from trimesh import this_host
    from trimesh.service import Paused, open_pool

    found: Samples = {}
    async with (
        this_host().spawn_procs({"procs": REPLICAS}) as procs,
        procs.spawn("actors", Hanger) as mesh,
        open_pool(mesh, concurrency=CONCURRENCY, queue=scale.rate_calls) as pool,
    ):
        found["pool_requests"], found["pool_all_cpu"] = await rates_and_costs(
            scale, lambda count: at_once(pool.pid, count), scale.rate_calls
        )
        found["pool_chosen"] = await timed_rates(scale, lambda count: at_once(mesh.pid.choose, count), scale.rate_calls)
        found["pool_request"] = await timed_calls(scale, pool.pid)
        chosen = await timed_calls(scale, mesh.pid.choose)
        found["pool_overhead"] = [statistics.median(found["pool_request"]) - statistics.median(chosen)]
        found["pool_generate"] = await callers_times(scale, at_once, lambda: pool.generate(TOKENS))
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


async def callers_times(
    scale: Scale, at_once: Callable[[Any, int], Awaitable[None]], request: Callable[[], Awaitable[Any]]
) -> list[float]:
    """Return the microseconds of each request of callers that each make one after the other, all callers at once.

    Args:
        scale: How many.
        at_once: Of the module of tasks of the program: runs a function in so many tasks.
        request: Sends `TOKENS`.
    """
    found: list[float] = []

    async def call_again() -> None:
        for _ in range(max(2, scale.calls // CALLERS)):
            start = time.perf_counter_ns()
            answer = await request()
            found.append((time.perf_counter_ns() - start) / 1e3)
            if answer != TOKENS:
                raise RuntimeError(f"{len(TOKENS)} ids were sent, and came back as {answer!r}")

    await at_once(call_again, CALLERS)
    found.clear()  # the first round opens connections
    await at_once(call_again, CALLERS)
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
    import ray
    from ray import serve

    ray.init(num_cpus=2 * REPLICAS, include_dashboard=False, log_to_driver=False)

    @ray.remote(num_cpus=0, max_concurrency=CONCURRENCY)
    class Answerer:
        async def pid(self) -> int:
            return 1

        async def generate(self, tokens: list[int]) -> list[int]:
            return tokens

    @serve.deployment(
        num_replicas=REPLICAS, max_ongoing_requests=CONCURRENCY, ray_actor_options={"num_cpus": 0}, logging_config=QUIET
    )
    class Served:
        async def pid(self) -> int:
            return 1

        async def generate(self, tokens: list[int]) -> list[int]:
            return tokens

    serve.start(proxy_location="Disabled", logging_config=QUIET)
    handle = serve.run(Served.bind())
    actors = [Answerer.remote() for _ in range(REPLICAS)]
    turn = cycle(actors)

    async def by_handle() -> None:
        await handle.pid.remote()

    async def in_turn() -> None:
        await next(turn).pid.remote()

    found = await _asyncio_samples(scale, by_handle, in_turn)
    found["pool_generate"] = await ray_generate(scale, handle, actors)
    serve.shutdown()
    ray.shutdown()
    return found


async def ray_generate(scale: Scale, handle: Any, actors: list[Any]) -> list[float]:
    """Return `callers_times` of the better one of a deployment and of actors by hand."""
    from bench.meshes.asyncio_tasks import at_once

    loads = [0] * len(actors)

    async def by_hand() -> Any:
        index = min(range(len(actors)), key=loads.__getitem__)
        loads[index] += 1
        try:
            return await actors[index].generate.remote(TOKENS)
        finally:
            loads[index] -= 1

    async def by_handle() -> Any:
        return await handle.generate.remote(TOKENS)

    ways = [await callers_times(scale, at_once, way) for way in (by_handle, by_hand)]
    return min(ways, key=statistics.median)


async def monarch_side(scale: Scale) -> Samples:
    import asyncio

    from bench.meshes import monarch_mesh
    from bench.meshes.asyncio_tasks import at_once

    async with monarch_mesh.open_mesh(REPLICAS) as mesh:
        replicas = [mesh.replica(index) for index in range(REPLICAS)]
        loads = dict.fromkeys(range(REPLICAS), 0)
        room = asyncio.Semaphore(REPLICAS * CONCURRENCY)
        turn = cycle(replicas)

        async def least_loaded(name: str = "pid", *args: Any) -> Any:
            async with room:
                index = min(loads, key=loads.__getitem__)
                loads[index] += 1
                try:
                    return await getattr(replicas[index], name).call_one(*args)
                finally:
                    loads[index] -= 1

        async def in_turn() -> None:
            await next(turn).pid.call_one()

        found = await _asyncio_samples(scale, least_loaded, in_turn)
        found["pool_generate"] = await callers_times(scale, at_once, lambda: least_loaded("echo", TOKENS))
        return found


async def _asyncio_samples(
    scale: Scale, pooled: Callable[[], Awaitable[None]], chosen: Callable[[], Awaitable[None]]
) -> Samples:
    """Time requests of a pool, and calls without one, in a program of asyncio."""
    from bench.meshes.asyncio_tasks import at_once

    rates, costs = await rates_and_costs(scale, lambda count: at_once(pooled, count), scale.rate_calls)
    found: Samples = {
        "pool_requests": rates,
        "pool_all_cpu": costs,
        "pool_chosen": await timed_rates(scale, lambda count: at_once(chosen, count), scale.rate_calls),
        "pool_request": await timed_calls(scale, pooled),
    }
    alone = await timed_calls(scale, chosen)
    found["pool_overhead"] = [statistics.median(found["pool_request"]) - statistics.median(alone)]
    return found
