"""`trimesh autopsy`: post-mortem of a run from its flight records; `trimesh report`: all data on a run in one file."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Final

import msgspec
from cyclopts import Parameter

from trimesh.cli.doctor import Finding, findings
from trimesh.cli.logs import log_lines
from trimesh.cli.members import run_of
from trimesh.cli.processes import command_of, run_lines
from trimesh.cli.text import (
    call_lines,
    clean,
    clock,
    event_lines,
    one_line,
    publication_lines,
    stack_lines,
    wait_lines,
)
from trimesh.errors import ConnectError
from trimesh.observe import (
    Autopsy,
    Culprit,
    DeadProc,
    MetricRow,
    OutputRow,
    RunSnapshot,
    SharedStack,
    WaitGraph,
    find_run,
    shared_stacks,
)
from trimesh.observe import autopsy as examine
from trimesh.observe.post_mortem import OF_RUNTIME
from trimesh.observe.quantities import duration, size

_SHOWN: Final = 20
_EVENTS: Final = 30
_METRICS: Final = 8


def autopsy(
    run: str = "",
    /,
    *,
    pid: Annotated[int | None, Parameter(name="--pid")] = None,
    all: Annotated[bool, Parameter(name="--all", negative="")] = False,  # noqa: A002 - the option is called so
    json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Show the post-mortem of a run: root cause, follow-on failures, wait graph, last calls of each process.

    Exit codes: 0, 3 there are no flight records.

    Args:
        run: Run, as `ps` and this command number it, or folder of its flight records; by default your newest run that
            did not end well.
        pid: Process id of the controller of a run, which may still be alive.
        all: Show every process and event.
        json: Print one JSON document.
    """
    run, pid = run_of(run, pid)
    found = examine(run, pid=pid)
    if json:
        sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
    else:
        sys.stdout.writelines(f"{line}\n" for line in autopsy_lines(found, shows_all=all))
    sys.stdout.flush()
    return 0


def autopsy_lines(found: Autopsy, *, shows_all: bool) -> Iterator[str]:
    """Yield a post-mortem as text, the root cause first."""
    job = found.job
    who = "a run" if job is None else f"run {job.pid}  {command_of(job.command)}"
    yield f"{who}  {_how_ended(found)}"
    began = datetime.fromtimestamp(found.begun_at).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    yield f"began {began}, last sign of life after {duration(found.last_at - found.begun_at)}, in {clean(found.folder)}"
    yield ""
    is_named = found.cause.kind not in ("none", "stopped")
    yield f"{'culprit' if is_named else 'no culprit'}: {one_line(found.cause.text, 400)}"
    if found.cause.at:
        yield f"    at {one_line(found.cause.at)}"
    for line in found.cause.stack.splitlines()[: _SHOWN if not shows_all else None]:
        yield f"    {one_line(line)}"
    events = found.events if shows_all else found.events[-_EVENTS:]
    if events:
        yield ""
        yield "events, oldest first:"
        if len(events) < len(found.events):
            yield f"  {len(found.events) - len(events)} earlier ones (--all shows them)"
        yield from (f"  {line}" for line in event_lines(events, _clock))
    kept = list(publication_lines(found.snapshot))
    if kept:
        yield ""
        yield "publications:"
        yield from (f"  {line}" for line in kept)
    waits = list(wait_lines(found.snapshot))
    if waits:
        yield ""
        yield "wait graph:"
        yield from (f"  {line}" for line in (waits if shows_all else waits[:_EVENTS]))
    yield ""
    yield "processes and their last calls:"
    shown = found.procs if shows_all else found.procs[:_SHOWN]
    for proc in shown:
        yield from _proc_lines(proc, shows_all=shows_all)
    if len(shown) < len(found.procs):
        yield f"  and {len(found.procs) - len(shown)} more (--all shows them)"
    for name, why in found.unreadable.items():
        yield f"  {clean(name)} could not be read: {one_line(why)}"


def _how_ended(found: Autopsy) -> str:
    """Return how a run ended: what the reader wants to tell apart first."""
    if found.ended == "running":
        return "still runs"
    if found.ended == "killed":
        return "was killed from outside"
    if found.error.startswith("KeyboardInterrupt"):
        return "was stopped by Ctrl-C or trimesh stop"
    if found.error.startswith("HostLost") or "HostLost: " in found.cause.text:
        return "lost a host"
    return "died with one of its processes" if found.cause.kind == "died" else f"raised {one_line(found.error)}"


def _proc_lines(proc: DeadProc, *, shows_all: bool) -> Iterator[str]:
    parts = [clean(proc.name), f"pid {proc.pid}", proc.state]
    if proc.state == "stuck":
        parts[-1] += f" for {duration(proc.silent_seconds)}"
    if proc.incarnation:
        parts.append(f"incarnation {proc.incarnation}")
    if proc.memory_bytes:
        parts.append(size(proc.memory_bytes))
    yield f"  {'  '.join(parts)}"
    if proc.metrics:
        shown = [_metric(row) for row in proc.metrics[:_METRICS]]
        shown += [f"and {len(proc.metrics) - _METRICS} more"] * (len(proc.metrics) > _METRICS)
        yield f"    last metrics: {', '.join(shown)}"
    for call in proc.calls:
        if call.name.endswith(OF_RUNTIME) and not shows_all and call.outcome == "returned":
            continue
        error = f"  {one_line(call.error)}" * bool(call.error)
        yield f"    {_clock(call.at)}  {clean(call.name)}  {call.outcome}  from {clean(call.caller)}{error}"


