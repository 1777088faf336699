"""`trimesh top`: a live screen of the processes of a run on a terminal, otherwise one table."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trimesh import limits
from trimesh.cli.members import ArgumentRefused, nearest, seconds_of
from trimesh.cli.processes import RunDiagnosis, command_of, cpu_text, gpu_text, print_lines
from trimesh.cli.text import call_line, clean, common, one_line, state_of
from trimesh.observe import CallRow, ProcActivity, RunSnapshot, activity_between, find_run
from trimesh.observe.quantities import duration, size
from trimesh.observe.run_snapshot import FINE

_WIDTH = 240


def top(
    *,
    pid: Annotated[int | None, Parameter(name="--pid")] = None,
    every: Annotated[float, Parameter(name="--every")] = 1.0,
    sort: Annotated[str, Parameter(name="--sort")] = "process",
    reverse: Annotated[bool, Parameter(name="--reverse", negative="")] = False,
) -> int:
    """Show a live table of the processes of a run: CPU, GPU, calls, messages, bytes, memory, actors.

    On a terminal: arrows and enter open one process, s sorts by the next column, S by the one before, r reverses, /
    filters by name, q quits. It needs textual: pip install 'trimesh-actors[top]'. If the output is not a terminal, one
    table is printed.

    Exit codes: 0, 1 textual is missing, 2 wrong usage, 3 there is no run.

    Args:
        pid: Process id of the controller.
        every: Polling interval in seconds, at least 0.1.
        sort: Column to sort by: the most urgent rows come first.
        reverse: Show the least urgent rows first.
    """
    every = max(seconds_of("--every", every), limits.TOP_SECONDS_MIN)
    if sort not in COLUMNS:
        raise ArgumentRefused(
            f"--sort takes the name of a column, got {one_line(repr(sort))}{nearest(sort, COLUMNS)}\nthere are "
            f"{', '.join(COLUMNS)}"
        )
    column = COLUMNS.index(sort)
    with find_run(pid) as run:
        if not sys.stdout.isatty():
            earlier = run.snapshot()
            time.sleep(every)
            later = run.snapshot()
            table = Table(*COLUMNS, box=None, pad_edge=False, title=summary(later), title_justify="left")
            for one in chosen(activity_between(later, earlier), column, "", is_reversed=reverse):
                table.add_row(*cells(one))
            print_lines(Console(highlight=False, width=_WIDTH), [table])
            return 0
        try:
            from trimesh.cli.top_screen import TopApp  # noqa: PLC0415 - textual is an extra
        except ImportError:
            sys.stderr.write("trimesh: top needs textual: pip install 'trimesh-actors[top]'\n")
            return 1
        TopApp(run.snapshot, every, column=column, is_reversed=reverse).run()
    return 0


# ---- columns and sort order of `trimesh top` -------------------------------------------------------------------------

_KEYS: Final[dict[str, Callable[[ProcActivity], Any]]] = {
    "process": lambda one: (one.proc.mesh, tuple(one.proc.point.values())),
    "state": lambda one: (one.proc.state in FINE, one.proc.state),
    "cpu": lambda one: -(one.cpu or 0.0),
    "gpu": lambda one: (-one.proc.gpu_percent, -one.proc.gpu_memory_bytes),
    "memory": lambda one: -one.proc.memory_bytes,
    "runs": lambda one: -one.running,
    "waits": lambda one: -one.queued,
    "oldest call": lambda one: -one.oldest,
    "in/s": lambda one: -one.received,
    "out/s": lambda one: -one.sent,
    "bytes/s": lambda one: -one.nbytes,
    "actors": lambda one: one.actors,
    "pid": lambda one: one.proc.pid,
    "host": lambda one: one.proc.host,
}
"""Columns, those that are read most first, each with its sort key: the most urgent rows come first."""

COLUMNS: Final = tuple(_KEYS)


def cells(one: ProcActivity) -> tuple[Text, ...]:
    """Return the cells of a process; names in them cannot contain control sequences or markup."""
    proc = one.proc
    values = (
        clean(proc.name),
        state_of(proc),
        cpu_text(one),
        gpu_text(proc),
        size(proc.memory_bytes) if proc.memory_bytes else "",
        str(one.running or ""),
        str(one.queued or ""),
        duration(one.oldest) if one.oldest else "",
        f"{one.received:.0f}",
        f"{one.sent:.0f}",
        f"{size(one.nbytes)}",
        one_line(", ".join(one.actors)),
        str(proc.pid or ""),
        clean(proc.host),
    )
    style = "" if proc.state in FINE else "red"
    return tuple(
        Text(value, style=style, justify="left" if column in _NAMES else "right")
        for column, value in zip(COLUMNS, values, strict=True)
    )


_NAMES: Final = frozenset({"process", "host", "state", "actors"})
"""Columns of text; those of numbers are aligned at the right."""


def chosen(rows: Sequence[ProcActivity], column: int, wanted: str, *, is_reversed: bool = False) -> list[ProcActivity]:
    """Return the rows whose process, host, state or actors contain a text, sorted by a column, in either direction."""
    found = [one for one in rows if wanted in " ".join((one.proc.name, one.proc.host, one.proc.state, *one.actors))]
    return sorted(found, key=_KEYS[COLUMNS[column]], reverse=is_reversed)


def summary(seen: RunSnapshot, *, left_out: int = 0) -> Text:
    """Return one line on a run, with the number of rows that are not shown."""
    job = seen.job
    parts = ["a run" if job is None else f"run {job.pid}  {command_of(job.command, 60)}  {job.state}"]
    parts.append(f"{len(seen.procs)} processes: {common([proc.state for proc in seen.procs])}")
    parts.append(f"{len(seen.calls)} call{'s' * (len(seen.calls) != 1)} under way")
    if left_out:
        parts.append(f"{left_out} rows are not shown: / filters them")
    if seen.by == "thread":
        parts.append("its Trio loop does not run")
    wrong = RunDiagnosis(seen).wrong
    if wrong:
        parts.append(one_line(wrong[0].title) + f" and {len(wrong) - 1} problems more" * (len(wrong) > 1))
    return Text("  |  ".join(parts), style="red" if wrong or seen.by == "thread" else "")


def detail(one: ProcActivity, calls: Sequence[CallRow]) -> Text:
    proc = one.proc
    lines = [f"{clean(proc.name)}  pid {proc.pid} on {clean(proc.host)}  {state_of(proc)}"]
    if proc.incarnation:
        lines.append(f"incarnation {proc.incarnation}")
    if proc.last_event:
        lines.append(f"last: {one_line(proc.last_event)}")
    if proc.record:
        lines.append(f"flight record: {one_line(proc.record)}")
    lines.append("")
    lines += [call_line(call) for call in calls] or ["no calls to it are under way"]
    if proc.stack:
        lines += ["", "stack, innermost first:", *(one_line(line) for line in proc.stack.splitlines())]
    return Text("\n".join(lines))
