"""The command: on a terminal a screen that lives, elsewhere one table."""

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
from trimesh.cli.text import FINE, call_line, clean, common, duration, one_line, size, state_of
from trimesh.observe import CallRow, ProcActivity, RunSnapshot, activity_between, find_run

_WIDTH = 240


def top(
    *,
    pid: Annotated[int | None, Parameter(name="--pid")] = None,
    every: Annotated[float, Parameter(name="--every")] = 1.0,
) -> int:
    """Show what the processes of a run do, while they do it: calls, messages, bytes, memory; sorted and filtered.

    On a terminal: arrows and enter look at one process, s sorts by the next column, / filters by name, q ends. It needs
    textual: pip install 'trimesh-actors[top]'. Where the output is no terminal, one table is printed.

    Args:
        pid: Of the controller.
        every: Seconds between two looks, at least 0.1.

    Exit codes: 0, 1 textual is missing, 3 there is no run.
    """
    every = max(every, limits.TOP_SECONDS_MIN)
    with find_run(pid) as run:
        if not sys.stdout.isatty():
            earlier = run.snapshot()
            time.sleep(every)
            later = run.snapshot()
            table = Table(*COLUMNS, title=summary(later), title_justify="left")
            for one in activity_between(later, earlier):
                table.add_row(*cells(one))
            Console(highlight=False, width=_WIDTH).print(table)
            return 0
        try:
            from trimesh.cli.top_screen import TopApp  # noqa: PLC0415 - textual is an extra
        except ImportError:
            sys.stderr.write("trimesh: top needs textual: pip install 'trimesh-actors[top]'\n")
            return 1
        TopApp(run.snapshot, every).run()
    return 0


# ---- what a row of `trimesh top` shows, and in which order rows stand ------------------------------------------------

COLUMNS: Final = (
    "process",
    "pid",
    "host",
    "state",
    "runs",
    "waits",
    "oldest call",
    "in/s",
    "out/s",
    "bytes/s",
    "memory",
)

_KEYS: Final[tuple[Callable[[ProcActivity], Any], ...]] = (
    lambda one: (one.proc.mesh, tuple(one.proc.point.values())),
    lambda one: one.proc.pid,
    lambda one: one.proc.host,
    lambda one: (one.proc.state in FINE, one.proc.state),
    lambda one: -one.running,
    lambda one: -one.queued,
    lambda one: -one.oldest,
    lambda one: -one.received,
    lambda one: -one.sent,
    lambda one: -one.nbytes,
    lambda one: -one.proc.memory_bytes,
)
"""How rows are sorted by each column: what needs a look comes first."""


def cells(one: ProcActivity) -> tuple[Text, ...]:
    """Return the cells of a process; no name in them steers a terminal, or is read as markup."""
    proc = one.proc
    values = (
        clean(proc.name),
        str(proc.pid or ""),
        clean(proc.host),
        state_of(proc),
        str(one.running or ""),
        str(one.queued or ""),
        duration(one.oldest) if one.oldest else "",
        f"{one.received:.0f}",
        f"{one.sent:.0f}",
        f"{size(one.nbytes)}",
        size(proc.memory_bytes) if proc.memory_bytes else "",
    )
    style = "" if proc.state in FINE else "red"
    is_name = (True, False, True, True)
    return tuple(
        Text(value, style=style, justify="left" if column < len(is_name) and is_name[column] else "right")
        for column, value in enumerate(values)
    )


def chosen(rows: Sequence[ProcActivity], column: int, wanted: str) -> list[ProcActivity]:
    """Return the rows whose process, host or state has a text in it, sorted by a column."""
    found = [one for one in rows if wanted in f"{clean(one.proc.name)} {clean(one.proc.host)} {one.proc.state}"]
    return sorted(found, key=_KEYS[column])


def summary(seen: RunSnapshot, *, left_out: int = 0) -> Text:
    """Return one line on a run, and on how many rows are not shown."""
    job = seen.job
    parts = ["a run" if job is None else f"run {job.pid}  {one_line(job.command, 60)}  {job.state}"]
    parts.append(f"{len(seen.procs)} processes: {common([proc.state for proc in seen.procs])}")
    parts.append(f"{len(seen.calls)} calls under way")
    if left_out:
        parts.append(f"{left_out} rows are not shown: / filters them")
    if seen.by == "thread":
        parts.append("its Trio loop does not run")
    if seen.failures:
        last = seen.failures[-1]
        parts.append(f"{last.kind} {one_line(last.name, 40)}: {one_line(last.text, 80)}")
    return Text("  |  ".join(parts), style="red" if seen.failures or seen.by == "thread" else "")


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
    lines += [call_line(call) for call in calls] or ["no call to it is under way"]
    if proc.stack:
        lines += ["", "its stack, innermost first:", *(one_line(line) for line in proc.stack.splitlines())]
    return Text("\n".join(lines))
