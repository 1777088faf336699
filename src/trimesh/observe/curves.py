"""Curves of a program's metrics: mean, least and greatest over the ranks of a mesh, by step or by time; PURE.

CV-1 A curve has at most `limits.PAGE_CURVE_POINTS` points: when they are more, neighbours are merged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

from trimesh import limits
from trimesh._wire.observed import MetricRow, SampleRow
from trimesh.observe.past import Past, PastPoint
from trimesh.observe.run_snapshot import RunSnapshot


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of one mesh.

    Attributes:
        metric: Name of the metric.
        mesh: The mesh; "controller" for code outside of actors.
        unit: "step", or "time" where no step was logged.
        kind: "value" or "gauge"; "counter" for its growth a second; "histogram" for the mean of new values.
        x: Steps or Unix times, rising.
        mean, low, high: Mean, least and greatest value over the ranks at each.
        ranks: Number of members that have logged it.
    """

    metric: str
    mesh: str
    unit: str
    kind: str
    x: tuple[int, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    ranks: int


class _Points:
    """Sum, count, least and greatest value of each place, which is `width` steps or seconds wide."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.names = set[str]()
        self._ranks = 0
        self._width = 1
        self._at: dict[int, tuple[float, int, float, float]] = {}

    def add(self, x: int, value: float, name: str) -> None:
        if len(self.names) < limits.PAGE_CELLS_MAX:
            self.names.add(name)
        self._put(x // self._width, (value, 1, value, value))
        self._shorten()

    def _shorten(self) -> None:
        while len(self._at) > limits.PAGE_CURVE_POINTS:
            self._width *= 2
            before, self._at = self._at, {}
            for place, point in before.items():
                self._put(place // 2, point)

    def merge(self, past: PastPoint) -> None:
        self._ranks = max(self._ranks, past.ranks)
        self._put(past.x // self._width, (past.total, past.count, past.low, past.high))
        self._shorten()

    def _put(self, place: int, point: tuple[float, int, float, float]) -> None:
        known = self._at.get(place)
        if known is not None:
            total, count, low, high = known
            point = (total + point[0], count + point[1], min(low, point[2]), max(high, point[3]))
        self._at[place] = point

    def curve(self, metric: str, mesh: str, unit: str) -> Curve:
        places = sorted(self._at)
        points = [self._at[place] for place in places]
        return Curve(
            metric=metric,
            mesh=mesh,
            unit=unit,
            kind=self.kind,
            x=tuple(place * self._width for place in places),
            mean=tuple(total / count for total, count, _, _ in points),
            low=tuple(low for _, _, low, _ in points),
            high=tuple(high for _, _, _, high in points),
            ranks=max(self._ranks, len(self.names)),
        )


class Curves:
    """The curves of one run, from its history and from the samples since.

    Attributes:
        newest: Number of the newest sample.
        left_out: Number of curves beyond `limits.PAGE_CURVES`.
    """

    def __init__(self) -> None:
        self.newest = 0
        self.left_out = 0
        self._points: dict[tuple[str, str, str], _Points] = {}
        self._last: dict[tuple[str, str, str], tuple[float, float, int]] = {}
        self._refused = set[tuple[str, str, str]]()
        self._since = -math.inf

    def __len__(self) -> int:
        return len(self._points)

    def add(self, samples: Sequence[SampleRow]) -> None:
        """Add logged values, but for those that the history had (PH-2)."""
        for sample in samples:
            if sample.at <= self._since:
                continue
            unit, x = ("time", int(sample.at)) if sample.step is None else ("step", sample.step)
            for metric, value in sample.values.items():
                self._add((metric, sample.mesh, unit), "value", x, value, sample.name)

    def load(self, past: Past) -> None:
        """Add points of the history, before any other."""
        self._since = past.until
        for point in past.points:
            points = self._of((point.metric, point.mesh, point.unit), point.kind)
            if points is not None and math.isfinite(point.total):
                points.merge(point)

    def look(self, seen: RunSnapshot) -> None:
        """Add gauges, the growth of counters, and means of histograms since the last look."""
        last, self._last = self._last, {}
        for row in seen.metrics:
            if row.kind == "value":
                continue
            key, count = (row.proc, row.name, row.metric), sum(row.counts)
            if row.kind != "gauge" and key in last and seen.taken_at - last[key][0] < limits.RATE_SECONDS:
                self._last[key] = last[key]
                continue
            self._last[key] = (seen.taken_at, row.value, count)
            value = row.value if row.kind == "gauge" else _growth(last.get(key), row, seen.taken_at, count)
            if value is not None:
                self._add((row.metric, row.mesh, "time"), row.kind, int(seen.taken_at), value, row.name)

    def shown(self) -> Iterator[Curve]:
        """Yield the curves by name and mesh."""
        for (metric, mesh, unit), points in sorted(self._points.items()):
            yield points.curve(metric, mesh or "controller", unit)

    def _add(self, key: tuple[str, str, str], kind: str, x: int, value: float, name: str) -> None:
        if math.isfinite(value) and (points := self._of(key, kind)) is not None:
            points.add(x, value, name)

    def _of(self, key: tuple[str, str, str], kind: str) -> _Points | None:
        """Return the points of a curve, or None if there are too many curves."""
        points = self._points.get(key)
        if points is None:
            if len(self._points) >= limits.PAGE_CURVES:
                if len(self._refused) < limits.PAGE_CELLS_MAX:
                    self._refused.add(key)
                    self.left_out = len(self._refused)
                return None
            points = self._points[key] = _Points(kind)
        return points


def _growth(last: tuple[float, float, int] | None, row: MetricRow, at: float, count: int) -> float | None:
    if last is None or at <= last[0]:
        return None
    grown = row.value - last[1]
    if row.kind == "counter":
        return grown / (at - last[0])
    return grown / (count - last[2]) if count > last[2] else None
