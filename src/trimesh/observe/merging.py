"""What the processes of a run say, made one: each thing once, failures first, the rest in a fixed order.

ME-1 A process that has said nothing is there by what its owner knows of it.
ME-2 A call is told by its caller and by its callee; the callee knows its state, the caller what it is part of.
ME-3 A table with too many rows is cut at its end, where the least urgent rows are, and says by how many.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final, TypeVar

import msgspec

from trimesh import limits
from trimesh._wire import observed
from trimesh._wire.exceptions.frames import program_frame
from trimesh._wire.exceptions.stack_text import package_of_line
from trimesh._wire.observed import VERSION

_FINE: Final = ("running", "starting", "exiting")
_STATES: Final = ("dead", "silent", "stopped", "stuck", "held", "exiting", "starting", "running")

_Row = TypeVar("_Row")


class RunSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A run at one moment, as its processes have told it.

    Attributes:
        version: Grows when a field is taken away or gets another meaning.
        taken_at: Unix time.
        job: The run itself; None when its controller was not asked.
        by: "loop"; or "thread", when the Trio loop of the controller does not run.
        hosts: Its machines.
        procs: Its processes; those that do not run as they should come first.
        actors: Its actors, the longest mailbox first.
        calls: What is under way, oldest first.
        links: Connections between processes, the one with most bytes waiting first.
        grants: Memory that others may reach, the largest first.
        publications: Versions of tensors that are published; those whose `publish` waits come first.
        events: What happened to members, oldest first.
        failures: Those of the events that are failures, the first one first.
        cut: How many rows were left out, by table.
    """

    version: int = VERSION
    taken_at: float
    job: observed.JobRow | None = None
    by: str = "loop"
    hosts: tuple[observed.HostRow, ...] = ()
    procs: tuple[observed.ProcRow, ...] = ()
    actors: tuple[observed.ActorRow, ...] = ()
    calls: tuple[observed.CallRow, ...] = ()
    links: tuple[observed.LinkRow, ...] = ()
    grants: tuple[observed.GrantRow, ...] = ()
    publications: tuple[observed.PublicationRow, ...] = ()
    events: tuple[observed.EventRow, ...] = ()
    failures: tuple[observed.EventRow, ...] = ()
    cut: dict[str, int] = {}


def merge(
    views: Sequence[observed.ProcView], taken_at: float, *, by: str = "loop", rows_max: int = limits.OBSERVED_ROWS
) -> RunSnapshot:
    """Return what all processes of a run do.

    Args:
        views: What each has said.
        taken_at: Unix time.
        by: As `RunSnapshot.by`.
        rows_max: Rows of a table.
    """
    cut = dict[str, int]()
    for view in views:
        for table, count in view.cut.items():
            cut[table] = cut.get(table, 0) + count

    def few(table: str, rows: Iterable[_Row]) -> tuple[_Row, ...]:
        found = tuple(rows)
        if len(found) > rows_max:
            cut[table] = cut.get(table, 0) + len(found) - rows_max
        return found[:rows_max]

    events = sorted((event for view in views for event in view.events), key=lambda event: event.at)
    procs = _procs(views, events)
    failures = [event for event in events if event.is_failure]
    job = next((view.job for view in views if view.job is not None), None)
    return RunSnapshot(
        taken_at=taken_at,
        job=job,
        by=by,
        hosts=_hosts(procs, () if job is None else job.insecure),
        procs=few("procs", procs),
        actors=few("actors", sorted((one for view in views for one in view.actors), key=lambda one: -one.queued)),
        calls=few("calls", _calls(views, {proc.id: proc for proc in procs})),
        links=few("links", sorted((one for view in views for one in view.links), key=_busy)),
        grants=few("grants", sorted((one for view in views for one in view.grants), key=lambda one: -one.nbytes)),
        publications=few("publications", sorted((one for view in views for one in view.publications), key=_read)),
        events=tuple(events[-rows_max:]),
        failures=few("failures", failures),
        cut={**cut, **({"events": len(events) - rows_max} if len(events) > rows_max else {})},
    )


def _busy(link: observed.LinkRow) -> tuple[int, ...]:
    return -link.queued_bytes, -link.waiting, -(link.bytes_sent + link.bytes_received)


