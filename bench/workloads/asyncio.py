"""Calls, streams, pools and the loop from asyncio and to asyncio actors, beside the same from Trio to Trio actors.

A program on Trio, one on asyncio and one on uvloop run at the same time, and measure in turn while the others wait, so
that all see the same neighbours. Each ratio divides the medians of the best turns of a round, because other programs of
the machine keep processes from spinning, which hides what a call costs. Fairness is how late another task of the loop
runs while one task calls without pause: a ticker of 2 ms, and two tasks that send each other a byte through sockets.
The loop is that of `bench.workloads.loop`, whose sides of Ray and Monarch are measured here, too.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from bench.processes import processor_seconds
from bench.scale import Metric, Samples, Scale
from bench.workloads import loop

Pair = tuple[str, str]
"""Event loops of the calling program and of the actor."""

NAMES = {"trio": "Trio", "asyncio": "asyncio", "uvloop": "uvloop"}
BASE: Pair = ("trio", "trio")
FROM_ASYNCIO: Pair = ("asyncio", "trio")
TURN_SHARE = 5
"""A measurement makes this share of the calls of the scale, and takes this share of the items of a stream."""

IDLE_SHARE = 20
"""The programs idle for this share of the idle time of the scale, once a turn."""


class Kind(NamedTuple):
    """One measurement, made for several pairs.

    Attributes:
        name: Method of `bench.asyncio_program.Measurement`.
        title: In the table.
        unit: Of the samples.
        goals: Each pair but `BASE`, and the goal of its ratio to `BASE`, or None.
        is_rate: More is better.
        quantiles: Of the samples.
    """

    name: str
    title: str
    unit: str
    goals: dict[Pair, float | None]
    is_rate: bool = False
    quantiles: tuple[float, ...] = (0.5,)

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """Return all pairs, `BASE` first."""
        return (BASE, *self.goals)

    def key(self, pair: Pair) -> str:
        """Return the name of the samples of a pair."""
        return "_".join(("asyncio", self.name, *pair))

    def ratio_key(self, pair: Pair) -> str:
        """Return the name of the ratios of a pair to `BASE`."""
        return f"{self.key(pair)}_ratio"

    def metrics(self) -> list[Metric]:
        """Return the metrics of all pairs, and of their ratios to `BASE`."""
        found: list[Metric] = []
        for pair in self.pairs:
            title = f"{self.title}, {self._pair_title(pair)}"
            found.append(Metric(self.key(pair), title, self.unit, self.quantiles, is_rate=self.is_rate))
            if pair != BASE:
                goal = self.goals[pair]
                title = f"{title} / {self._pair_title(BASE)}"
                goals = () if goal is None else (goal,)
                found.append(Metric(self.ratio_key(pair), title, "x", goals=goals, is_rate=self.is_rate))
        return found

    def _pair_title(self, pair: Pair) -> str:
        caller, actor = (NAMES[side] for side in pair)
        varies = any(other != BASE[1] for _, other in self.goals)
        return f"{caller} to {actor}" if varies else caller


KINDS = (
    Kind(
        "call",
        "call_one",
        "us",
        {("trio", "asyncio"): 1.8, FROM_ASYNCIO: 1.5, ("asyncio", "asyncio"): 2.2, ("uvloop", "trio"): 3.0},
    ),
    Kind(
        "tasks",
        "calls of 64 tasks",
        "k/s",
        {("trio", "asyncio"): 0.7, FROM_ASYNCIO: 0.7, ("asyncio", "asyncio"): 0.7},
        is_rate=True,
    ),
    Kind(
        "stream",
        "items of a stream",
        "k/s",
        {("trio", "asyncio"): None, FROM_ASYNCIO: None, ("asyncio", "asyncio"): None},
        is_rate=True,
    ),
    Kind("block", "a block with nothing in it", "us", {FROM_ASYNCIO: None}),
    Kind("block_call", "a block with a call in it", "us", {FROM_ASYNCIO: None}),
    Kind("request", "a request of a pool of 4", "us", {FROM_ASYNCIO: None}),
    Kind("requests", "64 requests of a pool of 4 at once", "k/s", {FROM_ASYNCIO: None}, is_rate=True),
    Kind("generate", "64 callers of a pool of 8: a request of 64 token ids each way", "us", {FROM_ASYNCIO: None}),
    Kind("loop", "rollouts, no-op model", "1000/s", {FROM_ASYNCIO: None}, is_rate=True),
    Kind("ticker", "lateness of a ticker beside calls", "us", {FROM_ASYNCIO: None}, quantiles=(0.5, 0.99)),
    Kind("sockets", "echo by sockets beside calls", "us", {FROM_ASYNCIO: None}, quantiles=(0.5, 0.99)),
)
LOOP = next(kind for kind in KINDS if kind.name == "loop").key(FROM_ASYNCIO)

METRICS = [
    *(metric for kind in KINDS for metric in kind.metrics()),
    *(
        Metric(f"asyncio_idle_{name}", f"idle program with open meshes, {NAMES[name]}: processor time", "ms/s")
        for name in ("trio", "asyncio")
    ),
]

LACKS = {"xoscar": loop.LACKS["xoscar"]}


async def trimesh_side(scale: Scale) -> Samples:
    from bench.workloads.observed import open_program

    found: Samples = {metric.name: [] for metric in METRICS}
    sizes = replace(
        scale,
        calls=scale.calls // TURN_SHARE,
        warm_up=scale.warm_up // TURN_SHARE,
        rates=1,
        stream_items=scale.stream_items // TURN_SHARE,
    )
    names = [name for name in NAMES if name != "uvloop" or importlib.util.find_spec("uvloop") is not None]
    with ExitStack() as stack:
        programs: dict[str, Any] = {}
        for name in names:
            program = open_program("bench.asyncio_program", name, json.dumps(asdict(sizes)))
            programs[name] = stack.enter_context(program)
        turns = [take_turn(programs, found, is_reversed=turn % 2 == 1) for turn in range(max(1, scale.rates // 2))]
        for _ in turns:
            watch_idle(programs, scale.idle_seconds / IDLE_SHARE, found)
    add_ratios(turns, found)
    return found


def take_turn(programs: dict[str, Any], found: Samples, *, is_reversed: bool = False) -> dict[str, float]:
    """Measure each kind once for each pair that has a program; add the samples to `found` and return their medians."""
    medians = {}
    for kind in KINDS:
        for caller, actor in reversed(kind.pairs) if is_reversed else kind.pairs:
            if caller in programs:
                key = kind.key((caller, actor))
                samples = programs[caller].request(kind.name, actor)
                found[key] += samples
                medians[key] = statistics.median(samples)
    return medians


def add_ratios(turns: list[dict[str, float]], found: Samples) -> None:
    """Add to `found` the ratio of the best median of each pair to that of `BASE`."""
    for kind in KINDS:
        best = max if kind.is_rate else min
        for pair in kind.goals:
            medians, bases = ([turn[kind.key(one)] for turn in turns if kind.key(one) in turn] for one in (pair, BASE))
            if medians:
                found[kind.ratio_key(pair)].append(best(medians) / best(bases))


def watch_idle(programs: dict[str, Any], seconds: float, found: Samples) -> None:
    """Add the processor time of programs that do nothing, all of them over the same seconds."""
    idle = {f"asyncio_idle_{name}": programs[name].pid for name in ("trio", "asyncio")}
    before = {name: processor_seconds(pid) for name, pid in idle.items()}
    time.sleep(seconds)
    for name, pid in idle.items():
        found[name].append((processor_seconds(pid) - before[name]) / seconds * 1e3)


async def ray_side(scale: Scale) -> Samples:
    return {LOOP: (await loop.ray_side(scale))["loop_rollouts"]}


async def monarch_side(scale: Scale) -> Samples:
    return {LOOP: (await loop.monarch_side(scale))["loop_rollouts"]}
