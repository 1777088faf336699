"""What a run has died of, or hung by, as far as its flight records say it: one cause, the surest one first.

CU-1 A failure that was mended (its member serves again) is no culprit; nor is an end that was asked for.
CU-2 Of a call to many members, the few that have not come out of it are, or the few that have, when the rest waits.
CU-3 A call that only runs says less than versions that no process reads; a call that others wait for says more.
CU-4 What has lasted for less than a process may stall (`limits.STALL_SECONDS`) is work, and no culprit.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from trimesh import limits
from trimesh._wire import flight, observed
from trimesh.observe.flights import RunRecords
from trimesh.observe.merging import RunSnapshot, program_line
from trimesh.observe.publishing import kept_versions, unread_versions
from trimesh.observe.waiting import WaitGraph
from trimesh.shape.point import place_name

_ENDS: Final = ("Died", "Failed", "GaveUp", "Unacknowledged")
_MENDED: Final = ("Restarted", "Started")
_GROWN: Final = 3
_GROWN_BYTES: Final = 64 << 20
"""Of its mesh the process counts that has three times the memory of the others, and so much more."""


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """What a run has died of, or hung by.

    Attributes:
        kind: "died" (a member), "raised" (an error has left the outermost block), "deadlock", "stuck" (a process whose
            loop did not run), "pinned" (a reader that kept a version, for whose room a `publish` waited), "left behind"
            (members that have not come out of a call, or have alone), "memory" (a process with far more than the
            others), "waiting" (what all others waited for), "unread" (versions that were published, and that no process
            has read), "stopped" (by Ctrl-C, while nothing of that was seen), or "none".
        name: The culprit: a process or actor, as `ps` shows it; empty for none.
        call: What it did: `mesh[label=0].endpoint`; empty if that is not known.
        text: For people: one sentence.
        at: The line of the program, if it is known.
        stack: Of its main thread, innermost call first, if it is known.
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
    """Return what a run has died of.

    Args:
        records: What its processes have left.
        snapshot: The calls under way at its end.
        events: What happened to members, oldest first.
        states: Of its processes, as `DeadProc` has them.
        left_by: The error by which its outermost block was left; empty for none.
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
    last = dict[str, str]()
    for one in events:
        if one.event.kind in (*_ENDS, *_MENDED):
            last[one.event.name] = one.event.kind
    for one in events:
        event = one.event
        if event.kind in ("Died", "GaveUp") and last[event.name] not in _MENDED:
            ran = _running_in(records, event)
            doing = f", while it ran {ran}" * bool(ran)
            grown = _grown(records)
            large = f"; {grown.text}" if grown is not None and grown.name == event.name else ""
            text = f"{event.name} has died first: {event.text}{doing}{large}"
            return Cause(kind="died", name=event.name, call=ran, text=text)
    for one in events:
        event = one.event
        if event.kind == "Failed":
            return Cause(kind="died", name=event.name, text=f"{event.name} has failed: {event.text}")
    return None


def _running_in(records: RunRecords, event: observed.EventRow) -> str:
    for one in records.flights.values():
        if (one.head.proc.name, one.head.proc.incarnation) == (event.name, event.incarnation):
            ran = [call for call in one.calls if call.outcome == flight.RUNNING and call.name and call.name.mesh]
            return "" if not ran else name_of(ran[-1].name)
    return ""


def name_of(name: flight.CallName | None) -> str:
    if name is None:
        return "a call"
    if not name.mesh:
        return f"{name.endpoint} (of the runtime)"
    return f"{place_name(name.mesh, name.point)}.{name.endpoint}"


def _raised(records: RunRecords, left_by: str) -> Cause:
    """Find the call that has raised the error first: those that have called it raise the same one after it."""
    found = list[tuple[flight.RaisedError, flight.FlightCall, str]]()
    for proc_id, one in records.flights.items():
        numbers = {record.number: record for record in one.records if isinstance(record, flight.RaisedError)}
        for call in one.calls:
            record = numbers.get(call.number)
            if record is not None and (record.text in left_by or left_by in record.text):
                found.append((record, call, one.head.proc.name or proc_id))
    if found:
        record, call, name = min(found, key=lambda one: one[0].at)
        text = f"{name_of(call.name)} has raised {record.text}, and that has left the outermost block"
        return Cause(kind="raised", name=name, call=name_of(call.name), text=text, at=record.line)
    root = records.root
    lines = [] if root is None else [one.line for one in root.records if isinstance(one, flight.LeftBlock)]
    text = f"the outermost block was left by {left_by}"
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
    """Find the processes that did not run; where some are in one call to many, and others are not, those come later."""
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
    """Find, of a call to many members, the few that have not come out of it, or the few that have."""
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
    """Yield, for each call to several members, how it has ended, by its id at each of them."""
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
    """Find the process that had far more memory than the others of its mesh when it last looked."""
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
    """Find the publisher whose versions no process has read, for longest."""
    one = max(unread_versions(snapshot), key=lambda one: one.seconds, default=None)
    if one is None:
        return None
    publishers = ", ".join(one.publishers[:4])
    text = f"{publishers} published {one.count} versions in {one.seconds:.1f} s, and no process has read one of them"
    return Cause(kind="unread", name=one.publishers[0], text=text)


def _waited_for(snapshot: RunSnapshot) -> Cause | None:
    """Find the call that most others waited for, or else a publisher that is not read, or the oldest call (CU-3)."""
    one = next((one for one in WaitGraph(snapshot).culprits() if one.call.state != "sending"), None)
    unread = None if one is not None and one.waiters else _unread(snapshot)
    if one is None or unread is not None or one.call.age < limits.STALL_SECONDS:
        return unread
    call = one.call
    text = f"{call.name}.{call.endpoint} was {call.state} for {call.age:.1f} s"
    text += f", and {one.waiters} calls waited for it" * bool(one.waiters)
    return Cause(kind="waiting", name=call.name, call=f"{call.name}.{call.endpoint}", text=text, at=call.at)
