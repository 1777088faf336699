"""Post-mortem of a dead run, from its flight records.

AP-1 The last snapshot of each process, its newer rows of calls and its events are merged into one state: that of the
     last sign of life of any process.
AP-2 A process that was silent for longer than two snapshot intervals before that moment did not run.
AP-3 Deaths that the controller saw just before it was killed belong to one end: whatever kills all processes kills them
     in some order.

CU-1 A mended failure (its member serves again) is not a culprit; nor is a requested end.
CU-2 Of a call to many members, the few that have not left it are culprits, or the few that have, if the rest waits.
CU-3 A call that only runs ranks below versions that no process reads; a call that others wait for ranks above them.
CU-4 A state that lasted shorter than a process may stall (`limits.STALL_SECONDS`) is work, not a culprit.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from trimesh import limits
from trimesh._wire import flight, observed
from trimesh.errors import place_name
from trimesh.observe.run_snapshot import RunRecords, RunSnapshot, find_records, merge, program_line
from trimesh.observe.waiting import WaitGraph, kept_versions, unread_versions

_ENDS: Final = ("Died", "Failed", "GaveUp", "Unacknowledged")
_MENDED: Final = ("Restarted", "Started")
_GROWN: Final = 3
_GROWN_BYTES: Final = 64 << 20
"""A process has grown if it has `_GROWN` times the usual memory of its mesh, and at least so many bytes more."""


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """Root cause of a run's death or hang.

    Attributes:
        kind: "died" (a member), "raised" (an error left the outermost block), "deadlock", "stuck" (the loop of a
            process did not run), "pinned" (a reader kept a version whose room a `publish` waited for), "left behind"
            (few members have not come out of a call, or only few have), "memory" (a process had far more than the
            others), "waiting" (a call that the others waited for), "unread" (no process has read the published
            versions), "stopped" (by Ctrl-C, without any other cause), or "none".
        name: The culprit, a process or actor, as `ps` shows it; empty for none.
        call: Its call: `mesh[label=0].endpoint`; empty if unknown.
        text: Description in one sentence.
        at: Source line, if known.
        stack: Stack of its main thread, innermost call first, if known.
    """

    kind: str
    text: str
    name: str = ""
    call: str = ""
    at: str = ""
    stack: str = ""


def cause_of(
    records: RunRecords,
    snapshot: RunSnapshot,
    events: Sequence[flight.SeenEvent],
    states: Mapping[str, str],
    left_by: str = "",
) -> Cause:
    """Return the root cause of a run's death.

    Args:
        records: Its flight records.
        snapshot: The calls under way at its end.
        events: Events of members, oldest first.
        states: States of its processes, as in `DeadProc`.
        left_by: The error that left its outermost block; empty for none.
    """
    is_interrupted = left_by.startswith("KeyboardInterrupt")
    found = _died(records, events) or (None if is_interrupted or not left_by else _raised(records, left_by))
    found = found or _deadlock(snapshot) or _stuck(records, snapshot, events, states)
    found = found or _pinned(snapshot) or _left_behind(records, snapshot) or _grown(records)
    found = found or _waited_for(snapshot)
    if found is not None:
        return found
    ran = max(snapshot.calls, key=lambda call: call.age, default=None)
    doing = "no call was under way"
    if ran is not None:
        doing = f"the oldest call, {ran.name}.{ran.endpoint}, was {ran.state} for {ran.age:.1f} s"
    if is_interrupted:
        return Cause(kind="stopped", text=f"it was stopped by Ctrl-C; {doing}")
    if records.is_running:
        return Cause(kind="none", text=f"no member has failed; {doing}")
    return Cause(kind="none", text=f"it was ended from outside; no member had failed, and {doing}")


def _died(records: RunRecords, events: Sequence[flight.SeenEvent]) -> Cause | None:
    mended = dict[str, int]()
    for number, one in enumerate(events):
        if one.event.kind in _MENDED:
            mended[one.event.name] = number
    for number, one in enumerate(events):
        event = one.event
        if event.kind in ("Died", "GaveUp") and mended.get(event.name, -1) < number:
            ran = _running_in(records, event)
            doing = f", while it ran {ran}" * bool(ran)
            grown = _grown(records)
            large = f"; {grown.text}" if grown is not None and grown.name == event.name else ""
            how, output, at = last_words(event.text)
            how = f"it{how.removeprefix(event.name)}" if how.startswith(f"{event.name} ") else how
            earlier = sum(one.event.kind == "Died" and one.event.name == event.name for one in events[:number])
            again = f"; it had died {earlier} times before" * bool(earlier)
            said = f"; last output: {output}" * bool(output)
            text = f"{event.name} has died first: {how}{doing}{large}{again}{said}"
            return Cause(kind="died", name=event.name, call=ran, text=text, at=at)
    for one in events:
        event = one.event
        if event.kind == "Failed":
            return Cause(kind="died", name=event.name, text=f"{event.name} has failed: {event.text}")
    return None


_FRAME: Final = re.compile(r'File "[^"]+", line \d+,? in [^;]+')


def last_words(text: str) -> tuple[str, str, str]:
    """Return how a process died, its last output, and the line of the program if that output is the stack of a crash.

    Args:
        text: Text of its `ProcDied`.
    """
    how, _, output = text.removeprefix("ProcDied: ").partition("; last output: ")
    frames = _FRAME.findall(output) if output.startswith("Fatal Python error: ") else []
    return how, "" if frames else output, program_line("\n".join(frames))


def _running_in(records: RunRecords, event: observed.EventRow) -> str:
    for one in records.flights.values():
        if (one.head.proc.name, one.head.proc.incarnation) == (event.name, event.incarnation):
            ran = [call for call in one.calls if call.outcome == flight.RUNNING and call.name and call.name.mesh]
            return "" if not ran else name_of(ran[-1].name)
    return ""


OF_RUNTIME: Final = " (of the runtime)"
"""End of the name of a call that the runtime made for itself."""


def name_of(name: flight.CallName | None) -> str:
    if name is None:
        return "a call"
    if not name.mesh:
        return f"{name.endpoint}{OF_RUNTIME}"
    return f"{place_name(name.mesh, name.point)}.{name.endpoint}"


def _raised(records: RunRecords, left_by: str) -> Cause:
    """Find the call that raised the error first: its callers raise the same one after it."""
    found = list[tuple[flight.RaisedError, flight.FlightCall, str]]()
    for proc_id, one in records.flights.items():
        numbers = {record.number: record for record in one.records if isinstance(record, flight.RaisedError)}
        for call in one.calls:
            record = numbers.get(call.number)
            if record is not None and (record.text in left_by or left_by in record.text):
                found.append((record, call, one.head.proc.name or proc_id))
    if found:
        record, call, name = min(found, key=lambda one: one[0].at)
        text = f"{name_of(call.name)} raised {record.text}, which left the outermost block"
        return Cause(kind="raised", name=name, call=name_of(call.name), text=text, at=record.line)
    root = records.root
    lines = [] if root is None else [one.line for one in root.records if isinstance(one, flight.LeftBlock)]
    text = f"the outermost block raised {left_by}"
    return Cause(kind="raised", name="controller", text=text, at=lines[0] if lines else "")


def _deadlock(snapshot: RunSnapshot) -> Cause | None:
    graph = WaitGraph(snapshot)
    for culprit in graph.culprits():
        if culprit.cycle:
            calls = [graph.calls[call_id] for call_id in (*culprit.cycle, culprit.cycle[0])]
            way = " -> ".join(f"{call.name}.{call.endpoint}" for call in calls)
            call = culprit.call
            return Cause(
                kind="deadlock",
                name=call.name,
                call=f"{call.name}.{call.endpoint}",
                text=f"these waited for each other: {way}",
                at=call.at,
            )
    return None


def _stuck(
    records: RunRecords, snapshot: RunSnapshot, events: Sequence[flight.SeenEvent], states: Mapping[str, str]
) -> Cause | None:
    """Find the processes that did not run; members left behind in a call to many take precedence."""
    stuck = [proc_id for proc_id, state in states.items() if state == "stuck"]
    if not stuck:
        return None
    shared = _left_behind(records, snapshot)
    if shared is not None:
        return shared
    calls = {call.proc: call for call in snapshot.calls if call.proc in stuck and call.state in ("running", "sent")}
    proc_id = min(stuck, key=lambda one: (one not in calls, -calls[one].age if one in calls else 0.0))
    proc, found = records.flights[proc_id].head.proc, calls.get(proc_id)
    stack = next((one.stack for one in reversed(events) if one.stack and one.event.name == proc.name), "")
    doing = "" if found is None else f"{found.name}.{found.endpoint}"
    text = f"the Trio loop of {proc.name} (pid {proc.pid}) did not run" + f", in {doing}" * bool(doing)
    others = [records.flights[one].head.proc.name for one in stuck if one != proc_id]
    return Cause(
        kind="stuck",
        name=proc.name,
        call=doing,
        text=text + f"; nor did those of {', '.join(others[:4])}" * bool(others),
        at=program_line(stack),
        stack=stack,
    )


def _pinned(snapshot: RunSnapshot) -> Cause | None:
    """Find the readers that kept versions, so that a `publish` waited for one."""
    one = next((one for one in kept_versions(snapshot) if one.is_waiting), None)
    if one is None:
        return None
    holders, publishers = ", ".join(one.holders[:4]), ", ".join(one.publishers[:4])
    versions = ", ".join(map(str, one.versions))
    call = one.call
    return Cause(
        kind="pinned",
        name=one.holders[0],
        call="" if call is None else f"{call.name}.{call.endpoint}",
        text=f"{holders} kept version {versions} of {publishers} pinned; a publish waited {one.seconds:.1f} s for it",
        at="" if call is None else call.at,
    )


def _left_behind(records: RunRecords, snapshot: RunSnapshot) -> Cause | None:
    """Find the few members that have not come out of a call to many, or the few that have (CU-2)."""
    under_way = {call.id: call for call in snapshot.calls if call.state in ("running", "waiting", "queued", "sent")}
    best: tuple[float, Cause] | None = None
    for ends in _shared_calls(records):
        running = [call for call, outcome in ends.items() if outcome == flight.RUNNING and call in under_way]
        ended = [call for call, outcome in ends.items() if outcome != flight.RUNNING]
        if not running or not ended:
            continue
        few, has_left = (running, False) if len(running) <= len(ended) else (ended, True)
        names = [_member(records, call) for call in few]
        first = under_way[running[0]]
        shown = ", ".join(names[:4]) + f" and {len(names) - 4} more" * (len(names) > 4)
        rest = len(running) + len(ended) - len(few)
        said = f"has come out of {first.mesh}.{first.endpoint}, in which {rest} others still are"
        if not has_left:
            said = f"has not come out of {first.mesh}.{first.endpoint}, as {rest} others have"
        cause = Cause(
            kind="left behind",
            name=names[0],
            call=f"{first.mesh}.{first.endpoint}",
            text=f"{shown} {said}",
            at=first.at,
        )
        if first.age >= limits.STALL_SECONDS and (best is None or first.age > best[0]):
            best = first.age, cause
    return None if best is None else best[1]


def _shared_calls(records: RunRecords) -> Iterator[dict[str, int]]:
    """Yield, for each call to several members, its outcome by its id at each of them."""
    found = defaultdict[tuple[int, int], dict[str, int]](dict)
    for proc_id, one in records.flights.items():
        for call in one.calls:
            if call.call and call.name is not None and call.name.mesh:
                found[call.caller, call.call][f"{call.caller:x}.{call.call}@{proc_id}"] = call.outcome
    yield from (ends for ends in found.values() if len(ends) > 1)


def _member(records: RunRecords, call_id: str) -> str:
    proc_id = call_id.rpartition("@")[2]
    caller, _, number = call_id.rpartition("@")[0].partition(".")
    for call in records.flights[proc_id].calls:
        if call.name is not None and f"{call.caller:x}" == caller and str(call.call) == number:
            return place_name(call.name.mesh, call.name.point)
    return records.flights[proc_id].head.proc.name


def _grown(records: RunRecords) -> Cause | None:
    """Find the process that had far more memory than the others of its mesh in its last snapshot."""
    seen = defaultdict[str, dict[str, int]](dict)
    for one in records.flights.values():
        views = [record.view.proc.memory_bytes for record in one.records if isinstance(record, flight.SeenView)]
        if views and one.head.proc.mesh:
            seen[one.head.proc.mesh][one.head.proc.name] = views[-1]
    for sizes in seen.values():
        usual = statistics.median_low(sizes.values())
        name = max(sizes, key=lambda one: sizes[one])
        if len(sizes) > 2 and sizes[name] > max(_GROWN * usual, usual + _GROWN_BYTES):
            text = f"{name} had {sizes[name] >> 20} MiB of memory, where others of its mesh had {usual >> 20} MiB"
            return Cause(kind="memory", name=name, text=text)
    return None


def _unread(snapshot: RunSnapshot) -> Cause | None:
    """Find the publisher whose versions have been unread for longest."""
    one = max(unread_versions(snapshot), key=lambda one: one.seconds, default=None)
    if one is None:
        return None
    publishers = ", ".join(one.publishers[:4])
    text = f"{publishers} published {one.count} versions in {one.seconds:.1f} s, and no process has read one of them"
    return Cause(kind="unread", name=one.publishers[0], text=text)


def _waited_for(snapshot: RunSnapshot) -> Cause | None:
    """Find the call that most others waited for, else a publisher whose versions are unread, else the oldest call."""
    one = next((one for one in WaitGraph(snapshot).culprits() if one.call.state != "sending"), None)
    unread = None if one is not None and one.waiters else _unread(snapshot)
    if one is None or unread is not None or one.call.age < limits.STALL_SECONDS:
        return unread
    call = one.call
    text = f"{call.name}.{call.endpoint} was {call.state} for {call.age:.1f} s"
    text += f", and {one.waiters} calls waited for it" * bool(one.waiters)
    return Cause(kind="waiting", name=call.name, call=f"{call.name}.{call.endpoint}", text=text, at=call.at)


# ---- post mortem -----------------------------------------------------------------------------------------------------

_END_SECONDS: Final = 1.0
"""Time in which all processes of a killed run end."""

OUTCOMES: Final = {
    flight.RUNNING: "running",
    flight.RETURNED: "returned",
    flight.RAISED: "raised",
    flight.CANCELLED: "cancelled",
}


class LastCall(msgspec.Struct, frozen=True, kw_only=True):
    """Call that a dead process had begun.

    Attributes:
        id: Same as `CallRow.id`; empty for a broadcast.
        name: `mesh[label=0].endpoint`.
        at: Unix time of its arrival.
        outcome: "running", "returned", "raised", "cancelled".
        caller: The calling process.
        error: Its error, if recorded.
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
        id, parent, name, mesh, point, incarnation, pid, host: Same as in `ProcRow`.
        state: "ended" without error; "dead", as its owner noticed; "stuck", if its loop had stopped running; "cut off"
            by the end of the run; "running", if the run continues.
        began_at, last_at: Unix times of its start and of its last sign of life.
        silent_seconds: Seconds from its last sign of life to the end of the run.
        memory_bytes: Resident memory in its last snapshot; 0 if unknown.
        metrics: Newest values of metrics in its last snapshot.
        calls: The last calls that it began and all that ran, oldest first.
        record: Path of its flight record.
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
    metrics: tuple[observed.MetricRow, ...] = ()
    calls: tuple[LastCall, ...] = ()
    record: str = ""


