"""What has become of a run that has died: its flight records, put together.

AP-1 The last look of a process at itself, its rows of calls, which are newer, and its events make one picture: that of
     the moment at which the last sign of life of any process was written.
AP-2 A process without such a sign for longer than two looks before that moment did not run.
AP-3 Deaths that the controller has seen just before it was killed itself are of one end: what kills all kills in some
     order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from trimesh import limits
from trimesh._wire import flight, observed
from trimesh.observe.culprit import Cause, cause_of, name_of
from trimesh.observe.flights import RunRecords, find_records
from trimesh.observe.merging import RunSnapshot, merge
from trimesh.shape.point import place_name

_END_SECONDS: Final = 1.0
"""In which all processes of a run that is killed end."""

OUTCOMES: Final = {
    flight.RUNNING: "running",
    flight.RETURNED: "returned",
    flight.RAISED: "raised",
    flight.CANCELLED: "cancelled",
}


class LastCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that a process had begun.

    Attributes:
        id: As that of a `CallRow`; empty for a broadcast.
        name: `mesh[label=0].endpoint`.
        at: Unix time at which it had come.
        outcome: "running", "returned", "raised", "cancelled".
        caller: The process that had asked.
        error: What it has raised, if that was kept.
    """

    id: str
    name: str
    at: float
    outcome: str
    caller: str = ""
    error: str = ""


