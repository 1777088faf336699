"""`trimesh autopsy`: what a run has died of, by what its processes have left."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import datetime
from typing import Annotated, Final

import msgspec
from cyclopts import Parameter

from trimesh.cli.calling import wait_lines
from trimesh.cli.publishing import publication_lines
from trimesh.cli.text import clean, duration, one_line, size
from trimesh.observe import Autopsy, DeadProc
from trimesh.observe import autopsy as examine

_SHOWN: Final = 20
_EVENTS: Final = 30


def autopsy(
    run: str = "",
    /,
    *,
    pid: Annotated[int | None, Parameter(name="--pid")] = None,
    all: Annotated[bool, Parameter(name="--all", negative="")] = False,  # noqa: A002 - the option is called so
    json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Say what a run has died of: the culprit, what followed, who waited for whom, the last calls of each process.

    Args:
        run: Folder of its flight records; else the newest run of this user that has ended otherwise than well.
        pid: Of the controller of a run; it may still run.
        all: Show every process and event.
        json: Print one JSON document.

    Exit codes: 0, 3 there are no flight records.
    """
    found = examine(run, pid=pid)
    if json:
        sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
    else:
        sys.stdout.writelines(f"{line}\n" for line in autopsy_lines(found, shows_all=all))
    sys.stdout.flush()
    return 0


def autopsy_lines(found: Autopsy, *, shows_all: bool) -> Iterator[str]:
    """Yield what there is to say, the culprit first."""
    job = found.job
    who = "a run" if job is None else f"run {job.pid}  {one_line(job.command, 80)}"
    how = {"running": "still runs", "killed": "was killed", "error": f"was left by {one_line(found.error)}"}
    yield f"{who}  {how[found.ended]}"
    began = datetime.fromtimestamp(found.begun_at).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    yield f"began {began}, last sign of life after {duration(found.last_at - found.begun_at)}, in {clean(found.folder)}"
    yield ""
    is_named = found.cause.kind not in ("none", "stopped")
    yield f"{'culprit' if is_named else 'no culprit'}: {one_line(found.cause.text, 400)}"
    if found.cause.at:
        yield f"    at {one_line(found.cause.at)}"
    for line in found.cause.stack.splitlines()[: _SHOWN if not shows_all else None]:
        yield f"    {one_line(line)}"
    events = found.events if shows_all else found.events[:_EVENTS]
    if events:
        yield ""
        yield "what happened, the first first:"
        for event in events:
            yield f"  {_clock(event.at)}  {event.kind}  {clean(event.name)}  {one_line(event.text)}"
        if len(events) < len(found.events):
            yield f"  and {len(found.events) - len(events)} more (--all shows them)"
    kept = list(publication_lines(found.snapshot))
    if kept:
        yield ""
        yield "publications:"
        yield from (f"  {line}" for line in kept)
    waits = list(wait_lines(found.snapshot))
    if waits:
        yield ""
        yield "who waited for whom:"
        yield from (f"  {line}" for line in (waits if shows_all else waits[:_EVENTS]))
    yield ""
    yield "processes, and their last calls:"
    shown = found.procs if shows_all else found.procs[:_SHOWN]
    for proc in shown:
        yield from _proc_lines(proc)
    if len(shown) < len(found.procs):
        yield f"  and {len(found.procs) - len(shown)} more (--all shows them)"
    for name, why in found.unreadable.items():
        yield f"  {clean(name)} could not be read: {one_line(why)}"


def _proc_lines(proc: DeadProc) -> Iterator[str]:
    parts = [clean(proc.name), f"pid {proc.pid}", proc.state]
    if proc.state == "stuck":
        parts[-1] += f" for {duration(proc.silent_seconds)}"
    if proc.incarnation:
        parts.append(f"incarnation {proc.incarnation}")
    if proc.memory_bytes:
        parts.append(size(proc.memory_bytes))
    yield f"  {'  '.join(parts)}"
    for call in proc.calls:
        error = f"  {one_line(call.error)}" * bool(call.error)
        yield f"    {_clock(call.at)}  {clean(call.name)}  {call.outcome}  from {clean(call.caller)}{error}"


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().strftime("%H:%M:%S.%f")[:-3]
