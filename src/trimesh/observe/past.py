"""The past of a run, from its history: sums of resources and points of curves, for an observer that is opened late.

PH-1 Points of curves are merged in the query: at most `limits.PAGE_CURVE_POINTS` of a curve are read.
PH-2 Values logged before `until` come from the history, later ones from the run, so that none counts twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from trimesh import limits
from trimesh.errors import ConnectError
from trimesh.observe.history import QueryResult
from trimesh.observe.sums import RunSums

_USAGE: Final = """
WITH rows AS (
    SELECT at, memory_bytes, gpu_percent, gpu_memory_bytes,
        (cpu_seconds - lag(cpu_seconds) OVER one) / (at - lag(at) OVER one) AS cores
    FROM usage WHERE at > ? WINDOW one AS (PARTITION BY proc ORDER BY at)
)
SELECT at, sum(memory_bytes), sum(max(cores, 0.0)), max(gpu_percent), sum(gpu_memory_bytes)
FROM rows GROUP BY at ORDER BY at
"""

_POINTS: Final = """
WITH changes AS (
    SELECT metric, mesh, kind, name, step, at, value,
        value - lag(value) OVER one AS grown, count - lag(count) OVER one AS more, at - lag(at) OVER one AS seconds
    FROM metrics WHERE value IS NOT NULL WINDOW one AS (PARTITION BY metric, proc, name, incarnation ORDER BY at)
), rows AS (
    SELECT metric, mesh, kind, name, step IS NULL AS timed, coalesce(step, CAST(at AS INTEGER)) AS x,
        CASE kind WHEN 'counter' THEN grown / seconds WHEN 'histogram' THEN grown / nullif(more, 0) ELSE value END AS y
    FROM changes
), widths AS (
    SELECT metric, mesh, timed, 1 + (max(x) - min(x)) / :points AS width, count(DISTINCT name) AS ranks
    FROM rows GROUP BY 1, 2, 3 ORDER BY 1, 2, 3 LIMIT :curves
)
SELECT metric, mesh, timed, max(kind), max(ranks), x / width * width, sum(y), count(*), min(y), max(y)
FROM rows JOIN widths USING (metric, mesh, timed) WHERE y IS NOT NULL GROUP BY 1, 2, 3, 6
"""


class PastPoint(msgspec.Struct, frozen=True):
    """Values of a metric over the ranks of a mesh, at one step or time.

    Attributes:
        metric, mesh, kind: The curve, as in `MetricRow`.
        unit: "step" or "time".
        ranks: Number of members that have logged the metric.
        x: Step or Unix time.
        total, count, low, high: Sum, number, least and greatest of the values.
    """

    metric: str
    mesh: str
    unit: str
    kind: str
    ranks: int
    x: int
    total: float
    count: int
    low: float
    high: float


class Past(msgspec.Struct, frozen=True):
    """What the history has of a run.

    Attributes:
        sums: Sums of resources, oldest first.
        points: Points of curves.
        until: Unix time of the newest logged value that is in `points`.
    """

    sums: tuple[RunSums, ...] = ()
    points: tuple[PastPoint, ...] = ()
    until: float = -math.inf


def read_past(query: Callable[[str, Any], QueryResult], after: float = 0.0, *, curves: bool = True) -> Past:
    """Return the past of a run; an empty one if it has no history.

    Args:
        query: Queries the history of the run.
        after: Unix time; older sums are left out.
        curves: Whether to read points of curves.

    Blocking: some 100 ms for an hour of 64 ranks.
    """
    try:
        sums = tuple(_sums(row) for row in query(_USAGE, (after,)).rows)
        if not curves:
            return Past(sums)
        until = query("SELECT coalesce(max(at), 0.0) FROM samples", ()).rows[0][0]
        given = {"points": limits.PAGE_CURVE_POINTS, "curves": limits.PAGE_CURVES}
        return Past(sums, tuple(_point(row) for row in query(_POINTS, given).rows), until)
    except (ConnectError, ValueError):
        return Past()


def _sums(row: Sequence[Any]) -> RunSums:
    at, memory, cpu, gpu, gpu_memory = row
    return RunSums(at=at, memory=memory, cpu=cpu, gpu=gpu, gpu_memory=gpu_memory)


def _point(row: Sequence[Any]) -> PastPoint:
    metric, mesh, timed, kind, ranks, *values = row
    return PastPoint(metric, mesh or "", "time" if timed else "step", kind, ranks, *values)
