"""`trimesh logs`: output of processes in order of time; equal lines of several ranks are merged."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Annotated, Final

import msgspec
from cyclopts import Parameter

from trimesh.cli.members import choose_processes, has_coordinates, parse_coordinates
from trimesh.cli.text import clean
from trimesh.observe import OutputRow, find_run

_FOLLOW_SECONDS: Final = 0.3
_TOGETHER_SECONDS: Final = 1.0


def logs(
    *,
    at: Annotated[str, Parameter(name="--at")] = "",
    pid: Annotated[int | None, Parameter(name="--pid")] = None,
    follow: Annotated[bool, Parameter(name=["--follow", "-f"], negative="")] = False,
    all: Annotated[bool, Parameter(name="--all", negative="")] = False,  # noqa: A002 - the option is called so
    json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Show the output of a run's processes, as far as the controller keeps it.

    Exit codes: 0, 1 there is no such process, 2 --at names no member, 3 there is no run.

    Args:
        at: Show only the process of a member, `trainers[gpus=3]`, or all processes with coordinates, `gpus=3`.
        pid: Process id of the controller.
        follow: Continue until the run ends.
        all: Show every line; by default equal lines of several processes within a second are merged.
        json: Print one JSON document per line.
    """
    after = 0
    with find_run(pid) as one:
        if at:
            at = choose_processes(at, one.snapshot(), {row.name for row in one.output()})
        while True:
            rows = one.output(after)
            after = rows[-1].number if rows else after
            chosen = [row for row in rows if is_at(row.name, at)]
            if json:
                sys.stdout.buffer.writelines(msgspec.json.encode(row) + b"\n" for row in chosen)
            else:
                sys.stdout.writelines(f"{line}\n" for line in log_lines(chosen, shows_all=all))
            sys.stdout.flush()
            if not follow:
                return 0
            time.sleep(_FOLLOW_SECONDS)


def is_at(name: str, at: str) -> bool:
    """Return whether a process matches `at`: empty for all, its name, or some of its coordinates."""
    point = parse_coordinates(at)
    return not at or at == name or (point is not None and has_coordinates(name, point))


def log_lines(rows: Sequence[OutputRow], *, shows_all: bool) -> Iterator[str]:
    """Yield rows as text; equal lines of several processes within a second are merged at the place of the first."""
    for row, members in log_groups(rows, shows_all=shows_all):
        at = datetime.fromtimestamp(row.at).astimezone().strftime("%H:%M:%S.%f")[:-3]
        text = f"({row.dropped} lines lost: they came faster than they could be shown)" if row.dropped else row.text
        others = f"  x{len(members)}: and {', '.join(members[1:4])}" if len(members) > 1 else ""
        rest = f" and {len(members) - 4} more" * (len(members) > 4)
        yield f"{at}  {clean(members[0])}{' !' * (row.stream == 2)} | {clean(text)}{clean(others)}{rest}"


def log_groups(rows: Sequence[OutputRow], *, shows_all: bool = False) -> Sequence[tuple[OutputRow, Sequence[str]]]:
    """Return each row with the names of all processes that wrote it within a second; with `shows_all` merge none."""
    names = dict[tuple[int, str], list[str]]()
    groups = list[tuple[OutputRow, list[str]]]()
    opened = dict[tuple[int, str], float]()
    for row in rows:
        key = row.stream, row.text
        is_known = key in names and row.name not in names[key] and row.at - opened[key] <= _TOGETHER_SECONDS
        is_new = shows_all or row.dropped or not is_known
        if is_new:
            names[key] = [row.name]
            opened[key] = row.at
            groups.append((row, names[key]))
        else:
            names[key].append(row.name)
    return groups
