"""How much a workload does, and how its samples become figures."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

Samples = dict[str, list[float]]
"""Metric name and the values that one run measured, in the metric's unit."""


@dataclass(frozen=True)
class Scale:
    """Counts of one run.

    Attributes:
        calls: Calls measured, after `warm_up` more that are not.
        warm_up: Those.
        rates: How often a rate is taken, of `rate_calls` calls each.
        rate_calls: Calls that are under way at once.
        stream_items: Items of one stream.
        spawns: Meshes started one after the other, of each size.
        spawn_sizes: Processes of those meshes.
        kills: Processes killed, each in a new mesh but for restarts.
        transfers: Reads of a large buffer, calls with a large payload.
        model_mebibytes: Size of the published state dict.
        offered_mebibytes: What a slow consumer is offered, in messages of 1 MiB.
        link_mebibytes: What moves over a link while small calls use it.
        hosts: Of a job that is entered.
        idle_hosts: Of a job that does nothing, for `idle_seconds`.
        idle_seconds: That.
    """

    calls: int
    warm_up: int
    rates: int
    rate_calls: int
    stream_items: int
    spawns: int
    spawn_sizes: tuple[int, ...]
    kills: int
    transfers: int
    model_mebibytes: int
    offered_mebibytes: int
    link_mebibytes: int
    hosts: int
    idle_hosts: int
    idle_seconds: float

    @property
    def is_smoke(self) -> bool:
        """Whether a run only proves that it runs."""
        return self.rates == 1

    def for_peer(self) -> Scale:
        """Return what a peer does of it: fewer of what takes some of them seconds, once a round of the slowest."""
        return replace(
            self,
            calls=max(1, self.calls // 2),
            rates=max(1, self.rates // 3),
            spawns=1,
            kills=1,
            transfers=max(2, self.transfers // 4),
        )


FULL = Scale(
    calls=2000,
    warm_up=200,
    rates=10,
    rate_calls=1000,
    stream_items=20_000,
    spawns=3,
    spawn_sizes=(1, 8, 32),
    kills=20,
    transfers=20,
    model_mebibytes=1024,
    offered_mebibytes=2048,
    link_mebibytes=1024,
    hosts=16,
    idle_hosts=64,
    idle_seconds=20.0,
)
SMOKE = Scale(
    calls=50,
    warm_up=5,
    rates=1,
    rate_calls=50,
    stream_items=200,
    spawns=1,
    spawn_sizes=(1, 4),
    kills=2,
    transfers=2,
    model_mebibytes=16,
    offered_mebibytes=32,
    link_mebibytes=16,
    hosts=2,
    idle_hosts=2,
    idle_seconds=0.5,
)


@dataclass(frozen=True)
class Metric:
    """A figure of the table.

    Attributes:
        name: Key of its samples.
        title: What it says in the table.
        unit: Unit of the samples.
        quantiles: Which quantiles of the samples are shown; 0.5 is the median, 1.0 the worst.
        goals: One goal a quantile, in the metric's unit; empty for none.
        is_rate: More is better.
    """

    name: str
    title: str
    unit: str
    quantiles: tuple[float, ...] = (0.5,)
    goals: tuple[float, ...] = ()
    is_rate: bool = False


async def timed_calls(scale: Scale, call: Callable[[], Awaitable[object]], *, share: int = 1) -> list[float]:
    """Return the microseconds of each of `scale.calls / share` calls, one after the other."""
    for _ in range(max(1, scale.warm_up // share)):
        await call()
    found = []
    for _ in range(max(1, scale.calls // share)):
        start = time.perf_counter_ns()
        await call()
        found.append((time.perf_counter_ns() - start) / 1e3)
    return found


async def timed_rates(scale: Scale, work: Callable[[int], Awaitable[object]], count: int) -> list[float]:
    """Return, for each of `scale.rates` rounds of some work, thousands a second; one round before is not counted."""
    await work(max(1, count // 10))
    found = []
    for _ in range(scale.rates):
        start = time.perf_counter()
        await work(count)
        found.append(count / (time.perf_counter() - start) / 1e3)
    return found
