"""Commands of the command line: their arguments, queries and output.

Exit codes: 0 success, 1 the command found a problem or failed, 2 wrong usage, 3 there is no run, or it does not answer,
130 ended by Ctrl-C. A reader that has gone, as in `| head`, counts as success.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import chain
from typing import Annotated, Final

import msgspec
from cyclopts import App, CycloptsError, Group, Parameter
from rich.console import Console

from trimesh import limits
from trimesh.cli.autopsy import autopsy, report
from trimesh.cli.dashboard import dashboard
from trimesh.cli.debug import debug
from trimesh.cli.doctor import doctor
from trimesh.cli.jobs import hosts, kept_jobs, run_script
from trimesh.cli.logs import logs
from trimesh.cli.members import ABSENT, ArgumentRefused, NamedMember, choose, nearest, run_of
from trimesh.cli.processes import is_wrong, print_lines, run_lines, stop_lines
from trimesh.cli.profile import profile, trace
from trimesh.cli.spmd import before_script, spmd
from trimesh.cli.text import (
    aligned,
    call_lines,
    clock,
    event_lines,
    is_id,
    is_stuck,
    one_line,
    publication_lines,
    short_ids,
    stack_lines,
    wait_lines,
)
from trimesh.cli.top import top
from trimesh.cli.usage import usage_error
from trimesh.errors import ConnectError
from trimesh.observe import ObservedRun, RunSnapshot, WaitGraph, find_run, prometheus_text, runs, shared_stacks
from trimesh.observe import autopsy as examine
from trimesh.observe import query as ask_history
from trimesh.observe.quantities import duration

FOUND: Final = 1
WRONG: Final = 2
NO_RUN: Final = 3
_FOLLOW_SECONDS: Final = 0.3
_WIDTH: Final = 240
"""Line width in characters when the output is not a terminal."""

Json = Annotated[bool, Parameter(name="--json", negative="")]
All = Annotated[bool, Parameter(name="--all", negative="")]
Follow = Annotated[bool, Parameter(name=["--follow", "-f"], negative="")]
Flag = Annotated[bool, Parameter(negative="")]
Pid = Annotated[int | None, Parameter(name="--pid")]

app = App(
    name="trimesh",
    help="Inspect and control your running meshes.",
    group_commands=Group("Options", sort_key=20),
    result_action="return_value",
)


def run(arguments: Sequence[str]) -> int:
    """Run a command; return its exit code."""
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has gone, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at its end
        return 0
    except OSError as error:
        with suppress(OSError):  # the terminal was closed
            sys.stderr.write(f"trimesh: {one_line(str(error))}\n")
        return FOUND
    return code


def _run(arguments: Sequence[str]) -> int:
    try:
        if arguments[:1] == ["spmd"]:
            arguments = before_script(arguments)
        return int(app(arguments, exit_on_error=False, print_error=False) or 0)
    except CycloptsError as error:
        return _refused(usage_error(error, arguments), WRONG)
    except ArgumentRefused as error:
        return _refused(error, error.code)
    except ConnectError as error:
        return _refused(error, NO_RUN)


def _refused(error: object, code: int) -> int:
    sys.stderr.write(f"trimesh: {error}\n")
    return code


def _print_json(value: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.flush()


def _print_lines(lines: Iterable[str]) -> None:
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()


def _console() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)


def _chosen(pid: int | None) -> list[ObservedRun]:
    return runs() if pid is None else [find_run(pid)]


def ps(*, pid: Pid = None, all: All = False, json: Json = False) -> int:  # noqa: A002 - the option is called so
    """Show what is wrong with your runs, and their processes and actors as trees: state, CPU, GPU, memory.

    The first line of each run says what is wrong, and which command shows more.

    Exit codes: 0 nothing wrong was found; 1 the first line of a run names a problem; 3 there is no run.

    Args:
        pid: Process id of the controller of one run; all runs by default.
        all: Show every process, even of a large mesh.
        json: Print one JSON document: a list of snapshots.
    """
    found = _chosen(pid)
    earlier, snapshots = _snapshots(found, is_only=pid is not None, is_once=json)
    if json:
        _print_json(snapshots)
    option = " --pid {}" if pid is not None or len(found) > 1 else ""
    shown = sorted(zip(snapshots, earlier, strict=True), key=lambda one: not is_wrong(one[0]))
    for number, (snapshot, before) in enumerate([] if json else shown):
        if number:
            sys.stdout.write("\n")
        run_pid = "" if snapshot.job is None else snapshot.job.pid
        lines = run_lines(snapshot, before, pid=option.format(run_pid), shows_all=all)
        print_lines(_console(), lines)
    if not snapshots:
        sys.stderr.write(f"trimesh: no run of this user has an open block on this machine{newest_dead()}\n")
        return NO_RUN
    return FOUND if any(map(is_wrong, snapshots)) else 0


def _snapshots(
    found: Sequence[ObservedRun], *, is_only: bool, is_once: bool
) -> tuple[list[RunSnapshot], list[RunSnapshot]]:
    """Return two snapshots of each run, between which processors are seen to be used; of a run that ends, none."""
    earlier, later = dict[int, RunSnapshot](), dict[int, RunSnapshot]()
    with ExitStack() as stack:
        for one in found:
            stack.enter_context(one)
        for number, seen in enumerate((later,) if is_once else (earlier, later)):
            if number:
                time.sleep(limits.PS_SECONDS)
            for one in found:
                try:
                    if not number or one.pid in earlier:
                        seen[one.pid] = one.snapshot()
                except ConnectError as error:  # the others are shown
                    if is_only:
                        raise
                    sys.stderr.write(f"trimesh: {error}\n")
    return [(later if is_once else earlier)[pid] for pid in later], list(later.values())


def newest_dead() -> str:
    """Return how the newest run that has failed ended, and the command that shows more; empty for none."""
    try:
        dead = examine()
    except ConnectError:
        return ""
    pid = "" if dead.job is None else dead.job.pid
    ago = duration(max(0.0, time.time() - dead.last_at))
    return f"; run {pid} ended {ago} ago: {one_line(dead.cause.text, 300)}; see: trimesh autopsy"


def calls(*, pid: Pid = None, stuck: Flag = False, waits: Flag = False, all: All = False, json: Json = False) -> int:  # noqa: A002
    """Show the calls under way, oldest first, as a table; `cancel` takes the id in its last column.

    Exit codes: 0, 1 --stuck has found calls, 3 there is no run.

    Args:
        pid: Process id of the controller.
        stuck: Show only calls that have waited longer than `limits.STALL_SECONDS`, or whose process does not run.
        waits: Show the wait graph and its root causes, then publications whose versions block a `publish`, or that no
            process reads; calls that wait alike are merged.
        all: Show each call; by default calls that differ only in their member are merged.
        json: Print one JSON document: a list of calls, or with --waits of root causes.
    """
    with find_run(pid) as one:
        seen = one.snapshot()
    found = [call for call in seen.calls if not stuck or is_stuck(call, seen)]
    if json:
        _print_json(WaitGraph(seen).culprits() if waits else found)
    else:
        shown = chain(wait_lines(seen), publication_lines(seen)) if waits else call_lines(found, shows_all=all)
        _print_lines(shown)
        if not (seen.calls if waits else found):
            sys.stderr.write(f"trimesh: no call is {'stuck' if stuck else 'under way'}\n")
    return FOUND if stuck and found else 0


def stack(point: str = "", /, *, pid: Pid = None, json: Json = False) -> int:
    """Show the stacks of running calls, and of main threads whose Trio loop does not run; equal stacks once.

    Exit codes: 0, 1 there is no such member or no stack of it, 2 POINT names no member, 3 there is no run.

    Args:
        point: Process or actor, as `ps` shows it: `trainers[gpus=3]`, or one endpoint of an actor,
            `trainers[gpus=3].step`; all by default.
        pid: Process id of the controller.
        json: Print one JSON document: a list of stacks.
    """
    with find_run(pid) as one:
        seen = one.snapshot()
    chosen = choose(point, [*seen.procs, *seen.actors], endpoints=True) if point else NamedMember("")
    found = shared_stacks(seen, chosen.name)
    if chosen.endpoint:
        found = [one for one in found if one.what.rpartition(".")[2] == chosen.endpoint]
    if json:
        _print_json(found)
    else:
        _print_lines(stack_lines(found))
    if not found and not json:
        known = {row.endpoint for row in seen.endpoints if row.name == chosen.name}
        meant = nearest(chosen.endpoint, known - {chosen.endpoint}) if chosen.endpoint not in known else ""
        where = f" at {one_line(point)}" * bool(point)
        sys.stderr.write(f"trimesh: no stacks: no call runs{where}, and all Trio loops run{meant}\n")
    return 0 if found else FOUND


def events(*, pid: Pid = None, follow: Follow = False, json: Json = False) -> int:
    """Show events of members: deaths, restarts, stalls.

    Exit codes: 0, 3 there is no run.

    Args:
        pid: Process id of the controller.
        follow: Continue until the run ends.
        json: Print one JSON document per line.
    """
    after = 0
    with find_run(pid) as one:
        while True:
            found = one.events(after)
            after = found[-1].number if found else after
            if json:
                for event in found:
                    _print_json(event)
            else:
                _print_lines(event_lines(found, clock))
            if not follow:
                return 0
            time.sleep(_FOLLOW_SECONDS)


def metrics(*, pid: Pid = None) -> int:
    """Print the metrics of a run in the Prometheus text format.

    Exit codes: 0, 3 there is no run.

    Args:
        pid: Process id of the controller.
    """
    with find_run(pid) as one:
        sys.stdout.write(prometheus_text(one.snapshot()))
    return 0


def query(sql: str, /, *, pid: Pid = None, run: str = "", json: Json = False) -> int:
    """Query the history of a run in SQL: rows, events and metrics of its last hour, also after its death.

    Exit codes: 0, 2 the statement is refused, 3 there is no history.

    Args:
        sql: One SELECT, such as "select name, value from metrics where metric = 'loss'". An unknown table lists those
            that there are.
        pid: Process id of the controller; by default of the only living run, else of the newest one that has died.
        run: The run's number, or the folder of its flight records, as `autopsy` prints it.
        json: Print one JSON document: a list of rows.
    """
    try:
        folder, pid = run_of(run, pid)
        found = ask_history(sql, pid=pid, run=folder)
    except ValueError as error:
        sys.stderr.write(f"trimesh: {error}\n")
        return WRONG
    if json:
        _print_json(list(found.dicts()))
        return 0
    cells = [[_cell(value) for value in row] for row in found.rows]
    right = [
        name for at, name in enumerate(found.columns) if all(isinstance(row[at], float | int) for row in found.rows)
    ]
    lines = list(aligned(found.columns, cells, right, keeps_all=True))
    if not found.columns:
        return 0
    if cells and sys.stdout.isatty() and max(map(len, lines)) > _console().width:
        lines = list(_records(found.columns, cells))
    _print_lines(lines)
    return 0


def _cell(value: object) -> str:
    return "" if value is None else one_line(f"{value:.12g}" if isinstance(value, float) else str(value), _WIDTH)


def _records(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield rows that are wider than the terminal, a line for each value."""
    width = max(map(len, columns))
    for number, row in enumerate(rows, 1):
        yield f"-- row {number}"
        yield from (f"{name.ljust(width)}  {value}".rstrip() for name, value in zip(columns, row, strict=True))