class DeadProc(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a run that has died.

    Attributes:
        id, parent, name, mesh, point, incarnation, pid, host: As those of a `ProcRow`.
        state: "ended" in good order; "dead", as its owner has noticed; "stuck", which did not run any more; "cut off"
            by what has ended the run; "running", if the run goes on.
        began_at, last_at: Unix times of its start and of its last sign of life.
        silent_seconds: How long before the end of the run that was.
        memory_bytes: Resident memory at its last look; 0 if it is not known.
        calls: What it had begun, oldest first: the last ones, and all that ran.
        record: Its file.
    """

    id: str
    name: str
    parent: str = ""
    mesh: str = ""
    point: dict[str, int] = {}
    incarnation: int = 0
    pid: int = 0
    host: str = ""
    state: str = "cut off"
    began_at: float = 0.0
    last_at: float = 0.0
    silent_seconds: float = 0.0
    memory_bytes: int = 0
    calls: tuple[LastCall, ...] = ()
    record: str = ""


class Autopsy(msgspec.Struct, frozen=True, kw_only=True):
    """What has become of a run.

    Attributes:
        version: Grows when a field is taken away or gets another meaning.
        folder: Of its flight records.
        job: The run; None if the record of its controller is not there.
        ended: "running"; "killed"; or "error", when its outermost block was left by one.
        error: That one.
        begun_at, last_at: Unix times of its start and of the last sign of life.
        cause: What it has died of, as far as can be told.
        procs: Its processes; those that have ended otherwise than well come first.
        events: What happened to members, oldest first.
        snapshot: Its calls and actors as they were at the end.
        unreadable: Files that could not be read, and why.
    """

    version: int = observed.VERSION
    folder: str
    job: observed.JobRow | None
    ended: str
    error: str = ""
    begun_at: float
    last_at: float
    cause: Cause
    procs: tuple[DeadProc, ...]
    events: tuple[observed.EventRow, ...]
    snapshot: RunSnapshot
    unreadable: dict[str, str] = {}


def autopsy(where: str | Path = "", *, pid: int | None = None) -> Autopsy:
    """Return what has become of a run, by the flight records that its processes have left.

    Args:
        where: Folder of its records; by default the newest of this user on this machine that does not run.
        pid: Of the controller of a run of this user; it may still run.

    Raises:
        ConnectError: There are no such records.

    Blocking: as long as it takes to read the files, a megabyte for each process.
    """
    return examine(find_records(str(where), pid))


def examine(records: RunRecords) -> Autopsy:
    signs = {proc_id: _last_sign(one) for proc_id, one in records.flights.items()}
    last_at = max(signs.values())
    events = _events(records)
    root = records.root
    left = None if root is None else next((one for one in root.records if isinstance(one, flight.LeftBlock)), None)
    names = {proc_id: one.head.proc.name for proc_id, one in records.flights.items()}
    earlier = _before_the_end(records, events, last_at) if left is None else events
    dead = {(one.event.name, one.event.incarnation) for one in earlier if one.event.kind == "Died"}
    procs = {proc_id: _dead_proc(records, proc_id, signs[proc_id], last_at, names, dead) for proc_id in records.flights}
    left_by = "" if left is None else left.error
    ended_calls = _ended_calls(records)
    views = [_view_at_end(one, proc_id, last_at, procs[proc_id].state) for proc_id, one in records.flights.items()]
    if not left_by.startswith("KeyboardInterrupt"):  # then all calls were cancelled, and what they did is asked for
        views = [_without(view, procs[view.proc.id].state, ended_calls) for view in views]
    snapshot = merge(views, last_at)
    states = {
        proc_id: "computing" if one.state == "stuck" and one.silent_seconds < limits.STALL_SECONDS else one.state
        for proc_id, one in procs.items()
    }
    order = {"dead": 0, "stuck": 1, "cut off": 2, "running": 2, "ended": 3}
    return Autopsy(
        folder=str(records.folder),
        job=None if root is None else root.head.job,
        ended="running" if records.is_running else "error" if left_by else "killed",
        error=left_by,
        begun_at=min(one.head.started_at for one in records.flights.values()),
        last_at=last_at,
        cause=cause_of(records, snapshot, earlier, states, left_by),
        procs=tuple(sorted(procs.values(), key=lambda one: (order[one.state], one.parent != "", one.name))),
        events=tuple(one.event for one in events),
        snapshot=snapshot,
        unreadable=records.unreadable,
    )


def _last_sign(one: flight.Flight) -> float:
    times = [one.head.started_at, one.ended_at, *(call.at for call in one.calls[-1:])]
    times += [record.event.at if isinstance(record, flight.SeenEvent) else record.at for record in one.records]
    return max(times)


def _before_the_end(records: RunRecords, events: list[flight.SeenEvent], last_at: float) -> list[flight.SeenEvent]:
    """Return the events without the deaths that belong to the end of a run that was killed (AP-3)."""
    if records.is_running:
        return events
    starts = last_at - _END_SECONDS
    return [one for one in events if one.event.kind != "Died" or one.event.at < starts]


def _events(records: RunRecords) -> list[flight.SeenEvent]:
    found = [record for one in records.flights.values() for record in one.records]
    return sorted((one for one in found if isinstance(one, flight.SeenEvent)), key=lambda one: one.event.at)


def _last_view(one: flight.Flight) -> flight.SeenView | None:
    return next((record for record in reversed(one.records) if isinstance(record, flight.SeenView)), None)


def _dead_proc(
    records: RunRecords,
    proc_id: str,
    sign: float,
    last_at: float,
    names: dict[str, str],
    dead: set[tuple[str, int]],
) -> DeadProc:
    one = records.flights[proc_id]
    row, view = one.head.proc, _last_view(one)
    looked_at, every = (one.head.started_at, limits.RECORD_SECONDS) if view is None else (view.at, view.every)
    state = "running" if records.is_running else "cut off"
    if one.ended_at:
        state = "ended"
    elif (row.name, row.incarnation) in dead:
        state = "dead"
    elif last_at - looked_at > 2 * every:
        state = "stuck"
    errors = {record.number: record.text for record in one.records if isinstance(record, flight.RaisedError)}
    calls = one.calls[-limits.AUTOPSY_CALLS :]
    running = [call for call in one.calls[: -limits.AUTOPSY_CALLS] if call.outcome == flight.RUNNING]
    return DeadProc(
        id=proc_id,
        parent=row.parent,
        name=row.name,
        mesh=row.mesh,
        point=row.point,
        incarnation=row.incarnation,
        pid=row.pid,
        host=row.host,
        state=state,
        began_at=one.head.started_at,
        last_at=sign,
        silent_seconds=last_at - max(looked_at, one.ended_at),
        memory_bytes=0 if view is None else view.view.proc.memory_bytes,
        calls=tuple(_last_call(call, proc_id, names, errors) for call in (*running, *calls)),
        record=str(records.folder / proc_id),
    )


def _last_call(call: flight.FlightCall, proc_id: str, names: dict[str, str], errors: dict[int, str]) -> LastCall:
    caller = f"{call.caller:x}"
    return LastCall(
        id=f"{caller}.{call.call}@{proc_id}" if call.call else "",
        name=name_of(call.name),
        at=call.at,
        outcome=OUTCOMES[call.outcome],
        caller=names.get(caller, f"process {caller}"),
        error=errors.get(call.number, ""),
    )


def _view_at_end(one: flight.Flight, proc_id: str, last_at: float, state: str) -> observed.ProcView:
    """Return what a process would have told of itself at the end of the run."""
    seen = _last_view(one)
    view = observed.ProcView(proc=one.head.proc, job=one.head.job) if seen is None else seen.view
    late = 0.0 if seen is None else max(0.0, last_at - seen.at)
    known = {call.id for call in view.calls}
    calls = [msgspec.structs.replace(call, age=call.age + late) for call in view.calls]
    for call in one.calls:
        call_id = f"{call.caller:x}.{call.call}@{proc_id}" if call.call else f"broadcast.{call.number}@{proc_id}"
        if call.outcome != flight.RUNNING or call.name is None or not call.name.mesh or call_id in known:
            continue
        calls.append(
            observed.CallRow(
                id=call_id,
                proc=proc_id,
                name=place_name(call.name.mesh, call.name.point),
                mesh=call.name.mesh,
                point=call.name.point,
                endpoint=call.name.endpoint,
                caller_proc=f"{call.caller:x}",
                state="running",
                age=max(0.0, last_at - call.at),
            )
        )
    states = {"ended": "exiting", "dead": "dead", "stuck": "stuck"}
    proc = msgspec.structs.replace(one.head.proc, state=states.get(state, "running"), stack_fd=-1)
    return msgspec.structs.replace(view, proc=proc, calls=tuple(calls))


def _ended_calls(records: RunRecords) -> set[str]:
    return {
        f"{call.caller:x}.{call.call}@{proc_id}"
        for proc_id, one in records.flights.items()
        for call in one.calls
        if call.call and call.outcome != flight.RUNNING
    }


def _without(view: observed.ProcView, state: str, ended: set[str]) -> observed.ProcView:
    if state in ("ended", "dead"):
        return msgspec.structs.replace(view, calls=(), publications=())
    return msgspec.structs.replace(view, calls=tuple(call for call in view.calls if call.id not in ended))
