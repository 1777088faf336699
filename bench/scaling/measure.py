"""Measures the costs of the model on this machine with few processes, then casts over many, beside the prediction."""

from __future__ import annotations

import os
import pickle
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import trio

from bench.scaling import wire
from bench.scaling.actors import open_cast
from bench.scaling.costs import Costs
from bench.scaling.simulate import VALUE
from bench.scaling.tree import Shape, shared_seconds

FEW = (1, 8, 16, 32)
"""Ranks that the costs are taken from."""
FILL_RANKS = 128
"""Ranks that overfill the caches: from these comes how many stay warm."""
FLAT = (8, 16, 32, 64, 96, 128, 192, 256)
TREES = ((1, 4), (2, 4), (4, 4), (8, 4), (14, 4), (16, 16), (20, 4))
"""Hosts and fan-out, of eight ranks each."""
PER_HOST = 8
CASTS = 200
CASTS_AT_ONCE = 5
"""Casts between two questions how much was computed; the answer is part of what is computed, a fifth of a cast."""
COLD_CASTS = 20
SWEEP_BYTES = 96 << 20
"""Read between two casts, it leaves nothing of a process in a cache of 32 MiB."""
BULK_BYTES = 16 << 20


@dataclass(frozen=True)
class Seen:
    """What casts over real processes have shown, in microseconds: the lower decile, for what others compute only adds.

    Attributes:
        whole: From the cast to the last answer.
        own: Computed by the caller.
        work: Computed by each process below on average.
        first: Computed by the first of them, where there are leaders by one of those.
    """

    whole: float
    own: float
    work: float
    first: float


