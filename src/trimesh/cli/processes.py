"""`trimesh ps`: runs, processes and actors as trees, what is wrong first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from rich.text import Text
from rich.tree import Tree

from trimesh import limits
from trimesh.cli.dashboard.problems import problems
from trimesh.cli.text import (
    FINE,
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
from trimesh.observe import ActorRow, CallRow, ProcRow, WaitGraph, kept_versions
from trimesh.observe.run_snapshot import RunSnapshot

_SHOWN = 20
"""Children of one process that run as they should; those that do not are all shown."""


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
        if problem.kind in ("deadlock", "full", "memory"):  # the others are lines of their own
            text = f"{problem.title}{f'; {problem.text}' * bool(problem.text)}"
            yield Text(one_line(text, 300), style="red" if problem.kind == "deadlock" else "yellow")
    for host in snapshot.hosts:
        if host.state == "silent":
            what = "process" if host.procs == 1 else "processes"
            yield Text(f"host {clean(host.name)}  silent, with {host.procs} {what} of this run", style="red")


def is_wrong(snapshot: RunSnapshot) -> bool:
    """Return whether a run has a process that does not run, calls in a circle, or versions that are kept."""
    if any(proc.state not in FINE for proc in snapshot.procs):
        return True
    return bool(kept_versions(snapshot) or _in_circles(snapshot))


def _in_circles(snapshot: RunSnapshot) -> dict[str, str]:
    """Return the members whose calls wait for each other, and their processes."""
    graph = WaitGraph(snapshot)
    calls = [graph.calls[call_id] for one in graph.culprits() for call_id in one.cycle]
    return {call.name: call.proc for call in calls}


def stop_lines(pid: int, snapshot: RunSnapshot | None) -> Iterator[str]:
    """Yield what a run was that has been interrupted, and which of its processes cannot hear of it.

    Args:
        pid: Of its controller.
        snapshot: The run just before; None if it has not answered.
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
        yield f"  {clean(proc.name)}  pid {proc.pid}  is {state_of(proc)}: it is killed after the grace if it stays so"
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
        children, actors: By process.
        circle: Members whose calls wait for each other, and their processes.
        oldest: The oldest call that each actor runs.
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
    parts.append(state_of(proc) + ", in a circle of calls" * (proc.id in seen.circle.values()))
    if proc.memory_bytes:
        parts.append(size(proc.memory_bytes))
    if proc.incarnation:
        parts.append(f"incarnation {proc.incarnation}")
    if proc.last_event and not (proc.stalled_seconds and proc.last_event.startswith("Stalled")):  # said, and grown
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