def kill(point: str, /, *, pid: Pid = None) -> int:
    """Kill a process; its mesh handles the death by its policy.

    Exit codes: 0, 1 there is no such process, 2 POINT names no member, 3 there is no run.

    Args:
        point: Process, or an actor in it, as `ps` shows it: `trainers[gpus=3]`.
        pid: Process id of the controller.
    """
    with find_run(pid) as one:
        seen = one.snapshot()
        alive = [proc for proc in seen.procs if proc.state != "dead"]
        name = choose(point, [*alive, *seen.actors]).name
        ids = [proc.id for proc in alive if proc.name == name]
        ids += [actor.proc for actor in seen.actors if actor.name == name]
        one.kill(ids[0])
    return 0


def cancel(call: str, /, *, pid: Pid = None) -> int:
    """Cancel a call where it runs or waits; its caller gets a RemoteCancelled.

    Exit codes: 0 the cancel was sent, 1 there is no such call, 2 several calls have this id, 3 there is no run, or it
    refuses.

    Args:
        call: Id of the call, as `trimesh calls` shows it.
        pid: Process id of the controller.
    """
    with find_run(pid) as one:
        calls = one.snapshot().calls
        found = [row.id for row in calls if is_id(call, row.id)]
        if not found:
            ids = short_ids(calls)
            meant = nearest(call, ids.values())
            text = f"no call under way has the id {one_line(call)}{meant}; trimesh calls --all shows the ids"
            raise ArgumentRefused(text, ABSENT)
        if len(found) > 1 and call not in found:
            raise ArgumentRefused(f"several calls have the id {one_line(call)}: write one of {', '.join(found)}")
        one.cancel(call if call in found else found[0])
    return 0


def stop(*, pid: Pid = None) -> int:
    """Interrupt a run, as Ctrl-C does, and print what was interrupted.

    Exit codes: 0, 3 there is no run.

    Args:
        pid: Process id of the controller.
    """
    with find_run(pid) as one:
        seen: RunSnapshot | None = None
        with suppress(ConnectError):  # a run that cannot describe itself can be stopped
            seen = one.snapshot()
        one.stop()
        _print_lines(stop_lines(one.pid, seen))
    return 0


_GROUPS: Final = {
    "Look at a run": (ps, top, dashboard, calls, stack, events, logs, metrics),
    "Act on a run": (kill, cancel, stop, debug),
    "After a death": (autopsy, report, query, trace),
    "Tools": (profile, doctor),
}
for _number, (_name, _commands) in enumerate(_GROUPS.items()):
    _group = Group(_name, sort_key=_number if _name != "Tools" else 10)
    for _command in _commands:
        app.command(_command, group=_group)
_JOBS: Final = Group("Jobs and hosts", sort_key=5)
app.command(run_script, name="run", group=_JOBS)
app.command(spmd, group=_JOBS)
for _app in (hosts, kept_jobs):
    _app.group = _JOBS
    _app.group_commands = Group("Commands")
    app.command(_app)
