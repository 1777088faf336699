"""Details of one member, for the page; PURE.

TN-1 Calls of one endpoint that follow each other within a bar's width are one bar with a count: a row has at most
     `limits.PAGE_TASK_BARS` bars a slot.
TN-2 Overlapping calls are placed in different slots.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Final, cast

import msgspec

from trimesh import limits
from trimesh._wire import flight
from trimesh.cli.dashboard.board import SeenRun
from trimesh.cli.text import clean
from trimesh.observe import ActorRow, CallRow, EventRow, LinkRow, ProcActivity, ProcRow, calls_of, read_record

_MOST = 50


class Detail(msgspec.Struct, frozen=True, kw_only=True):
    """One process and its actors.

    Attributes:
        activity: The process and its activity.
        actors: Actors in it.
        calls: Calls to it, oldest first, with their stacks.
        made: Calls that it has made.
        events: Events of it and its actors, newest first.
        links: Its ends of its connections.
        is_ours: Whether the controller owns it, so that it can be killed.
    """

    activity: ProcActivity
    actors: tuple[ActorRow, ...] = ()
    calls: tuple[CallRow, ...] = ()
    made: tuple[CallRow, ...] = ()
    events: tuple[EventRow, ...] = ()
    links: tuple[LinkRow, ...] = ()
    is_ours: bool = False


def detail(seen: SeenRun, name: str) -> Detail | None:
    """Return the details of a member, or None if there is no such member.

    Args:
        seen: The run.
        name: A cell of the page, `KIND:MESH:CELL`, or the name of a process or actor, as the page shows it.
    """
    proc_id = _proc_id(seen, name)
    found = next((one for one in seen.activities if one.proc.id == proc_id), None)
    if found is None:
        return None
    run = seen.snapshot
    actors = tuple(actor for actor in run.actors if actor.proc == proc_id)
    names = {found.proc.name, *(actor.name for actor in actors)}
    events = [event for event in reversed(run.events) if event.name in names]
    root = next((proc.id for proc in run.procs if not proc.parent), "")
    return Detail(
        activity=found,
        actors=actors[:_MOST],
        calls=tuple(calls_of(run, found.proc.id)[:_MOST]),
        made=tuple(call for call in run.calls if call.caller_proc == proc_id and call.proc != proc_id)[:_MOST],
        events=tuple(events[:_MOST]),
        links=tuple(link for link in run.links if link.proc == proc_id)[:_MOST],
        is_ours=found.proc.parent == root and found.proc.state != "dead",
    )


def _proc_id(seen: SeenRun, name: str) -> str:
    kind, _, rest = name.partition(":")
    mesh, _, cell = rest.rpartition(":")
    if (
        kind in ("procs", "actors")
        and cell.isascii()
        and cell.isdigit()
        and len(cell) <= len(str(limits.PAGE_CELLS_MAX))
    ):
        for one in seen.placed:
            if one.grid.kind == kind and clean(one.grid.name) == mesh and int(cell) < len(one.procs):
                return one.procs[int(cell)]
    for proc in seen.snapshot.procs:
        if clean(proc.name) == name:
            return proc.id
    return next((actor.proc for actor in seen.snapshot.actors if clean(actor.name) == name), "")


# ---- time lines and latencies of calls, from flight records ----------------------------------------------------------

_SLOTS_MAX: Final = 8


class TaskBar(msgspec.Struct, frozen=True, array_like=True):
    """One call, or several short ones of one endpoint.

    Attributes:
        begin, length: Milliseconds from the start of the time line, and duration in milliseconds.
        endpoint: Its index in `TaskStream.endpoints`.
        outcome: 0 running, 1 returned, 2 raised, 3 cancelled; of several calls the greatest.
        count: Number of calls.
        slot: Row within its process.
    """

    begin: float
    length: float
    endpoint: int
    outcome: int
    count: int
    slot: int


class TaskRow(msgspec.Struct, frozen=True, kw_only=True):
    """One process.

    Attributes:
        name: Name of the process.
        slots: Number of rows that its bars need.
        bars: Its calls, oldest first.
        missing: Whether calls of this period were overwritten in its flight record.
        error: Why its flight record cannot be read; "" otherwise.
    """

    name: str
    slots: int = 1
    bars: tuple[TaskBar, ...] = ()
    missing: bool = False
    error: str = ""


class CallLatency(msgspec.Struct, frozen=True, kw_only=True):
    """Latency of one endpoint's calls, from arrival to end, in seconds.

    Attributes:
        endpoint: `mesh.endpoint`.
        count, failed: Number of ended calls, and of those that raised.
        half, most, longest: Median, 99th percentile and maximum.
        waited: Median time in the mailbox.
    """

    endpoint: str
    count: int
    failed: int
    half: float
    most: float
    longest: float
    waited: float


class TaskStream(msgspec.Struct, frozen=True, kw_only=True):
    """A time line.

    Attributes:
        since: Unix time of its start.
        seconds: Its length.
        endpoints: `mesh.endpoint`, by number.
        rows: Time lines of the processes.
        latencies: Latencies of their endpoints, the one with most calls first.
    """

    since: float
    seconds: float
    endpoints: tuple[str, ...] = ()
    rows: tuple[TaskRow, ...] = ()
    latencies: tuple[CallLatency, ...] = ()


def task_stream(procs: Sequence[ProcRow], since: float, seconds: float) -> TaskStream:
    """Return the calls of some processes from the Unix time `since` on.

    Blocking: some 10 ms per process.
    """
    endpoints = dict[str, int]()
    rows, calls = list[TaskRow](), list[flight.FlightCall]()
    for proc in procs[: limits.PAGE_TASK_PROCS]:
        try:
            found = read_record(proc.record)
        except ValueError as error:
            rows.append(TaskRow(name=proc.name, error=str(error)))
            continue
        seen = [call for call in found.calls if _is_seen(call, since, since + seconds)]
        calls += seen
        missing = bool(found.calls) and found.calls[0].number > 1 and found.calls[0].at > since
        slots, bars = _bars(seen, since, seconds, endpoints)
        rows.append(TaskRow(name=proc.name, slots=slots, bars=tuple(bars), missing=missing))
    return TaskStream(
        since=since, seconds=seconds, endpoints=tuple(endpoints), rows=tuple(rows), latencies=tuple(latencies(calls))
    )


def _is_seen(call: flight.FlightCall, since: float, until: float) -> bool:
    if call.name is None or not call.name.mesh:
        return False
    return call.at + call.waited < until and (call.outcome == flight.RUNNING or call.at + call.lasted >= since)


def _bars(
    calls: Iterable[flight.FlightCall], since: float, seconds: float, endpoints: dict[str, int]
) -> tuple[int, list[TaskBar]]:
    """Return the number of slots, and the bars in them."""
    width = seconds / limits.PAGE_TASK_BARS
    open_bars = list[
        tuple[float, float, int, int, int]
    ]()  # begin, end, endpoint, outcome, count: the last of each slot
    bars = list[TaskBar]()

    def close(slot: int) -> None:
        begin, end, endpoint, outcome, count = open_bars[slot]
        bars.append(
            TaskBar(round(begin * 1e3, 1), round(max(end - begin, 0.0) * 1e3, 1), endpoint, outcome, count, slot)
        )

    for call in sorted(calls, key=lambda one: one.at + one.waited):
        assert call.name is not None
        endpoint = endpoints.setdefault(f"{call.name.mesh}.{call.name.endpoint}", len(endpoints))
        begin = max(0.0, call.at + call.waited - since)
        end = seconds if call.outcome == flight.RUNNING else min(seconds, call.at + call.lasted - since)
        for slot, (first, last, other, outcome, count) in enumerate(open_bars):
            is_short = end - begin < width and end - first < 8 * width and abs(begin - last) < width
            if other == endpoint and is_short and flight.RUNNING not in (outcome, call.outcome):  # TN-1
                open_bars[slot] = (first, max(last, end), endpoint, max(outcome, call.outcome), count + 1)
                break
            if begin >= last - 1e-6:
                close(slot)
                open_bars[slot] = (begin, end, endpoint, call.outcome, 1)
                break
        else:
            if len(open_bars) < _SLOTS_MAX:
                open_bars.append((begin, end, endpoint, call.outcome, 1))
    for slot in range(len(open_bars)):
        close(slot)
    return max(1, len(open_bars)), sorted(bars, key=lambda bar: bar.begin)


def latencies(calls: Iterable[flight.FlightCall]) -> list[CallLatency]:
    """Return the latency of calls by endpoint, the one with most calls first."""
    groups = defaultdict[str, list[flight.FlightCall]](list)
    for call in calls:
        if call.name is not None and call.outcome != flight.RUNNING:
            groups[f"{call.name.mesh}.{call.name.endpoint}"].append(call)
    found = [_latency(endpoint, some) for endpoint, some in groups.items()]
    return sorted(found, key=lambda one: -one.count)[: limits.PAGE_ROWS_MAX]


def _latency(endpoint: str, calls: list[flight.FlightCall]) -> CallLatency:
    lasted = sorted(call.lasted for call in calls)
    waited = sorted(call.waited for call in calls)
    return CallLatency(
        endpoint=endpoint,
        count=len(calls),
        failed=sum(call.outcome == flight.RAISED for call in calls),
        half=lasted[len(lasted) // 2],
        most=lasted[min(len(lasted) - 1, len(lasted) * 99 // 100)],
        longest=lasted[-1],
        waited=waited[len(waited) // 2],
    )


# ---- rows as JSON without invisible characters -----------------------------------------------------------------------

_NUMBERS: Final = {int, float}
_encode = msgspec.json.Encoder().encode


def page_json(value: object) -> bytes:
    """Return a value as JSON, with every invisible character in its texts and names written as an escape (DX-3)."""
    return _encode(_cleaned(msgspec.to_builtins(value)))


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isascii() and value.isprintable() else clean(value)
    if isinstance(value, dict):
        pairs = cast("dict[str, Any]", value).items()
        return {_cleaned(key): _cleaned(one) for key, one in pairs}
    if isinstance(value, list | tuple):
        items = cast("Sequence[Any]", value)
        return items if set(map(type, items)) <= _NUMBERS else [_cleaned(one) for one in items]
    return value
