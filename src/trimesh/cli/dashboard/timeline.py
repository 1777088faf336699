"""Time line of calls, latencies and single calls for the page, from flight records.

TN-1 Calls of one endpoint that follow each other within a bar's width are one bar with a count: a row has at most
     `limits.PAGE_TASK_BARS` bars a slot.
TN-2 Overlapping calls are placed in different slots, calls of one endpoint in the same one as far as they can.
TN-3 The browser asks for the rows that it shows, a few at a time: each is a flight record that is read.
TN-4 A call that runs in a dead process ends at the last sign of life of that process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from trimesh import limits
from trimesh._wire import flight
from trimesh.errors import place_name
from trimesh.observe import ProcRow, RunSnapshot, Timeline, read_record, read_records, trace_bytes

_SLOTS_MAX: Final = 8


class TaskBar(msgspec.Struct, frozen=True, array_like=True):
    """One call, or several short ones of one endpoint.

    Attributes:
        begin, length: Milliseconds from the start of the time line, and duration in milliseconds.
        endpoint: Its index in `TaskStream.endpoints`.
        outcome: 0 running, 1 returned, 2 raised, 3 cancelled; of several calls the greatest.
        count: Number of calls.
        slot: Row within its process.
        number: Number of its first call in the process.
    """

    begin: float
    length: float
    endpoint: int
    outcome: int
    count: int
    slot: int
    number: int


class TaskRow(msgspec.Struct, frozen=True, kw_only=True):
    """One process.

    Attributes:
        id: The process.
        name: Its name.
        slots: Number of rows that its bars need.
        bars: Its calls, oldest first.
        missing: Whether calls of this period were overwritten in its flight record.
        error: Why its flight record cannot be read; "" otherwise.
    """

    id: str
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
        p50, p99, longest: Median, 99th percentile and maximum.
        waited: Median time in the mailbox.
    """

    endpoint: str
    count: int
    failed: int
    p50: float
    p99: float
    longest: float
    waited: float


class TaskStream(msgspec.Struct, frozen=True, kw_only=True):
    """A time line.

    Attributes:
        since: Unix time of its start.
        seconds: Its length.
        endpoints: `mesh.endpoint`, by number.
        rows: Time lines of the processes.
    """

    since: float
    seconds: float
    endpoints: tuple[str, ...] = ()
    rows: tuple[TaskRow, ...] = ()


def task_stream(procs: Sequence[ProcRow], since: float, seconds: float) -> TaskStream:
    """Return the calls of some processes from the Unix time `since` on.

    Blocking: some 10 ms per process.
    """
    endpoints = dict[str, int]()
    rows = list[TaskRow]()
    for proc in procs[: limits.PAGE_TASK_PROCS]:
        try:
            found = read_record(proc.record)
        except ValueError as error:
            rows.append(TaskRow(id=proc.id, name=proc.name, error=str(error)))
            continue
        seen = [call for call in found.calls if _is_seen(call, since, since + seconds)]
        missing = bool(found.calls) and found.calls[0].number > 1 and found.calls[0].at > since
        until = min(seconds, _last_sign(found) - since) if proc.state == "dead" else seconds
        slots, bars = _bars(seen, since, seconds, endpoints, max(0.0, until))
        rows.append(TaskRow(id=proc.id, name=proc.name, slots=slots, bars=tuple(bars), missing=missing))
    return TaskStream(since=since, seconds=seconds, endpoints=tuple(endpoints), rows=tuple(rows))


def latencies_of(procs: Sequence[ProcRow], since: float, seconds: float) -> list[CallLatency]:
    """Return the latency of calls to some processes in a period, by endpoint.

    Blocking: some 10 ms per process.
    """
    calls = list[flight.FlightCall]()
    for proc in procs[: limits.PAGE_TASK_PROCS]:
        with suppress(ValueError):  # its row says why
            calls += [one for one in read_record(proc.record).calls if _is_seen(one, since, since + seconds)]
    return latencies(calls)


def _is_seen(call: flight.FlightCall, since: float, until: float) -> bool:
    if call.name is None or not call.name.mesh:
        return False
    return call.at + call.waited < until and (call.outcome == flight.RUNNING or call.at + call.lasted >= since)


def _bars(
    calls: Iterable[flight.FlightCall], since: float, seconds: float, endpoints: dict[str, int], until: float
) -> tuple[int, list[TaskBar]]:
    """Return the number of slots, and the bars in them; running calls end at `until`."""
    width = seconds / limits.PAGE_TASK_BARS
    open_bars = list[_OpenBar]()  # the last bar of each slot
    newest = dict[int, _OpenBar]()  # of each endpoint
    bars = list[TaskBar]()
    for call in sorted(calls, key=_begin_of):
        name = call.name
        assert name is not None
        endpoint = endpoints.setdefault(f"{name.mesh}.{name.endpoint}", len(endpoints))
        begin = max(0.0, call.at + call.waited - since)
        end = max(begin, until) if call.outcome == flight.RUNNING else min(seconds, call.at + call.lasted - since)
        bar = newest.get(endpoint)
        if bar is not None and bar.takes(begin, end, call.outcome, width):  # TN-1
            bar.end, bar.outcome, bar.count = max(bar.end, end), max(bar.outcome, call.outcome), bar.count + 1
            continue
        slot = _free_slot(open_bars, endpoint, begin)
        if slot is None:
            continue
        new = newest[endpoint] = _OpenBar(slot, begin, end, endpoint, call.outcome, call.number)
        if slot < len(open_bars):
            bars.append(open_bars[slot].closed())
            open_bars[slot] = new
        else:
            open_bars.append(new)
    bars += [bar.closed() for bar in open_bars]
    return max(1, len(open_bars)), sorted(bars, key=lambda bar: bar.begin)


