"""Samples of several rounds as figures, a table and JSON."""

from __future__ import annotations

import os
import platform
import statistics
from dataclasses import dataclass, field
from typing import Any

from bench.scale import Metric, Samples


@dataclass
class Result:
    """What all rounds measured of one metric.

    Attributes:
        metric: The metric.
        rounds: For each side, one list of samples a round.
    """

    metric: Metric
    rounds: dict[str, list[list[float]]] = field(default_factory=dict)

    def add(self, side: str, samples: Samples) -> None:
        """Take the samples of one round; none is none."""
        if samples.get(self.metric.name):
            self.rounds.setdefault(side, []).append(samples[self.metric.name])

    def figure(self, side: str, quantile: float) -> float | None:
        """Return the median over the rounds of a quantile; the worst of all rounds for quantile 1."""
        found = [quantile_of(samples, quantile) for samples in self.rounds.get(side, [])]
        if not found:
            return None
        return max(found) if quantile == 1.0 else statistics.median(found)


def quantile_of(samples: list[float], quantile: float) -> float:
    """Return the value below which a share `quantile` of the samples lies (nearest rank)."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]


def quantile_name(quantile: float) -> str:
    """Return how a quantile is called in the table."""
    return {0.5: "p50", 1.0: "worst"}.get(quantile, f"p{quantile * 100:g}")


def rows(results: list[Result]) -> list[dict[str, Any]]:
    """Return one row a figure: both sides, their ratio, the goal."""
    found = []
    for result in results:
        for index, quantile in enumerate(result.metric.quantiles):
            ours, theirs = (result.figure(side, quantile) for side in ("trimesh", "monarch"))
            found.append({
                "figure": result.metric.title,
                "quantile": quantile_name(quantile),
                "unit": result.metric.unit,
                "trimesh": ours,
                "monarch": theirs,
                "ratio": theirs / ours if ours and theirs else None,
                "goal": result.metric.goals[index] if result.metric.goals else None,
            })  # fmt: skip
    return found


def table(results: list[Result]) -> str:
    """Return the figures as text."""
    head = ("figure", "", "trimesh", "monarch", "monarch / trimesh", "goal")
    lines = [head]
    for row in rows(results):
        unit = row["unit"]
        lines.append((
            row["figure"],
            row["quantile"],
            amount(row["trimesh"], unit),
            amount(row["monarch"], unit),
            f"{row['ratio']:.1f} x" if row["ratio"] is not None else "-",
            amount(row["goal"], unit) if row["goal"] is not None else "",
        ))  # fmt: skip
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    texts = []
    for line in lines:
        cells = [*map(str.ljust, line[:2], widths[:2]), *map(str.rjust, line[2:], widths[2:])]
        texts.append("  ".join(cells).rstrip())
    texts.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(texts)


def amount(value: float | None, unit: str) -> str:
    """Return a figure with its unit, with three digits that say something."""
    if value is None:
        return "-"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f} {unit}"


def machine() -> dict[str, Any]:
    """Return what a reader of the figures must know of the machine."""
    model = ""
    with open("/proc/cpuinfo") as file:
        model = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    return {
        "cpu": model or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }
