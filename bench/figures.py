"""The figures of one run as the table of docs/performance.md: medians that a peer has, too, and missed goals.

python -m bench.figures                   from .bench/latest.json, where `make bench` puts them
python -m bench.figures OTHER.json
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from bench.report import amount

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "performance.md"

TIMES_PEER = {
    "monarch": {
        "call_one": 10.0,
        "tasks": 5.0,
        "batch": 12.0,
        "broadcast": 10.0,
        "call_8": 8.0,
        "call_16": 6.0,
        "bytes_1024": 5.0,
        "bytes_65536": 5.0,
        "bytes_1048576": 5.0,
        "bytes_67108864": 6.0,
        "cold_1": 3.0,
        "cold_8": 3.0,
        "cold_32": 3.0,
        "done": 7.0,
    },
    "ray": {"asyncio_loop_asyncio_trio": 2.0, "pool_generate": 1.25},
}
"""How many times better than a peer, in the same run, the median of a metric is to be."""


def render(document: str, data: dict[str, Any]) -> str:
    """Return the document with the table of a run in its place.

    Args:
        document: Has a line `<!-- figures -->`, and `<!-- end -->` after it.
        data: What `bench/run.py` writes.
    """
    lines = [_machine(data["machine"]), "", *_table(data["figures"]), "", _met(data["figures"])]
    made, places = re.subn(
        r"(<!-- figures -->)\n.*?(<!-- end -->)",
        lambda match: "\n".join([match[1], *lines, match[2]]),
        document,
        flags=re.DOTALL,
    )
    if places != 1:
        raise ValueError(
            f"the document needs one place for the figures, between <!-- figures --> and <!-- end -->; it has {places}"
        )
    return made


def _machine(machine: dict[str, Any]) -> str:
    text = "{cpu}, {cores} cores, Linux {kernel}, Python {python}; load before the run {load:.1f}."
    return text.format(**machine)


def _table(figures: list[dict[str, Any]]) -> list[str]:
    peers = list(figures[0]["ratios"])
    lines = [
        f"| figure | trimesh | {' | '.join(peers)} | goal |",
        f"|---|---:|{'---:|' * len(peers)}---:|",
    ]
    for row in figures:
        has_peer = any(ratio is not None for ratio in row["ratios"].values())
        if not (has_peer and row["quantile"] == "p50") and not _is_missed(row):
            continue
        figure = row["figure"] if row["quantile"] == "p50" else f"{row['figure']}, {row['quantile']}"
        cells = [figure, *(amount(row[side], row["unit"]) for side in ("trimesh", *peers))]
        cells.append(", ".join(f"**{text}**" if is_met is False else text for text, is_met in goals_of(row)))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def goals_of(row: dict[str, Any]) -> list[tuple[str, bool | None]]:
    """Return the goals of a row as text, and whether each is met; None where that is not known."""
    found: list[tuple[str, bool | None]] = []
    if row["goal"] is not None:
        found.append((amount(row["goal"], row["unit"]), row["is_met"]))
    for peer, goals in TIMES_PEER.items():
        times = goals.get(row["name"])
        if times is not None and row["quantile"] == "p50":
            ratio = row["ratios"].get(peer)
            found.append((f"{times:g} x {peer.capitalize()}", None if ratio is None else ratio >= times))
    return found


def _is_missed(row: dict[str, Any]) -> bool:
    return any(is_met is False for _, is_met in goals_of(row))


def _met(figures: list[dict[str, Any]]) -> str:
    verdicts = [is_met for row in figures for _, is_met in goals_of(row) if is_met is not None]
    return f"{sum(verdicts)} of {len(verdicts)} goals are met; the others are bold."


def main() -> None:
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / ".bench" / "latest.json"
    DOCUMENT.write_text(render(DOCUMENT.read_text(), json.loads(source.read_text())))


if __name__ == "__main__":
    main()
