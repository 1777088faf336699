"""Samples of several rounds as figures, a table and JSON."""

from __future__ import annotations

import os
import platform
import statistics
from dataclasses import dataclass, field
from typing import Any

from bench.scale import Metric, Samples

Times = dict[str, dict[str, list[float]]]
"""What each side of each workload took, in seconds, one figure a round."""


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

    def ratio(self, side: str, quantile: float) -> float | None:
        """Return how many times better trimesh is than a peer."""
        ours, theirs = self.figure("trimesh", quantile), self.figure(side, quantile)
        if ours is None or theirs is None or ours <= 0 or theirs <= 0:
            return None  # there is none; or memory that has shrunk
        return ours / theirs if self.metric.is_rate else theirs / ours


def quantile_of(samples: list[float], quantile: float) -> float:
    """Return the value below which a share `quantile` of the samples lies (nearest rank)."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]


def quantile_name(quantile: float) -> str:
    """Return how a quantile is called in the table."""
    return {0.5: "p50", 1.0: "worst"}.get(quantile, f"p{quantile * 100:g}")


def rows(results: list[Result], peers: list[str]) -> list[dict[str, Any]]:
    """Return one row a figure: all sides, how much better trimesh is than each, the goal and whether it is met."""
    found = []
    for result in results:
        metric = result.metric
        for index, quantile in enumerate(metric.quantiles):
            ours = result.figure("trimesh", quantile)
            goal = metric.goals[index] if index < len(metric.goals) else None
            found.append({
                "name": metric.name,
                "figure": metric.title,
                "quantile": quantile_name(quantile),
                "unit": metric.unit,
                "trimesh": ours,
                **{peer: result.figure(peer, quantile) for peer in peers},
                "ratios": {peer: result.ratio(peer, quantile) for peer in peers},
                "goal": goal,
                "is_met": None if ours is None or goal is None else (ours >= goal if metric.is_rate else ours <= goal),
            })  # fmt: skip
    return found


def table(results: list[Result], peers: list[str]) -> str:
    """Return the figures as text; behind those of a peer stands how many times better trimesh is."""
    head = ("figure", "", "trimesh", *(cell for peer in peers for cell in (peer, "")), "goal", "")
    lines = [head]
    for row in rows(results, peers):
        unit = row["unit"]
        cells = [row["figure"], row["quantile"], amount(row["trimesh"], unit)]
        for peer in peers:
            ratio = row["ratios"][peer]
            cells += [amount(row[peer], unit), f"{ratio:.1f} x" if ratio is not None else ""]
        cells += [amount(row["goal"], unit) if row["goal"] is not None else ""]
        cells += [{None: "", True: "met", False: "missed"}[row["is_met"]]]
        lines.append(tuple(cells))
    return aligned(lines, 2)


def durations(times: Times, sides: list[str]) -> str:
    """Return as text what each side of each workload took in all rounds."""
    lines = [("seconds in all", *sides, "together")]
    for workload, found in times.items():
        spent = [sum(found.get(side, [])) for side in sides]
        lines.append((workload, *(f"{seconds:.0f}" if seconds else "-" for seconds in spent), f"{sum(spent):.0f}"))
    totals = [sum(sum(found.get(side, [])) for found in times.values()) for side in sides]
    lines.append(("together", *(f"{seconds:.0f}" for seconds in totals), f"{sum(totals):.0f}"))
    return aligned(lines, 1)


def aligned(lines: list[tuple[str, ...]], words: int) -> str:
    """Return lines of cells as text with a rule below the first; so many columns of words, then figures."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    texts = []
    for line in lines:
        padded = [*map(str.ljust, line[:words], widths[:words]), *map(str.rjust, line[words:], widths[words:])]
        texts.append("  ".join(padded).rstrip())
    texts.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(texts)


def amount(value: float | None, unit: str) -> str:
    """Return a figure with its unit, with three digits that say something."""
    if value is None:
        return "-"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
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
