"""`trimesh ps`: what is wrong with a run, and its processes as a tree with aligned columns."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePath
from typing import Final, NamedTuple

from rich.console import Console, RenderableType
from rich.text import Text

from trimesh import limits
from trimesh.cli.dashboard.problems import Problem, problems
from trimesh.cli.text import (
    aligned,
    call_groups,
    clean,
    common,
    event_text,
    more,
    one_line,
    program_lines,
    short_place,
    silence,
    state_of,
)
from trimesh.observe import ActorRow, CallRow, ProcActivity, ProcRow, RunSnapshot, activity_between
from trimesh.observe.post_mortem import last_words
from trimesh.observe.quantities import duration, size
from trimesh.observe.run_snapshot import FINE, HostActivity, hosts_between
from trimesh.observe.waiting import WaitGraph

_SHOWN: Final = 20
"""Shown processes of one parent that are alike and have no problem, and shown problems."""

_SHOWN_ALIKE: Final = 8
"""Shown processes of one parent with the same problem at the same line."""

_CALLS_ALIKE: Final = 2
"""Members in the same call at the same line up to which it is shown at each: with more, it tells nothing of a rank."""

_CUT_COLUMNS: Final = 60
"""Width of a terminal from which rows are cut at its edge: on a narrower one, names would be."""

_TEXT_CHARS: Final = 500

_MARKS: Final = {
    "deadlock": "deadlocked",
    "memory": "leaking?",
    "alone": "slow?",
    "absent": "left?",
    "full": "mailbox full",
    "pinned": "pins versions",
}
"""Mark of a process that one of the problems names: "?" is beside those that may be as they should."""


# ---- what is wrong ---------------------------------------------------------------------------------------------------


class RunDiagnosis:
    """Diagnosis of a run: `problems`, as the page shows them, and what a person reads first.

    Attributes:
        wrong: Problems, most urgent first.
        restarted: Failures of the last minute whose members serve again.
        waits: The call that most calls wait for, if it is old; it may be as it should.
    """

    def __init__(self, snapshot: RunSnapshot) -> None:
        found = problems(snapshot, names_max=len(snapshot.procs) + len(snapshot.actors))
        self.wrong = [one for one in found if one.kind not in ("restarted", "waited for")]
        self.restarted = [one for one in found if one.kind == "restarted"]
        self.waits = next((one for one in found if one.kind == "waited for"), None)
        self._snapshot = snapshot

    def lines(self, pid: str = "") -> Iterator[Text]:
        """Yield what is wrong, each problem with the command that shows more; the first line has the most urgent one.

        Args:
            pid: The option `--pid` of these commands; empty if they need none.
        """
        job = self._snapshot.job
        head = "a run" if job is None else f"run {job.pid}"
        if not self.wrong:
            yield from self._calm_lines(head, pid)
        for number, one in enumerate(self.wrong[:_SHOWN]):
            style = "bold red" if one.is_sure else "bold yellow"
            start = f"{head}: " if not number else "also: "
            title, text = _headline(one)
            yield Text(f"{start}{one_line(title, _TEXT_CHARS)}; see: {self.command(one, pid)}", style=style)
            yield from _detail(text, one.at)
        if len(self.wrong) > _SHOWN:
            yield Text(f"and {len(self.wrong) - _SHOWN} problems more")
        for one in self.restarted[:_SHOWN]:
            yield Text(one_line(f"{one.title}: {one.text}", _TEXT_CHARS), style="dim")
        if len(self.restarted) > _SHOWN:
            yield Text(f"and {len(self.restarted) - _SHOWN} restarts more", style="dim")

    def _calm_lines(self, head: str, pid: str) -> Iterator[Text]:
        oldest = next(iter(self._snapshot.calls), None)
        if self.waits is not None:
            found = f"{one_line(self.waits.title)}; see: trimesh calls{pid} --waits"
            yield Text(f"{head}: nothing wrong found; {found}", style="bold green")
            yield from _detail(self.waits.text, self.waits.at)
        elif oldest is not None and oldest.age >= limits.STALL_SECONDS:
            call = f"{one_line(oldest.name)}.{one_line(oldest.endpoint)}, {oldest.state} for {duration(oldest.age)}"
            where = f" at {one_line(oldest.at)}" * bool(oldest.at)
            found = f"the oldest call is {call}{where}; see: trimesh calls{pid}"
            yield Text(f"{head}: nothing wrong found; {found}", style="bold green")
        else:
            yield Text(f"{head}: nothing wrong found", style="bold green")

    def command(self, one: Problem, pid: str = "") -> str:
        """Return the command that shows more of a problem."""
        job = self._snapshot.job
        name = one_line(shlex.quote(one.names[0])) if one.names else ""
        match one.kind:
            case "failure" | "dead" if job is not None and job.record:
                return f"trimesh autopsy --pid {job.pid}"
            case "failure" | "dead":
                return f"trimesh events{pid}"
            case "deadlock" | "full" | "pinned" | "unread":
                return f"trimesh calls{pid} --waits"
            case "stuck" | "alone":
                return f"trimesh stack{pid} {name}"
            case "silent" | "absent":
                return f"trimesh stack{pid}"
            case "held":
                return f"trimesh debug{pid} {name}"
            case "memory":
                return f"trimesh top{pid} --sort memory"
            case _:
                return f"trimesh calls{pid} --stuck"

    def marks(self) -> dict[str, str]:
        """Return the mark of each process, by id, that a problem names, or whose actor it names."""
        homes = {proc.name: proc.id for proc in self._snapshot.procs}
        homes.update((actor.name, actor.proc) for actor in self._snapshot.actors)
        found = defaultdict[str, list[str]](list)
        for one in self.wrong:
            for name in WaitGraph(self._snapshot).deadlocked() if one.kind == "deadlock" else one.names:
                word, proc = _MARKS.get(one.kind), homes.get(name)
                if word is not None and proc is not None and word not in found[proc]:
                    found[proc].append(word)
        return {proc: ", ".join(words) for proc, words in found.items() if words}


_LOST: Final = "HostLost: "


def _headline(one: Problem) -> tuple[str, str]:
    """Return the title of a problem, that of a death with how it came, and the rest of what is known."""
    if one.text.startswith("for "):
        return f"{one.title}, {one.text}", ""
    if one.kind == "failure" and one.text.startswith(_LOST):
        return one.text.removeprefix(_LOST), one.title
    start = f"ProcDied: {one.names[0]} " if one.names else ""
    if one.kind != "failure" or one.count > 1 or not start or not one.text.startswith(start):
        return one.title, one.text
    title, output, at = last_words(one.text)
    return title, f"at {at}" if at else f"last output: {output}" * bool(output)


def _detail(text: str, at: str) -> Iterator[Text]:
    if text:
        yield Text(f"    {one_line(text, _TEXT_CHARS)}")
    if at:
        yield Text(f"    at {one_line(at)}")


def is_wrong(snapshot: RunSnapshot) -> bool:
    """Return whether the first line of `ps` on a run names a problem."""
    return bool(RunDiagnosis(snapshot).wrong)


# ---- processes and actors --------------------------------------------------------------------------------------------


class _Row(NamedTuple):
    """A row of the table, or a line below one.

    Attributes:
        cells: A text for each column; a single one for a line below a row.
        style: Its style.
    """

    cells: tuple[str, ...]
    style: str = ""


def run_lines(
    snapshot: RunSnapshot, earlier: RunSnapshot | None = None, *, pid: str = "", shows_all: bool = False
) -> Iterator[Text]:
    """Yield a run as text: what is wrong, the run, and a tree of its processes, those with problems first.

    Args:
        snapshot: The run.
        earlier: An earlier snapshot, from which the use of processors is counted.
        pid: The option `--pid` of the commands that are named; empty if they need none.
        shows_all: Show each process, even of a large mesh.
    """
    diagnosis = RunDiagnosis(snapshot)
    yield from diagnosis.lines(pid)
    yield Text(_head(snapshot))
    yield from _table(list(_host_rows(snapshot, earlier, shows_all=shows_all)), ("cpu", "memory", "network"))
    yield from _table(list(_Tree(snapshot, earlier, diagnosis.marks(), shows_all=shows_all).rows()))
    for table, count in snapshot.cut.items():
        yield Text(f"{count} {table} were left out", style="dim")


def _head(snapshot: RunSnapshot) -> str:
    job = snapshot.job
    hosts = sorted({proc.host for proc in snapshot.procs if proc.host})
    where = f" on {one_line(hosts[0])}" if len(hosts) == 1 else f" on {len(hosts)} hosts" if hosts else ""
    count = len(snapshot.procs)
    parts = [f"{count} process{'es' * (count != 1)}{where}"]
    if job is not None:
        parts = [command_of(job.command), job.state, *parts]
        if job.started_at:
            parts[1] += f" for {duration(max(0.0, snapshot.taken_at - job.started_at))}"
        if job.stopping:
            parts[1] = f"{job.state} {one_line(', '.join(job.stopping))}"
    if snapshot.by == "thread":
        parts.append("its Trio loop does not run")
    return "  ".join(parts)


def command_of(command: str, chars: int = 80) -> str:
    """Return a command line on one line: an interpreter without its folder, so that the script is seen."""
    first, space, rest = command.partition(" ")
    return one_line(f"{PurePath(first).name}{space}{rest}", chars)


class _Tree:
    """Rows of the processes of a run, problems first."""

    def __init__(
        self, snapshot: RunSnapshot, earlier: RunSnapshot | None, marks: dict[str, str], *, shows_all: bool
    ) -> None:
        self._marks, self._shows_all = marks, shows_all
        self._children = defaultdict[str, list[ProcRow]](list)
        self._actors = defaultdict[str, list[ActorRow]](list)
        self._oldest = dict[str, CallRow]()
        for proc in sorted(snapshot.procs, key=lambda proc: proc.state in FINE and proc.id not in marks):
            self._children[proc.parent].append(proc)
        for actor in snapshot.actors:
            self._actors[actor.proc].append(actor)
        alike = {call.id: len(group) for group in call_groups(snapshot.calls) for call in group}
        for call in snapshot.calls:
            if alike[call.id] > _CALLS_ALIKE:
                continue
            if call.state in ("running", "waiting") and call.age > getattr(self._oldest.get(call.name), "age", -1.0):
                self._oldest[call.name] = call
        known = {proc.id for proc in snapshot.procs}
        self._roots = [proc for proc in snapshot.procs if proc.parent not in known]
        self._activity = {one.proc.id: one for one in activity_between(snapshot, earlier)}
        self._has_hosts = len({proc.host for proc in snapshot.procs if proc.host}) > 1

    def rows(self) -> Iterator[_Row]:
        """Yield the heads of the columns, then the rows."""
        yield _Row(("process", "pid", "host", "state", "cpu", "memory", "gpu", "actors"), "dim")
        for proc in self._roots:
            yield from self._branch(proc, "", "")

    def _branch(self, proc: ProcRow, before: str, below: str) -> Iterator[_Row]:
        """Yield a process and those below it.

        Args:
            proc: The process.
            before: Lines of the tree before its name.
            below: Those before what stands below it.
        """
        style = "" if proc.state in FINE and proc.id not in self._marks else "red"
        yield _Row(self._cells(proc, before), style)
        shown, rest = self._shown(self._children[proc.id])
        inner = f"{below}{'│' if shown or rest else ' '}  "
        for line in self._lines_below(proc):
            yield _Row((f"{inner}{line}",), "yellow")
        for number, child in enumerate(shown):
            is_last = number == len(shown) - 1 and not rest
            yield from self._branch(
                child, f"{below}{'└─' if is_last else '├─'} ", f"{below}{' ' if is_last else '│'}  "
            )
        if rest:
            states = common([self._state(child) for child in rest])
            yield _Row((f"{below}└─ {more(len(rest), 'processes')}: {states}",), "dim")

    def _shown(self, children: Sequence[ProcRow]) -> tuple[list[ProcRow], list[ProcRow]]:
        """Return the processes to show, and those that are like others before them."""
        if self._shows_all:
            return list(children), []
        shown, rest, counts = list[ProcRow](), list[ProcRow](), defaultdict[tuple[str, ...], int](int)
        for child in children:
            is_fine = child.state in FINE and child.id not in self._marks
            lines = () if is_fine else tuple(program_lines(child.stack, 1))
            key = ("",) if is_fine else (child.mesh, child.state, self._marks.get(child.id, ""), *lines)
            counts[key] += 1
            is_one_more = counts[key] > (_SHOWN if is_fine else _SHOWN_ALIKE)
            (rest if is_one_more and not self._children.get(child.id) else shown).append(child)
        return shown, rest

    def _cells(self, proc: ProcRow, before: str) -> tuple[str, ...]:
        one = self._activity[proc.id]
        return (
            f"{before}{clean(proc.name)}",
            str(proc.pid or ""),
            clean(proc.host) if self._has_hosts else "",
            self._state(proc),
            cpu_text(one),
            size(proc.memory_bytes) if proc.memory_bytes else "",
            gpu_text(proc),
            ", ".join(_actor_text(actor) for actor in self._actors[proc.id]),
        )

    def _state(self, proc: ProcRow) -> str:
        mark = self._marks.get(proc.id, "")
        count = f"restarted {proc.incarnation} x" if proc.incarnation else ""
        return ", ".join(part for part in (state_of(proc), mark, count) if part)

    def _lines_below(self, proc: ProcRow) -> Iterator[str]:
        if proc.state not in FINE:
            yield from program_lines(proc.stack)
            if proc.state == "silent":
                yield silence(proc)
            if proc.last_event and not proc.last_event.startswith("Stalled"):  # the state shows it
                kind, _, text = proc.last_event.partition(" ")
                yield one_line(f"{kind} {event_text(text)}", _TEXT_CHARS)
            return
        for actor in self._actors[proc.id]:
            call = self._oldest.get(actor.name)
            if call is not None and call.age >= limits.STALL_SECONDS:
                where = f" at {short_place(call.at)}" * bool(call.at)
                yield f"{clean(actor.name)}.{clean(call.endpoint)} {call.state} for {duration(call.age)}{where}"


def _actor_text(actor: ActorRow) -> str:
    parts = [clean(actor.name)] + [actor.state] * (actor.state != "serving")
    parts += [f"{actor.running} running"] * bool(actor.running) + [f"{actor.queued} queued"] * bool(actor.queued)
    return " ".join(parts) + f" ({clean(actor.cls)})" * bool(actor.cls)


def cpu_text(one: ProcActivity) -> str:
    """Return the use of processors by a process, 100 % for one core; empty if unknown."""
    return "" if one.cpu is None else f"{100 * one.cpu:.0f} %"


def gpu_text(proc: ProcRow) -> str:
    """Return the use of the busiest GPU of a process, and its memory on all; empty without one."""
    return f"{proc.gpu_percent} %  {size(proc.gpu_memory_bytes)}" if proc.gpu_memory_bytes else ""


def _host_rows(snapshot: RunSnapshot, earlier: RunSnapshot | None, *, shows_all: bool) -> Iterator[_Row]:
    """Yield rows of the machines of a run on several hosts, those with problems first: figures with all programs."""
    hosts = [one for one in hosts_between(snapshot, earlier) if one.host.at or one.host.agent]
    if len(hosts) < 2:
        return
    yield _Row(("host", "state", "cpu", "memory", "network", "gpus", "least free"), "dim")
    shown = hosts if shows_all else hosts[:_SHOWN]
    for one in shown:
        yield _Row(_host_cells(one), "" if one.host.state == "running" else "red")
    if len(hosts) > len(shown):
        yield _Row((more(len(hosts) - len(shown), "hosts"),), "dim")


def _host_cells(one: HostActivity) -> tuple[str, ...]:
    host = one.host
    state = "agent silent" if host.agent == "silent" else host.state
    if not host.at:
        return (clean(host.name), state, "", "", "", "", "")
    used = host.memory_bytes - host.memory_free_bytes
    gpus = [f"{gpu.percent} %" if gpu.percent >= 0 else size(gpu.used_bytes) for gpu in host.gpus]
    hottest = max((gpu.celsius for gpu in host.gpus), default=-1)
    least = min(host.disks, key=lambda disk: disk.free_bytes / max(1, disk.nbytes), default=None)
    return (
        clean(host.name),
        state,
        f"{'?' if one.cpu is None else f'{one.cpu:.1f}'} of {host.cpus}",
        f"{size(used)} of {size(host.memory_bytes)}",
        "" if one.received is None or one.sent is None else f"{size(one.received + one.sent)}/s",
        " ".join(gpus) + f", {hottest} °C" * (hottest >= 0),
        "" if least is None else f"{size(least.free_bytes)} in {clean(least.path)}",
    )


def _table(rows: Sequence[_Row], numbers: Sequence[str] = ("pid", "cpu", "memory", "gpu")) -> Iterator[Text]:
    if not rows:
        return
    heads, *others = rows
    lines = aligned(heads.cells, [row.cells for row in others], numbers)
    for line, row in zip(lines, rows, strict=True):
        yield Text(line, style=row.style, overflow="ellipsis" if len(row.cells) > 1 else None)


def print_lines(console: Console, lines: Iterable[RenderableType]) -> None:
    """Print lines: rows of a table are cut at the edge of a terminal, all other lines are whole."""
    with console.capture() as captured:  # rich ends the process where its reader has gone
        for line in lines:
            is_wide = console.is_terminal and console.width >= _CUT_COLUMNS
            if is_wide and isinstance(line, Text) and line.overflow is not None:
                line.truncate(console.width, overflow=line.overflow)
            console.print(line, soft_wrap=True)
    console.file.write(captured.get())


# ---- `trimesh stop` --------------------------------------------------------------------------------------------------


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
    command = "" if snapshot.job is None else f" ({command_of(snapshot.job.command)})"
    count = f"{len(below)} process{'es' * (len(below) != 1)}"
    yield f"interrupted run {pid}{command}: its blocks stop {count}, each within its grace"
    late = [proc for proc in below if proc.state in ("stuck", "silent", "stopped", "held")]
    for proc in late[:_SHOWN]:
        yield f"  {clean(proc.name)}  pid {proc.pid}  is {state_of(proc)}: it is killed after the grace if that lasts"
    if len(late) > _SHOWN:
        yield f"  and {len(late) - _SHOWN} more"