def _last_sign(record: flight.Flight) -> float:
    """Return the Unix time of the last sign of life in a record."""
    times = [call.at + max(call.waited, call.lasted) for call in record.calls]
    times += [one.event.at if isinstance(one, flight.SeenEvent) else one.at for one in record.records]
    return max(times, default=record.head.started_at)


def _begin_of(call: flight.FlightCall) -> float:
    return call.at + call.waited


class _OpenBar:
    """A bar that further calls may join."""

    __slots__ = ("begin", "count", "end", "endpoint", "number", "outcome", "slot")

    def __init__(self, slot: int, begin: float, end: float, endpoint: int, outcome: int, number: int) -> None:
        self.slot, self.begin, self.end = slot, begin, end
        self.endpoint, self.outcome, self.number = endpoint, outcome, number
        self.count = 1

    def takes(self, begin: float, end: float, outcome: int, width: float) -> bool:
        """Return whether a call of this endpoint joins: it is short, follows at once, and neither runs."""
        is_near = end - begin < width and end - self.begin < 8 * width and abs(begin - self.end) < width
        return is_near and flight.RUNNING not in (self.outcome, outcome)

    def closed(self) -> TaskBar:
        length = round(max(self.end - self.begin, 0.0) * 1e3, 3)
        begin = round(self.begin * 1e3, 3)
        return TaskBar(begin, length, self.endpoint, self.outcome, self.count, self.slot, self.number)


def _free_slot(open_bars: Sequence[_OpenBar], endpoint: int, begin: float) -> int | None:
    """Return the slot of a new bar: one of its endpoint, else a new one, else any that is free; None if none is."""
    free = [slot for slot, bar in enumerate(open_bars) if begin >= bar.end - 1e-6]
    own = next((slot for slot in free if open_bars[slot].endpoint == endpoint), None)
    if own is not None:
        return own
    if len(open_bars) < _SLOTS_MAX:
        return len(open_bars)
    return free[0] if free else None


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
        p50=lasted[len(lasted) // 2],
        p99=lasted[min(len(lasted) - 1, len(lasted) * 99 // 100)],
        longest=lasted[-1],
        waited=waited[len(waited) // 2],
    )


class CallPlace(msgspec.Struct, frozen=True, array_like=True):
    """One row of the time line.

    Attributes:
        id, name, mesh, host: The process.
    """

    id: str
    name: str
    mesh: str
    host: str


def places(seen: RunSnapshot) -> list[CallPlace]:
    """Return the rows of the time line: processes of meshes by host, mesh and coordinates."""
    procs = [proc for proc in seen.procs if proc.mesh]
    procs.sort(key=lambda proc: (proc.host, proc.mesh, tuple(proc.point.values()), proc.incarnation))
    return [CallPlace(proc.id, proc.name, proc.mesh, proc.host) for proc in procs]


class OneCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call, as the flight record of its process has it.

    Attributes:
        name: `mesh[label=0].endpoint`.
        caller: The calling process.
        at: Unix time of its arrival.
        outcome: 0 running, 1 returned, 2 raised, 3 cancelled.
        waited, lasted: Seconds in the mailbox, and from its arrival to its end; 0.0 while it runs.
        error, line: The error that it raised, and the line of the program.
    """

    name: str
    caller: str
    at: float
    outcome: int
    waited: float
    lasted: float
    error: str = ""
    line: str = ""


def one_call(seen: RunSnapshot, proc: ProcRow, number: int) -> OneCall | None:
    """Return a call of a process by its number; None if it was overwritten.

    Blocking: some 10 ms.

    Raises:
        ValueError: The flight record cannot be read.
    """
    record = read_record(proc.record)
    call = next((one for one in record.calls if one.number == number), None)
    if call is None or call.name is None:
        return None
    names = {one.id: one.name for one in seen.procs}
    raised = (one for one in record.records if isinstance(one, flight.RaisedError) and one.number == number)
    error = next(raised, None)
    return OneCall(
        name=f"{place_name(call.name.mesh, call.name.point)}.{call.name.endpoint}",
        caller=names.get(f"{call.caller:x}", f"process {call.caller:x}"),
        at=call.at,
        outcome=call.outcome,
        waited=call.waited,
        lasted=call.lasted,
        error="" if error is None else error.text,
        line="" if error is None else error.line,
    )


def trace(folder: str, since: float, seconds: float) -> bytes:
    """Return the calls of a run in a period as a file for Perfetto.

    Blocking: some 10 ms for each process.

    Raises:
        ConnectError: The run has no flight records on this machine.
    """
    timeline = Timeline()
    timeline.take(read_records(Path(folder)), since)
    return b"".join(trace_bytes(timeline, since, since + seconds))