def _metric(row: MetricRow) -> str:
    step = "" if row.step is None else f" (step {row.step})"
    return f"{one_line(row.metric)} {row.value:.6g}{step}"


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().strftime("%H:%M:%S.%f")[:-3]


# ---- `trimesh report`: all data on a run in one file, to send to others ----------------------------------------------

_WIDTH = 240


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """All data on a run.

    Attributes:
        version: Grows when a field is removed or changes its meaning.
        made_at: Unix time.
        python, system: Python and system of the reporting machine.
        snapshot: Snapshot, if the run is alive.
        culprits: Root causes of its waiting calls.
        stacks: Its stacks.
        output: Last output of its processes.
        autopsy: Post-mortem from its flight records, living or dead.
        doctor: Findings about the machine.
        missing: Data that could not be collected, and why.
    """

    version: int = 1
    made_at: float
    python: str
    system: str
    snapshot: RunSnapshot | None = None
    culprits: tuple[Culprit, ...] = ()
    stacks: tuple[SharedStack, ...] = ()
    output: tuple[OutputRow, ...] = ()
    autopsy: Autopsy | None = None
    doctor: tuple[Finding, ...] = ()
    missing: tuple[str, ...] = ()


def report(
    file: Path | None = None,
    /,
    *,
    run: Annotated[str, Parameter(name="--run")] = "",
    pid: Annotated[int | None, Parameter(name="--pid")] = None,
    json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Write all data on a run, living or dead, into one file: state, calls, stacks, output, machine.

    The file contains names, paths, source lines and output of the program: read it before you send it.

    Exit codes: 0, 1 the file cannot be written, 3 there is no run and no record of one.

    Args:
        file: File to write; by default the report is printed. An existing file is not overwritten.
        run: A dead run: its number, or the folder of its flight records.
        pid: Process id of a run's controller; by default the only living run, or the newest dead one.
        json: Write one JSON document instead of text.
    """
    made = make_report(*run_of(run, pid))
    text = msgspec.json.encode(made) + b"\n" if json else "".join(f"{one}\n" for one in report_lines(made)).encode()
    if file is None:
        sys.stdout.buffer.write(text)
        sys.stdout.flush()
        return 0
    try:
        with file.open("xb") as target:
            target.write(text)
    except OSError as error:
        sys.stderr.write(f"trimesh: the report cannot be written: {error}\n")
        return 1
    return 0


def make_report(run: str = "", pid: int | None = None) -> RunReport:
    """Collect all data on a run.

    Raises:
        ConnectError: There is neither a run nor a record of one.
    """
    missing = list[str]()
    snapshot: RunSnapshot | None = None
    output: tuple[OutputRow, ...] = ()
    if not run:
        try:
            with find_run(pid) as one:
                snapshot = one.snapshot()
                output = tuple(one.output())
        except ConnectError as error:
            missing.append(f"the run itself: {error}")
    found: Autopsy | None = None
    try:
        found = examine(run, pid=pid if snapshot is None or snapshot.job is None else snapshot.job.pid)
    except ConnectError as error:
        if snapshot is None:
            raise
        missing.append(f"its flight records: {error}")
    return RunReport(
        made_at=time.time(),
        python=platform.python_version(),
        system=platform.platform(),
        snapshot=snapshot,
        culprits=() if snapshot is None else tuple(WaitGraph(snapshot).culprits()),
        stacks=() if snapshot is None else tuple(shared_stacks(snapshot)),
        output=output,
        autopsy=found,
        doctor=tuple(findings()),
        missing=tuple(missing),
    )


def report_lines(made: RunReport) -> Iterator[str]:
    """Yield a report as text: the output of the commands, one after the other."""
    at = datetime.fromtimestamp(made.made_at).astimezone().isoformat(timespec="seconds")
    yield f"trimesh report of {at}, Python {made.python}, {made.system}"
    for one in made.missing:
        yield f"missing: {one_line(one)}"
    if made.autopsy is not None:
        yield from ("", "==== autopsy")
        yield from autopsy_lines(made.autopsy, shows_all=True)
    if made.snapshot is not None:
        yield from _living_lines(made.snapshot, made.stacks)
    if made.output:
        yield from ("", "==== output")
        yield from log_lines(made.output, shows_all=False)
    yield from ("", "==== machine")
    yield from (f"{one.verdict:8}{one.name}: {one.text}" for one in made.doctor)


def _living_lines(snapshot: RunSnapshot, stacks: tuple[SharedStack, ...]) -> Iterator[str]:
    yield from ("", "==== processes")
    yield from (line.plain for line in run_lines(snapshot, shows_all=True))
    yield from ("", "==== calls")
    yield from call_lines(snapshot.calls, shows_all=True)
    yield from ("", "==== wait graph")
    yield from wait_lines(snapshot)
    yield from ("", "==== stacks")
    yield from stack_lines(stacks)
    yield from ("", "==== events")
    yield from event_lines(snapshot.events, clock)
