"""A `profiles.json` as the tables of the `profiles.md` beside it, in a folder of `bench/results`."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.profile.workloads import WORKLOADS

FOLDER = Path(__file__).resolve().parents[1] / "results" / "f62869d"
"""Of the commit that was profiled last; the next one has a folder of its own."""

DATA, DOCUMENT = FOLDER / "profiles.json", FOLDER / "profiles.md"

PARTS_SHARE_MIN = 0.01
"""Of the larger whole: what is less on all sides, before and after, is in one line with others of its kind."""


def read_data() -> dict[str, Any]:
    """Return the comparisons that there are, by key."""
    return json.loads(DATA.read_text()) if DATA.is_file() else {}


def write_data(data: Mapping[str, Any]) -> None:
    """Keep comparisons."""
    DATA.write_text(json.dumps(data, indent=1) + "\n")


def render(document: str, data: Mapping[str, Any]) -> str:
    """Return the document with its tables made anew.

    Args:
        document: Has a line `<!-- profile KEY -->`, and `<!-- end -->` after it, for each comparison.
        data: The comparisons by key; each must have its place, a place may be without.
    """
    places = re.findall(r"<!-- profile (\S+) -->\n", document)
    if lacking := [key for key in data if places.count(key) != 1]:
        raise ValueError(
            "the document needs one place <!-- profile KEY --> for each comparison of its data; "
            f"it has {', '.join(places) or 'none'}, and not one for {', '.join(lacking)}"
        )
    return re.sub(
        r"(<!-- profile (\S+) -->)\n.*?(<!-- end -->)",
        lambda match: (
            "\n\n".join([match[1], *_tables(match[2], data[match[2]]), match[3]]) if match[2] in data else match[0]
        ),
        document,
        flags=re.DOTALL,
    )


def _tables(key: str, comparison: Mapping[str, Any]) -> list[str]:
    before, after = comparison["before"], comparison["after"]
    names = " ".join(comparison["workloads"]) if len(comparison["workloads"]) < len(WORKLOADS) else ""
    command = f"python -m bench.profile compare {key} TREE_BEFORE TREE_AFTER {names} --real-time"
    where = "{cpu}, {cores} cores, Python {python}".format(**comparison["machine"])
    lines = textwrap.wrap(command, 100, break_on_hyphens=False)
    found = [f"Commits {before} and {after}; {where}.", "    " + " \\\n        ".join(lines)]
    for name, times in comparison["workloads"].items():
        found.append(_table(name, times["before"], times["after"]))
    return found


def _table(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return one workload: a line a part, two columns a side."""
    workload = WORKLOADS[name]
    sides = [side for side in workload.sides if side in before and side in after]
    columns = [summary[side] for side in sides for summary in (before, after)]
    heads = [f"{side}, {when}" for side in sides for when in ("before", "after")]
    lines = [
        f"| {workload.title}: us for each {workload.item} | {' | '.join(heads)} |",
        f"|---|{'---:|' * len(columns)}",
        _line("**processor time**", [summary["cpu_us"] for summary in columns], "**{}**"),
    ]
    parts = list(dict.fromkeys(part for summary in columns for part in summary["parts"]))
    least = [PARTS_SHARE_MIN * max(before[side]["cpu_us"], after[side]["cpu_us"]) for side in sides for _ in range(2)]
    shown, small = [], [0.0] * len(columns)
    for part in parts:
        values = [summary["parts"].get(part, 0.0) for summary in columns]
        if any(value >= bound for value, bound in zip(values, least, strict=True)):
            shown.append((part, values))
        else:
            small = [total + value for total, value in zip(small, values, strict=True)]
    shown.sort(key=lambda entry: -sum(entry[1]))
    lines += [_line(part, values) for part, values in [*shown, ("parts of less than 1%", small)]]
    for count in ("sleeps", "faults"):
        if any(summary[count] >= 0.1 for summary in columns):
            lines.append(_line({"sleeps": "*sleeps*", "faults": "*page faults*"}[count], [s[count] for s in columns]))
    if any(summary["ended_us"] for summary in columns):
        lines.append(_line("*its children, in all*", [summary["ended_us"] for summary in columns]))
    return "\n".join(lines)


def _line(name: str, values: list[float], form: str = "{}") -> str:
    return f"| {name} | {' | '.join(form.format(_amount(value)) for value in values)} |"


def _amount(value: float) -> str:
    if value == 0:
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
