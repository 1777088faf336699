"""OpenTelemetry instruments for the metrics of a program; imported by `instrument`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation

from trimesh._runtime.metrics import COUNTER, HISTOGRAM, MemberMetrics, metrics_here, on_series
from trimesh.telemetry.spans import MESH, SCOPE


class MetricMeters:
    """Makes an observable instrument for each metric of this process, when it first appears.

    They have the mesh as an attribute, never a rank: values and gauges the mean over the members of the mesh in this
    process, counters their sum. A histogram becomes two counters, `NAME.count` and `NAME.sum`.
    """

    def __init__(self, meter_provider: MeterProvider | None) -> None:
        self._meter = metrics.get_meter(SCOPE, meter_provider=meter_provider)
        self._known = set[str]()
        self._is_over = False
        on_series.append(self._add)
        for member in metrics_here().all_members():
            for name, kind in member.names():
                self._add(name, kind)

    def end(self) -> None:
        """Report nothing from now on."""
        self._is_over = True
        on_series.remove(self._add)

    def _add(self, name: str, kind: str) -> None:
        if name in self._known:
            return
        self._known.add(name)
        shown = re.sub(r"[^A-Za-z0-9_.\-/]", "_", name)
        shown = shown if shown[0].isalpha() else f"m{shown}"
        if kind == HISTOGRAM:
            self._meter.create_observable_counter(f"{shown}.count", [self._observer(_counts, name, sum)])
            self._meter.create_observable_counter(f"{shown}.sum", [self._observer(_sums, name, sum)])
        elif kind == COUNTER:
            self._meter.create_observable_counter(shown, [self._observer(_totals, name, sum)])
        else:
            self._meter.create_observable_gauge(shown, [self._observer(_levels, name, _mean)])

    def _observer(
        self, read: Callable[[MemberMetrics, str], float | None], name: str, merge: Callable[[list[float]], float]
    ) -> Any:
        def observe(_: CallbackOptions) -> Iterator[Observation]:
            found = dict[str, list[float]]()
            for member in [] if self._is_over else metrics_here().all_members():
                value = read(member, name)
                if value is not None:
                    found.setdefault(member.mesh, []).append(value)
            for mesh, values in found.items():
                yield Observation(merge(values), {MESH: mesh} if mesh else {})

        return observe


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _levels(member: MemberMetrics, name: str) -> float | None:
    sample = member.latest.get(name)
    if sample is not None:
        return sample[4][name]
    level = member.levels.get(name)
    return None if level is None else level[1]


def _totals(member: MemberMetrics, name: str) -> float | None:
    return member.totals.get(name)


def _counts(member: MemberMetrics, name: str) -> float | None:
    found = member.spreads.get(name)
    return None if found is None else sum(found.counts)


def _sums(member: MemberMetrics, name: str) -> float | None:
    found = member.spreads.get(name)
    return None if found is None else found.total
