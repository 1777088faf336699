"""How much a workload does, and how its samples become figures."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

Samples = dict[str, list[float]]
"""Metric name and the values that one run measured, in the metric's unit."""


@dataclass(frozen=True)
class Scale:
    """Counts of one run.

    Attributes:
        calls: Calls measured, after `warm_up` more that are not.
        spawns: Meshes started one after the other.
        kills: Processes killed; the peer takes ten seconds for each.
        peer_kills: The same for the peer.
        transfers: Reads of a large buffer.
        model_mebibytes: Size of the published state dict.
    """

    calls: int
    warm_up: int
    spawns: int
    kills: int
    peer_kills: int
    transfers: int
    model_mebibytes: int


FULL = Scale(calls=2000, warm_up=200, spawns=3, kills=20, peer_kills=1, transfers=20, model_mebibytes=1024)
SMOKE = Scale(calls=50, warm_up=5, spawns=1, kills=2, peer_kills=0, transfers=2, model_mebibytes=16)


@dataclass(frozen=True)
class Metric:
    """A figure of the table.

    Attributes:
        name: Key of its samples.
        title: What it says in the table.
        unit: Unit of the samples.
        quantiles: Which quantiles of the samples are shown; 0.5 is the median, 1.0 the worst.
        goals: One goal a quantile, in the metric's unit; empty for none.
    """

    name: str
    title: str
    unit: str
    quantiles: tuple[float, ...] = (0.5,)
    goals: tuple[float, ...] = ()


async def timed_calls(scale: Scale, call: Callable[[], Awaitable[object]], *, share: int = 1) -> list[float]:
    """Return the microseconds of each of `scale.calls / share` calls, one after the other."""
    for _ in range(scale.warm_up):
        await call()
    found = []
    for _ in range(max(1, scale.calls // share)):
        start = time.perf_counter_ns()
        await call()
        found.append((time.perf_counter_ns() - start) / 1e3)
    return found