async def see(below: Any, cast: Callable[[], Awaitable[Any]], casts: int, between: Callable[[], None]) -> Seen:
    """Measure some casts.

    Args:
        below: The mesh that the caller calls, which says what has been computed there.
        cast: Makes one.
        casts: How many.
        between: Called before each.
    """
    for _ in range(CASTS_AT_ONCE):
        await cast()
    spans: list[float] = []
    used: list[float] = []
    works: list[float] = []
    firsts: list[float] = []
    for _ in range(casts // CASTS_AT_ONCE):
        before = await cpu_seconds(below)
        for _ in range(CASTS_AT_ONCE):
            between()
            cpu, start = time.process_time(), time.perf_counter()
            await cast()
            spans.append(time.perf_counter() - start)
            used.append(time.process_time() - cpu)
        work = [late - early for early, late in zip(before, await cpu_seconds(below), strict=True)]
        works.append(statistics.fmean(work) / CASTS_AT_ONCE)
        firsts.append(work[0] / CASTS_AT_ONCE)
    return Seen(whole=least(spans), own=least(used), work=least(works), first=least(firsts))


def least(seconds: list[float]) -> float:
    """Return the lower decile, in microseconds."""
    return sorted(seconds)[len(seconds) // 10] * 1e6


async def cpu_seconds(below: Any) -> list[float]:
    """Return what each process below has computed so far, the first leader first where there are any."""
    found: list[float] = []
    for answer in (await below.cpu_seconds.call()).values():
        found += answer if isinstance(answer, list) else [answer]
    return found


def rest() -> None:
    """Do nothing between two casts."""


def sweep() -> None:
    """Empty the caches of all cores that this process may use."""
    cores = os.sched_getaffinity(0)
    for core in cores:
        os.sched_setaffinity(0, {core})
        _SWEPT.count(1)
    os.sched_setaffinity(0, cores)


_SWEPT = bytearray(SWEEP_BYTES)


async def see_shape(shape: Shape, casts: int = CASTS, between: Callable[[], None] = rest) -> Seen:
    """Measure casts of a small value over a shape."""
    async with open_cast(shape) as (below, cast):
        return await see(below, lambda: cast(VALUE), casts, between)


async def measure_costs() -> Costs:
    """Measure what the model is made of."""
    few = {ranks: await see_shape(Shape(1, ranks)) for ranks in FEW}
    rank = (few[32].own - few[8].own) / 24
    call = few[8].own - 8 * rank
    send = await measure_send()
    work = statistics.fmean([few[8].work, few[16].work])
    cold = (await see_shape(Shape(1, 8), COLD_CASTS, sweep)).work
    missed = ((await see_shape(Shape(1, FILL_RANKS))).work - work) / (cold - work)
    led = await see_shape(Shape(1, PER_HOST, 1))
    alone = max(0.0, few[1].whole - few[1].own - few[1].work)
    rings, streams = await wire.measure("ring"), await wire.measure("stream")
    tcp = max(0.0, streams.cpu - rings.cpu)
    return Costs(
        call=call,
        send=send,
        take=rank - send,
        work=work,
        work_cold=cold,
        warm_ranks=FILL_RANKS * (1.0 - min(1.0, max(0.0, missed))),
        relay=led.first - PER_HOST * rank,
        hop=alone / 2,
        tcp_hop=alone / 2 + max(0.0, streams.round_trip - rings.round_trip) / 2,
        tcp_send=tcp / 2,
        tcp_take=tcp / 2,
        byte=measure_byte(),
        copy=await measure_copy(),
        tcp_copy=streams.byte,
    )


async def measure_send() -> float:
    """Return what sending to one rank more costs, bells included: broadcasts, which bring no replies."""
    found: dict[int, float] = {}
    for ranks in (8, 32):
        async with open_cast(Shape(1, ranks)) as (below, cast):
            used: list[float] = []
            for _ in range(CASTS):
                await cast(VALUE)
                idle = time.thread_time()
                await trio.lowlevel.checkpoint()
                start = time.thread_time()
                below.cast.broadcast_nowait(VALUE)
                await trio.lowlevel.checkpoint()  # bells ring before the loop waits
                used.append((time.thread_time() - start) - (start - idle))
            found[ranks] = least(used)
    return (found[32] - found[8]) / 24


def measure_byte() -> float:
    """Return what a byte of a list of answers costs both sides."""
    answers = [VALUE] * 4096
    spans: list[float] = []
    for _ in range(200):
        start = time.perf_counter()
        payload = pickle.dumps(answers, protocol=5)
        found: list[float] = []
        found += pickle.loads(payload)
        spans.append((time.perf_counter() - start) / len(payload))
    return statistics.median(spans) * 1e6


async def measure_copy() -> float:
    """Return what a byte of a large argument costs on one host, whatever the ranks."""
    import numpy as np

    async with open_cast(Shape(1, PER_HOST)) as (below, cast):
        array = np.ones(BULK_BYTES, dtype=np.uint8)
        large = await see(below, lambda: below.length.call(array), COLD_CASTS, rest)
        small = await see(below, lambda: cast(VALUE), COLD_CASTS, rest)
    return max(0.0, large.whole - small.whole) / BULK_BYTES


async def measure_shape(shape: Shape, costs: Costs, cores: int) -> dict[str, Any]:
    """Measure casts over real processes; return a row of the table, in microseconds."""
    load = os.getloadavg()[0]
    seen = await see_shape(shape)
    model_cpu = shared_seconds(shape, costs, 1) * 1e6
    row = {
        "hosts": shape.hosts,
        "per_host": shape.per_host,
        "fan_out": shape.fan_out,
        "measured_us": seen.whole,
        "model_us": shared_seconds(shape, costs, cores) * 1e6,
        "measured_cpu_us": seen.own + seen.work * shape.processes,
        "model_cpu_us": model_cpu - 2 * costs.hop,
        "load": load,
    }
    print({name: round(value, 1) for name, value in row.items()}, flush=True)
    return row


def real_shapes() -> list[Shape]:
    """Return what is measured over real processes."""
    flat = [Shape(max(1, ranks // PER_HOST), PER_HOST) for ranks in FLAT]
    return flat + [Shape(hosts, PER_HOST, fan_out) for hosts, fan_out in TREES]
