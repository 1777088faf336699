"""Time line of calls by coordinate: converts flight records to a trace for Perfetto.

    flight records, read again and again --> `Timeline.take` --> `Timeline.events` --> JSON trace event format

TM-1 A process of the trace is a process of the run; a thread is one slot of an actor. Overlapping calls use several.
TM-2 A call appears once, by its number, in its last state that was read. Calls overwritten before they were read are
     counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

from trimesh import limits
from trimesh._wire import flight
from trimesh.observe.post_mortem import OUTCOMES, name_of
from trimesh.observe.run_snapshot import RunRecords

_SLACK_SECONDS: Final = 1e-6
"""Largest error between times of two calls: they are sums of Unix times rounded to a quarter of a microsecond."""


class Timeline:
    """The calls of a run, collected from repeated readings of its flight records.

    Attributes:
        count: Number of kept calls.
    """

    def __init__(self) -> None:
        self.count = 0
        self._heads = dict[str, flight.FlightHead]()
        self._calls = dict[str, dict[int, flight.FlightCall]]()
        self._events = dict[tuple[str, int], flight.SeenEvent]()
        self._errors = dict[tuple[str, int], str]()
        self._newest = dict[str, int]()
        self._last_at = 0.0

    @property
    def last_at(self) -> float:
        """Unix time of the last sign of life that was read."""
        return self._last_at

    def take(self, records: RunRecords, since: float = 0.0) -> None:
        """Add the calls of a run's flight records.

        Args:
            records: Records of the same run as before.
            since: Unix time; calls that ended before are left out.
        """
        for proc_id, one in records.flights.items():
            self._heads[proc_id] = one.head
            self._saw(one.head.started_at, one.ended_at)
            self._take_calls(self._calls.setdefault(proc_id, {}), one.calls, since)
            self._newest[proc_id] = one.calls[-1].number if one.calls else 0
            for record in one.records:
                if isinstance(record, flight.SeenEvent):
                    self._events[proc_id, record.event.number] = record
                    self._saw(record.event.at)
                    continue
                if isinstance(record, flight.RaisedError):
                    self._errors[proc_id, record.number] = record.text
                self._saw(record.at)

    def _take_calls(
        self, known: dict[int, flight.FlightCall], calls: Iterable[flight.FlightCall], since: float
    ) -> None:
        for call in calls:
            self._saw(call.at + max(call.waited, call.lasted))
            is_over = call.outcome != flight.RUNNING and call.at + call.lasted < since
            if call.number in known:
                known[call.number] = call
            elif not is_over and self.count < limits.TRACE_CALLS_MAX:
                self.count += 1
                known[call.number] = call

    def _saw(self, *times: float) -> None:
        self._last_at = max(self._last_at, *times)

    def events(self, since: float, until: float) -> Iterator[dict[str, Any]]:
        """Yield the events between two Unix times in the JSON trace event format."""
        ordered = self._ordered()
        numbers = {proc_id: number for number, (proc_id, _) in enumerate(ordered, start=1)}
        members = {(head.proc.name, head.proc.incarnation): numbers[proc_id] for proc_id, head in ordered}
        names = {proc_id: head.proc.name for proc_id, head in ordered}
        for proc_id, head in ordered:
            number = numbers[proc_id]
            yield _named("process_name", number, 0, f"{head.proc.name} (pid {head.proc.pid})")
            yield {"ph": "M", "name": "process_sort_index", "pid": number, "tid": 0, "args": {"sort_index": number}}
            calls = self._calls[proc_id].values()
            seen = [one for one in calls if one.at + one.waited < until and _end_of(one, until) >= since]
            yield from self._calls_of(number, proc_id, seen, names, since, until)
        for (proc_id, _), one in sorted(self._events.items(), key=lambda item: item[1].event.at):
            event = one.event
            if since <= event.at <= until:
                yield {
                    "ph": "i",
                    "s": "p",
                    "cat": "event",
                    "name": f"{event.kind} {event.name}",
                    "ts": _micros(event.at - since),
                    "pid": members.get((event.name, event.incarnation), numbers[proc_id]),
                    "tid": 0,
                    "args": {"text": event.text, "incarnation": event.incarnation},
                }

    def _ordered(self) -> list[tuple[str, flight.FlightHead]]:
        """Return the heads of the records: the controller's first, then by mesh and coordinates."""

        def place(item: tuple[str, flight.FlightHead]) -> tuple[bool, str, list[int], int]:
            proc = item[1].proc
            return item[1].job is None, proc.mesh, list(proc.point.values()), proc.incarnation

        return sorted(self._heads.items(), key=place)

    def _calls_of(
        self,
        number: int,
        proc_id: str,
        calls: list[flight.FlightCall],
        names: dict[str, str],
        since: float,
        until: float,
    ) -> Iterator[dict[str, Any]]:
        lanes = dict[str, list[tuple[int, float]]]()
        threads = 0
        for call in sorted(calls, key=lambda one: (one.at + one.waited, one.number)):
            actor = _actor_of(call)
            began_at, ended_at = max(since, call.at + call.waited), _end_of(call, until)
            mine = lanes.setdefault(actor, [])
            for lane, (thread, free_at) in enumerate(mine):  # noqa: B007 - both are used below
                if free_at <= began_at + _SLACK_SECONDS:
                    began_at = max(began_at, free_at)
                    break
            else:
                lane, threads = len(mine), threads + 1
                thread = threads
                mine.append((thread, 0.0))
                yield _named("thread_name", number, thread, actor if lane == 0 else f"{actor} slot {lane + 1}")
                sort = {"ph": "M", "name": "thread_sort_index", "pid": number, "tid": thread}
                yield {**sort, "args": {"sort_index": thread}}
            mine[lane] = (thread, max(began_at, ended_at))
            caller = f"{call.caller:x}"
            arguments = {
                "outcome": OUTCOMES[call.outcome],
                "caller": names.get(caller, f"process {caller}"),
                "id": f"{caller}.{call.call}@{proc_id}" if call.call else "",
                "waited_us": _micros(call.waited),
            }
            if error := self._errors.get((proc_id, call.number)):
                arguments["error"] = error
            yield {
                "ph": "X",
                "cat": "call" if call.name is not None and call.name.mesh else "agent",
                "name": name_of(call.name) if call.name is None else call.name.endpoint,
                "ts": _micros(began_at - since),
                "dur": _micros(max(0.0, ended_at - began_at)),
                "pid": number,
                "tid": thread,
                "args": arguments,
            }

    def missing(self, since: float) -> int:
        """Return the number of missing calls since a Unix time: most were overwritten before they were read."""
        found = 0
        for proc_id, calls in self._calls.items():
            first = min((number for number, call in calls.items() if call.at >= since), default=None)
            if first is not None:
                kept = sum(number >= first for number in calls)
                found += max(0, self._newest[proc_id] - first + 1 - kept)
        return found


def trace_bytes(timeline: Timeline, since: float, until: float) -> Iterator[bytes]:
    """Yield a file in the JSON trace event format: times are microseconds from `since`, which is Unix time."""
    encode = msgspec.json.Encoder().encode
    other = {"since": since, "until": until, "missing": timeline.missing(since)}
    yield b'{"displayTimeUnit":"ms","otherData":' + encode(other) + b',"traceEvents":['
    for number, event in enumerate(timeline.events(since, until)):
        yield (b",\n" if number else b"\n") + encode(event)
    yield b"\n]}\n"


def _actor_of(call: flight.FlightCall) -> str:
    return "agent" if call.name is None or not call.name.mesh else name_of(call.name).rpartition(".")[0]


def _end_of(call: flight.FlightCall, until: float) -> float:
    return until if call.outcome == flight.RUNNING else min(until, call.at + call.lasted)


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _named(what: str, number: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": number, "tid": thread, "args": {"name": name}}
