"""Commands of the command line: their arguments, queries and output.

Exit codes: 0 success, 1 the command found a problem, 2 wrong usage, 3 there is no run, or it does not answer.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import chain
from typing import Annotated, Final

import msgspec
from cyclopts import App, CycloptsError, Parameter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trimesh.cli.autopsy import autopsy, report
from trimesh.cli.dashboard import dashboard
from trimesh.cli.debug import debug
from trimesh.cli.doctor import doctor
from trimesh.cli.jobs import hosts, kept_jobs, run_script
from trimesh.cli.logs import logs
from trimesh.cli.members import MemberRefused, NamedMember, choose
from trimesh.cli.processes import is_wrong, process_tree, stop_lines, top
from trimesh.cli.profile import profile, trace
from trimesh.cli.spmd import WrongOption, before_script, spmd
from trimesh.cli.text import call_lines, clean, is_stuck, one_line, publication_lines, stack_lines, wait_lines
from trimesh.errors import ConnectError
from trimesh.observe import ObservedRun, RunSnapshot, WaitGraph, find_run, prometheus_text, runs, shared_stacks
from trimesh.observe import query as ask_history

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

app = App(name="trimesh", help="Inspect and control your running meshes.", result_action="return_value")


def run(arguments: Sequence[str]) -> int:
    """Run a command; return its exit code."""
    try:
        if arguments[:1] == ["spmd"]:
            arguments = before_script(arguments)
        code = app(arguments, exit_on_error=False, print_error=True)
    except CycloptsError:
        return WRONG
    except WrongOption as error:
        sys.stderr.write(f"trimesh: {error}\n")
        return WRONG
    except MemberRefused as error:
        sys.stderr.write(f"trimesh: {error}\n")
        return error.code
    except ConnectError as error:
        sys.stderr.write(f"trimesh: {error}\n")
        return NO_RUN
    except BrokenPipeError:  # the reader has gone, as in `| head`
        sys.stderr.close()
        return 0
    return int(code or 0)


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
    """Show runs, their processes and actors as trees: state, pid, memory, last event of each.

    Exit codes: 0 all is well; 1 a process does not run, calls wait for each other, or pinned versions block a
    `publish`; 3 there is no run.

    Args:
        pid: Process id of the controller of one run; all runs by default.
        all: Show every process, even of a large mesh.
        json: Print one JSON document: a list of snapshots.
    """
    found = _chosen(pid)
    snapshots: list[RunSnapshot] = []
    for one in found:
        try:
            with one:
                snapshots.append(one.snapshot())
        except ConnectError as error:  # the others are shown
            if pid is not None:
                raise
            sys.stderr.write(f"trimesh: {error}\n")
    if json:
        _print_json(snapshots)
    for snapshot in [] if json else snapshots:
        _console().print(process_tree(snapshot, shows_all=all))
    if not snapshots:
        sys.stderr.write("trimesh: no run of this user has an open block on this machine\n")
        return NO_RUN
    return FOUND if any(map(is_wrong, snapshots)) else 0


def calls(*, pid: Pid = None, stuck: Flag = False, waits: Flag = False, all: All = False, json: Json = False) -> int:  # noqa: A002
    """Show the calls under way, oldest first, each with its id at the end of the line.

    Exit codes: 0, 1 --stuck has found calls, 3 there is no run.

    Args:
        pid: Process id of the controller.
        stuck: Show only calls that have waited longer than `limits.STALL_SECONDS`, or whose process does not run.
        waits: Show the wait graph and its root causes, then publications whose versions block a `publish`, or that no
            process reads.
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
        sys.stderr.write(f"trimesh: no stacks: no call runs{' there' * bool(point)}, and all Trio loops run\n")
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
            for event in one.events(after):
                after = event.number
                if json:
                    _print_json(event)
                else:
                    at = datetime.fromtimestamp(event.at).astimezone().strftime("%H:%M:%S")
                    sys.stdout.write(f"{at}  {event.kind}  {clean(event.name)}  {one_line(event.text)}\n")
            sys.stdout.flush()
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
        run: Folder of its flight records, as `autopsy` prints it.
        json: Print one JSON document: a list of rows.
    """
    try:
        found = ask_history(sql, pid=pid, run=run)
    except ValueError as error:
        sys.stderr.write(f"trimesh: {error}\n")
        return WRONG
    if json:
        _print_json(list(found.dicts()))
        return 0
    table = Table(*found.columns, box=None, pad_edge=False)
    for row in found.rows:
        table.add_row(*(Text("" if one is None else one_line(str(one), _WIDTH)) for one in row))
    _console().print(table)
    return 0


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

    Exit codes: 0 the cancel was sent, 3 there is no such call, or no run.

    Args:
        call: Id of the call, as `trimesh calls` shows it.
        pid: Process id of the controller.
    """
    with find_run(pid) as one:
        one.cancel(call)
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


for _command in (
    ps,
    top,
    dashboard,
    calls,
    stack,
    events,
    metrics,
    query,
    kill,
    cancel,
    stop,
    debug,
    logs,
    report,
    autopsy,
    doctor,
    profile,
    trace,
):
    app.command(_command)
app.command(run_script, name="run")
app.command(spmd)
app.command(hosts)
app.command(kept_jobs)
