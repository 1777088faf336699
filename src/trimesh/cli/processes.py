"""`trimesh ps`: runs, processes and actors as trees, problems first; `trimesh top`: the same as a live table."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Final

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from trimesh import limits
from trimesh.cli.dashboard.problems import problems
from trimesh.cli.text import (
    FINE,
    call_line,
    clean,
    common,
    duration,
    more,
    one_line,
    program_lines,
    publication_lines,
    silence,
    size,
    state_of,
)
from trimesh.observe import (
    ActorRow,
    CallRow,
    ProcActivity,
    ProcRow,
    RunSnapshot,
    WaitGraph,
    activity_between,
    find_run,
    kept_versions,
)

_SHOWN = 20
"""Shown children of one process that have no problem; all others are shown, too."""


def process_tree(snapshot: RunSnapshot, *, shows_all: bool = False) -> Tree:
    job = snapshot.job
    head = "a run" if job is None else f"run {job.pid}  {one_line(job.command, 80)}  {job.state}"
    if job is not None and job.stopping:
        head += f" {one_line(', '.join(job.stopping))}"
    if snapshot.by == "thread":
        head += "  (its Trio loop does not run)"
    tree = Tree(Text(head, style="bold"))
    children = defaultdict[str, list[ProcRow]](list)
    actors = defaultdict[str, list[ActorRow]](list)
    for proc in snapshot.procs:
        children[proc.parent].append(proc)
    for actor in snapshot.actors:
        actors[actor.proc].append(actor)
    known = {proc.id for proc in snapshot.procs}
    seen = _Seen(snapshot, children, actors)
    for proc in snapshot.procs:
        if proc.parent not in known:
            _add(tree, proc, seen, shows_all=shows_all)
    for problem in _problem_lines(snapshot):
        tree.add(problem)
    for failure in snapshot.failures[:_SHOWN]:
        tree.add(Text(f"{failure.kind} {clean(failure.name)}: {one_line(failure.text)}", style="red"))
    for line in publication_lines(snapshot):
        tree.add(Text(line, style="red"))
    for table, count in snapshot.cut.items():
        tree.add(Text(f"{count} {table} were left out", style="dim"))
    return tree


def _problem_lines(snapshot: RunSnapshot) -> Iterator[Text]:
    """Yield a line for each problem that is not the state of one process, and for each silent host."""
    for problem in problems(snapshot):
        if problem.kind in ("deadlock", "full", "memory"):  # other kinds are lines of the tree already
            text = f"{problem.title}{f'; {problem.text}' * bool(problem.text)}"
            yield Text(one_line(text, 300), style="red" if problem.kind == "deadlock" else "yellow")
    for host in snapshot.hosts:
        if host.state == "silent":
            what = "process" if host.procs == 1 else "processes"
            yield Text(f"host {clean(host.name)}  silent, with {host.procs} {what} of this run", style="red")


def is_wrong(snapshot: RunSnapshot) -> bool:
    """Return whether a run has a process that does not run, a cycle of calls, or pins that block `publish`."""
    if any(proc.state not in FINE for proc in snapshot.procs):
        return True
    return bool(kept_versions(snapshot) or _in_circles(snapshot))


def _in_circles(snapshot: RunSnapshot) -> dict[str, str]:
    """Return the members whose calls wait for each other, with their processes."""
    graph = WaitGraph(snapshot)
    calls = [graph.calls[call_id] for one in graph.culprits() for call_id in one.cycle]
    return {call.name: call.proc for call in calls}


def stop_lines(pid: int, snapshot: RunSnapshot | None) -> Iterator[str]:
    """Describe an interrupted run, and its processes that cannot react to the interrupt.

    Args:
        pid: Process id of its controller.
        snapshot: Snapshot of the run just before; None if it did not answer.
    """
    if snapshot is None:
        yield f"interrupted run {pid}"
        return
    below = [proc for proc in snapshot.procs if proc.parent]
    command = "" if snapshot.job is None else f" ({one_line(snapshot.job.command, 80)})"
    count = f"{len(below)} process{'es' * (len(below) != 1)}"
    yield f"interrupted run {pid}{command}: its blocks stop {count}, each within its grace"
    late = [proc for proc in below if proc.state in ("stuck", "silent", "stopped", "held")]
    for proc in late[:_SHOWN]:
        yield f"  {clean(proc.name)}  pid {proc.pid}  is {state_of(proc)}: it is killed after the grace if that lasts"
    if len(late) > _SHOWN:
        yield f"  and {len(late) - _SHOWN} more"


def _add(
    tree: Tree,
    proc: ProcRow,
    seen: _Seen,
    *,
    shows_all: bool,
) -> None:
    is_fine = proc.state in FINE and proc.id not in seen.circle.values()
    branch = tree.add(Text(_proc_line(proc, seen), style="" if is_fine else "red"))
    if proc.state not in FINE and proc.stack:
        for line in program_lines(proc.stack):
            branch.add(Text(line, style="yellow"))
    if proc.state == "silent":
        branch.add(Text(silence(proc), style="yellow"))
    for actor in seen.actors.get(proc.id, ()):
        branch.add(Text(_actor_line(actor, seen)))
    shown = 0
    rest = list[ProcRow]()
    for child in seen.children.get(proc.id, ()):
        is_plain = child.state in FINE and child.id not in seen.circle.values()
        if not shows_all and is_plain and not seen.children.get(child.id) and shown >= _SHOWN:
            rest.append(child)
            continue
        shown += is_plain
        _add(branch, child, seen, shows_all=shows_all)
    if rest:
        branch.add(Text(f"{more(len(rest), 'processes')}: {common([child.state for child in rest])}", style="dim"))


class _Seen:
    """A run, sorted for the tree.

    Attributes:
        children, actors: Child processes and actors, by process.
        circle: Members whose calls wait for each other, with their processes.
        oldest: The oldest call of each actor that runs or waits.
        has_hosts: Whether its processes are on several machines.
    """

    def __init__(
        self, snapshot: RunSnapshot, children: dict[str, list[ProcRow]], actors: dict[str, list[ActorRow]]
    ) -> None:
        self.children, self.actors = children, actors
        self.circle = _in_circles(snapshot)
        self.oldest = dict[str, CallRow]()
        for call in snapshot.calls:
            if call.state in ("running", "waiting") and call.age > getattr(self.oldest.get(call.name), "age", -1.0):
                self.oldest[call.name] = call
        self.has_hosts = len({proc.host for proc in snapshot.procs if proc.host}) > 1


def _proc_line(proc: ProcRow, seen: _Seen) -> str:
    parts = [clean(proc.name), f"pid {proc.pid}"]
    if seen.has_hosts and proc.host:
        parts.append(f"on {clean(proc.host)}")
    parts.append(state_of(proc) + ", in a cycle of calls" * (proc.id in seen.circle.values()))
    if proc.memory_bytes:
        parts.append(size(proc.memory_bytes))
    if proc.incarnation:
        parts.append(f"incarnation {proc.incarnation}")
    if proc.last_event and not (proc.stalled_seconds and proc.last_event.startswith("Stalled")):  # the state shows it
        parts.append(one_line(proc.last_event, 80))
    return "  ".join(parts)


def _actor_line(actor: ActorRow, seen: _Seen) -> str:
    parts = [clean(actor.name) + f" ({clean(actor.cls)})" * bool(actor.cls), actor.state]
    parts += [f"{actor.running} running"] * bool(actor.running) + [f"{actor.queued} queued"] * bool(actor.queued)
    call = seen.oldest.get(actor.name)
    if call is not None and call.age >= limits.STALL_SECONDS:
        where = f" at {one_line(call.at)}" * bool(call.at)
        parts.append(f"{clean(call.endpoint)} {call.state} for {duration(call.age)}{where}")
    if actor.name in seen.circle:
        parts.append("waits for itself")
    return "  ".join(parts)


# ---- `trimesh top`: a live screen on a terminal, otherwise one table -------------------------------------------------

_WIDTH = 240


def top(
    *,
    pid: Annotated[int | None, Parameter(name="--pid")] = None,
    every: Annotated[float, Parameter(name="--every")] = 1.0,
) -> int:
    """Show a live table of the processes of a run: calls, messages, bytes, memory; sorted and filtered.

    On a terminal: arrows and enter open one process, s sorts by the next column, / filters by name, q quits. It needs
    textual: pip install 'trimesh-actors[top]'. If the output is not a terminal, one table is printed.

    Exit codes: 0, 1 textual is missing, 3 there is no run.

    Args:
        pid: Process id of the controller.
        every: Polling interval in seconds, at least 0.1.
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


# ---- columns and sort order of `trimesh top` -------------------------------------------------------------------------

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
"""Sort key of each column: the most urgent rows come first."""


def cells(one: ProcActivity) -> tuple[Text, ...]:
    """Return the cells of a process; names in them cannot contain control sequences or markup."""
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
    """Return the rows whose process, host or state contains a text, sorted by a column."""
    found = [one for one in rows if wanted in f"{clean(one.proc.name)} {clean(one.proc.host)} {one.proc.state}"]
    return sorted(found, key=_KEYS[column])


def summary(seen: RunSnapshot, *, left_out: int = 0) -> Text:
    """Return one line on a run, with the number of rows that are not shown."""
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
    lines += [call_line(call) for call in calls] or ["no calls to it are under way"]
    if proc.stack:
        lines += ["", "stack, innermost first:", *(one_line(line) for line in proc.stack.splitlines())]
    return Text("\n".join(lines))