class Autopsy(msgspec.Struct, frozen=True, kw_only=True):
    """Post-mortem of a run.

    Attributes:
        version: Grows when a field is removed or changes its meaning.
        folder: Folder of its flight records.
        job: The run; None if the record of its controller is not there.
        ended: "running"; "killed"; or "error", if an error left its outermost block.
        error: That error.
        begun_at, last_at: Unix times of its start and of the last sign of life.
        cause: Its root cause, as far as can be determined.
        procs: Its processes; those that failed come first.
        events: Events of members, oldest first.
        snapshot: Its calls and actors at the end.
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
    """Return the post-mortem of a run, from the flight records of its processes.

    Args:
        where: Folder of its records; by default the newest dead run of this user on this machine.
        pid: Process id of the controller of a run of this user, which may still be alive.

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
    if not left_by.startswith("KeyboardInterrupt"):  # Ctrl-C cancelled all calls; readers want to know what they did
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
        metrics=() if view is None else view.view.metrics,
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
    """Reconstruct the report of a process at the end of the run."""
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
        if call.outcome != flight.RUNNING
    }


def _without(view: observed.ProcView, state: str, ended: set[str]) -> observed.ProcView:
    if state in ("ended", "dead"):
        return msgspec.structs.replace(view, calls=(), publications=())
    return msgspec.structs.replace(view, calls=tuple(call for call in view.calls if call.id not in ended))