def _read(publication: observed.PublicationRow) -> tuple[bool, int, str, int]:
    return not publication.is_waiting, -len(publication.pinned), publication.proc, publication.number


def _procs(views: Sequence[observed.ProcView], events: Sequence[observed.EventRow]) -> list[observed.ProcRow]:
    last = {event.name: event for event in events}
    own = {view.proc.id: view.proc for view in views}
    found = dict[str, observed.ProcRow]()
    for view in views:
        for child in view.children:
            said = own.get(child.id)
            found[child.id] = _lost(child) if said is None else _joined(child, said)
    for proc_id, proc in own.items():
        found.setdefault(proc_id, proc)
    rows = [
        msgspec.structs.replace(row, last_event=f"{event.kind} {event.text}".strip())
        if (event := last.get(row.name))
        else row
        for row in found.values()
    ]
    return sorted(
        rows, key=lambda row: (_STATES.index(row.state), bool(row.parent), row.mesh, tuple(row.point.values()))
    )


def _lost(child: observed.ProcRow) -> observed.ProcRow:
    """A process that has said nothing, although its owner takes it for running."""
    return msgspec.structs.replace(child, state="silent") if child.state == "running" else child


def _joined(child: observed.ProcRow, said: observed.ProcRow) -> observed.ProcRow:
    """Return what the owner of a process and it itself say."""
    is_told = child.state == "running" or (said.state == "stuck" and child.state != "held")
    state = said.state if is_told else child.state
    return msgspec.structs.replace(
        child,
        state=state,
        stack="" if state == "held" else said.stack,  # it is that of the debugger
        kernel_state=said.kernel_state if state == "silent" else "",
        memory_bytes=said.memory_bytes or child.memory_bytes,
        record=said.record or child.record,
        stalled_seconds=max(child.stalled_seconds, said.stalled_seconds),
    )


def _hosts(procs: Sequence[observed.ProcRow], insecure: Collection[str]) -> tuple[observed.HostRow, ...]:
    counts = dict[str, list[int]]()
    for proc in procs:
        count = counts.setdefault(proc.host, [0, 0, 0])
        count[0] += 1
        count[1] += proc.state not in _FINE
        count[2] += proc.kernel_state == observed.HOST_SILENT
    rows = [
        observed.HostRow(
            name=name,
            procs=total,
            failed=failed,
            is_insecure=name in insecure,
            state="silent" if silent == total else "running",
        )
        for name, (total, failed, silent) in counts.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.failed, row.name)))


def _calls(views: Sequence[observed.ProcView], procs: dict[str, observed.ProcRow]) -> Sequence[observed.CallRow]:
    made = dict[str, observed.CallRow]()
    come = dict[str, observed.CallRow]()
    for view in views:
        for call in view.calls:
            (come if call.proc == view.proc.id and call.state not in ("sent", "sending") else made)[call.id] = call
    rows = list[observed.CallRow]()
    for call_id in {**made, **come}:
        here, there = made.get(call_id), come.get(call_id)
        if there is None or here is None:
            rows.append(_explained(there or made[call_id], procs))
            continue
        state = here.state if here.state in ("cancelling", "abandoned") else there.state
        left = there.left if here.left is None else here.left
        age = max(here.age, there.age)
        both = msgspec.structs.replace(
            there, state=state, part_of=here.part_of, called=here.called, caller=here.caller, age=age, left=left
        )
        rows.append(_explained(both, procs))
    return sorted(rows, key=lambda row: -row.age)


def _explained(call: observed.CallRow, procs: dict[str, observed.ProcRow]) -> observed.CallRow:
    """Say of a call, if it is not known where it runs, where the main thread of its process is that does not go on."""
    proc = procs.get(call.proc)
    if call.at or proc is None or proc.state in _FINE or call.state in ("sending", "queued"):
        return call
    return msgspec.structs.replace(call, at=_first_line(proc.stack) or f"its process is {proc.state}")


def _first_line(stack: str) -> str:
    return program_line(stack) or next((line.strip() for line in stack.splitlines() if "File " in line), "")


def program_line(stack: str) -> str:
    """Return the innermost line of a stack that is of a program, or else of a package that it has called."""
    lines = [line.strip() for line in stack.splitlines() if line.strip().startswith("File ")]
    return program_frame(lines, package_of_line) or ""
