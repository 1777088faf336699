"""`trimesh ps`: runs, processes and actors as trees, what is wrong first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from rich.text import Text
from rich.tree import Tree

from trimesh.cli.publishing import publication_lines
from trimesh.cli.text import FINE, clean, common, more, one_line, program_lines, silence, size, state_of
from trimesh.observe import ActorRow, ProcRow
from trimesh.observe.merging import RunSnapshot

_SHOWN = 20
"""Children of one process that run as they should; those that do not are all shown."""


def process_tree(snapshot: RunSnapshot, *, shows_all: bool = False) -> Tree:
    """Return the processes of a run and their actors as a tree."""
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
    for proc in snapshot.procs:
        if proc.parent not in known:
            _add(tree, proc, children, actors, shows_all=shows_all)
    for failure in snapshot.failures[:_SHOWN]:
        tree.add(Text(f"{failure.kind} {clean(failure.name)}: {one_line(failure.text)}", style="red"))
    for line in publication_lines(snapshot):
        tree.add(Text(line, style="red"))
    for table, count in snapshot.cut.items():
        tree.add(Text(f"{count} {table} were left out", style="dim"))
    return tree


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
    children: dict[str, list[ProcRow]],
    actors: dict[str, list[ActorRow]],
    *,
    shows_all: bool,
) -> None:
    branch = tree.add(Text(_proc_line(proc), style="" if proc.state in FINE else "red"))
    if proc.state not in FINE and proc.stack:
        for line in program_lines(proc.stack):
            branch.add(Text(line, style="yellow"))
    if proc.state == "silent":
        branch.add(Text(silence(proc), style="yellow"))
    for actor in actors.get(proc.id, ()):
        branch.add(Text(_actor_line(actor)))
    shown = 0
    rest = list[ProcRow]()
    for child in children.get(proc.id, ()):
        if not shows_all and child.state in FINE and not children.get(child.id) and shown >= _SHOWN:
            rest.append(child)
            continue
        shown += child.state in FINE
        _add(branch, child, children, actors, shows_all=shows_all)
    if rest:
        branch.add(Text(f"{more(len(rest), 'processes')}: {common([child.state for child in rest])}", style="dim"))


def _proc_line(proc: ProcRow) -> str:
    parts = [clean(proc.name), f"pid {proc.pid}", state_of(proc)]
    if proc.memory_bytes:
        parts.append(size(proc.memory_bytes))
    if proc.incarnation:
        parts.append(f"incarnation {proc.incarnation}")
    if proc.last_event and not (proc.stalled_seconds and proc.last_event.startswith("Stalled")):  # said, and grown
        parts.append(one_line(proc.last_event, 80))
    return "  ".join(parts)


def _actor_line(actor: ActorRow) -> str:
    parts = [clean(actor.name) + f" ({clean(actor.cls)})" * bool(actor.cls), actor.state]
    parts += [f"{actor.running} running"] * bool(actor.running) + [f"{actor.queued} queued"] * bool(actor.queued)
    return "  ".join(parts)
