"""`trimesh trace`: when calls ran, of runs that live and that have died, in the JSON trace event format (Q10)."""

from __future__ import annotations

import json
import math
import os
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trio
from msgspec import structs
from tests.observe.test_autopsy import victim

from trimesh import Actor, endpoint, limits, observe, this_host
from trimesh._wire import flight, observed
from trimesh._wire.flight import CallName, FlightHead

pytest.importorskip("cyclopts")

from trimesh.cli.commands import run

STEP = CallName("m", {"n": 0}, "step")


class Waiter(Actor):
    """Is called while it is traced."""

    @endpoint
    async def wait(self) -> None:
        await trio.sleep_forever()

    @endpoint
    def fail(self) -> None:
        raise ValueError("no such shard")


def checked(data: bytes) -> list[dict[str, Any]]:
    """Return the events of a file, after what Perfetto's importer asks of them has been checked.

    Its trace processor is a binary of some 15 MB from a server of its own; these are the rules by which it reads:
    phases that it knows, numbers for times and ids, names of each process and thread before their slices, and slices
    of one thread that nest or follow each other, as it drops those that overlap in part.
    """
    document = json.loads(data)
    assert set(document) == {"displayTimeUnit", "otherData", "traceEvents"}
    known = set[tuple[int, int]]()
    slices = dict[tuple[int, int], list[tuple[float, float]]]()
    for event in document["traceEvents"]:
        assert event["ph"] in "MXi", event
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        at = event["pid"], event["tid"]
        if event["ph"] == "M":
            known.add(at)
            continue
        assert at in known
        assert math.isfinite(event["ts"])
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert math.isfinite(event["dur"])
            assert event["dur"] >= 0
            slices.setdefault(at, []).append((event["ts"], event["ts"] + event["dur"]))
        else:
            assert event["s"] in "gpt"
    for spans in slices.values():
        assert all(one[1] <= other[0] + 0.01 for one, other in pairwise(sorted(spans)))
    events: list[dict[str, Any]] = document["traceEvents"]
    return events


def names_of(events: list[dict[str, Any]], what: str) -> dict[tuple[int, int], str]:
    return {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"] == what}


def records_of(calls: list[flight.FlightCall], *events: observed.EventRow, running: bool = False) -> Any:
    head = FlightHead(proc=observed.ProcRow(id="5", name="procs[n=0]", mesh="procs", point={"n": 0}), started_at=90.0)
    noted = tuple(flight.SeenEvent(event=one) for one in events)
    return observe.RunRecords(Path("/none"), {"5": flight.Flight(head, 0.0, tuple(calls), noted)}, {}, running)


def call(number: int, at: float, waited: float, lasted: float, outcome: int = flight.RETURNED) -> flight.FlightCall:
    return flight.FlightCall(number, at, 9, number, STEP, outcome, waited, lasted)


def traced(records: Any, since: float, until: float) -> list[dict[str, Any]]:
    timeline = observe.Timeline()
    timeline.take(records, since)
    return checked(b"".join(observe.trace_bytes(timeline, since, until)))


def test_calls_that_overlap_are_in_slots_of_their_own() -> None:
    """TM-1; the time for which a call has waited is none of its slice."""
    calls = [call(1, 100.0, 0.5, 2.0), call(2, 101.0, 0.0, 0.5), call(3, 101.25, 0.75, 1.0)]
    events = traced(records_of(calls), 100.0, 110.0)
    slices = [(one["tid"], one["ts"], one["dur"], one["args"]["waited_us"]) for one in events if one["ph"] == "X"]
    assert slices == [(1, 5e5, 1.5e6, 5e5), (2, 1e6, 5e5, 0.0), (1, 2e6, 2.5e5, 7.5e5)]
    threads = names_of(events, "thread_name")
    assert threads == {(1, 1): "m[n=0]", (1, 2): "m[n=0] slot 2"}


def test_calls_are_cut_to_the_time_that_was_asked_for() -> None:
    """One that runs lasts until the end; one that had ended before is not there."""
    calls = [
        call(1, 90.0, 0.0, 5.0),
        call(2, 99.0, 0.0, 2.0),
        call(3, 104.0, 0.0, 0.0, flight.RUNNING),
        call(4, 111.0, 0.0, 0.5),
    ]
    slices = [one for one in traced(records_of(calls), 100.0, 110.0) if one["ph"] == "X"]
    assert [(one["ts"], one["dur"], one["args"]["outcome"]) for one in slices] == [
        (0.0, 1e6, "returned"),
        (4e6, 6e6, "running"),
    ]


def test_call_that_ends_between_two_readings_is_there_once() -> None:
    """TM-2."""
    timeline = observe.Timeline()
    timeline.take(records_of([call(1, 100.0, 0.0, 0.0, flight.RUNNING)]), 100.0)
    timeline.take(records_of([call(1, 100.0, 0.0, 2.0), call(3, 103.0, 0.0, 1.0)]), 100.0)
    slices = [one for one in checked(b"".join(observe.trace_bytes(timeline, 100.0, 110.0))) if one["ph"] == "X"]
    assert [one["dur"] for one in slices] == [2e6, 1e6]
    assert timeline.missing(100.0) == 1


def test_calls_of_a_trace_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TRACE_CALLS_MAX", 2)
    timeline = observe.Timeline()
    for _ in range(2):
        timeline.take(records_of([call(number, 100.0, 0.0, 1.0) for number in range(1, 6)]), 100.0)
    assert (timeline.count, timeline.missing(100.0)) == (2, 3)


def test_events_are_at_the_process_that_they_are_about() -> None:
    died = observed.EventRow(number=1, at=101.0, kind="Died", name="procs[n=0]", text="signal 9")
    early = observed.EventRow(number=2, at=99.0, kind="Died", name="procs[n=0]")
    events = traced(records_of([], died, early), 100.0, 110.0)
    assert [(one["name"], one["ts"], one["pid"]) for one in events if one["ph"] == "i"] == [("Died procs[n=0]", 1e6, 1)]


def test_trace_has_processes_in_order_and_all_that_is_known_of_a_call() -> None:
    """TM-1: the controller first, then by mesh, coordinates and incarnation; a thread for each slot of an actor.

    An event is at the incarnation that it is about, else at its owner.
    """

    def head(
        proc_id: str, mesh: str, rank: int, incarnation: int = 0, job: observed.JobRow | None = None
    ) -> FlightHead:
        name = f"{mesh}[n={rank}]" if mesh else "controller"
        proc = observed.ProcRow(id=proc_id, name=name, mesh=mesh, point={"n": rank}, incarnation=incarnation, pid=7)
        return FlightHead(proc=proc, job=job, started_at=90.0)

    heads = [
        head("5", "b", 1),
        head("4", "b", 0, 1),
        head("3", "b", 0),
        head("2", "a", 9),
        head("9", "", 0, job=observed.JobRow(id="9", pid=7, host="here")),
    ]
    own = [
        flight.FlightCall(1, 101.0, 9, 0, STEP, flight.RAISED, 0.25, 1.0),
        flight.FlightCall(2, 101.5, 9, 4, CallName("other", {"n": 0}, "load"), flight.CANCELLED, 0.0, 1.0),
        flight.FlightCall(3, 103.0, 0xBEEF, 5, None, flight.RETURNED, 0.0, 1 / 3),
        flight.FlightCall(4, 104.0, 9, 6, CallName("", {}, "spawn"), flight.RETURNED, 0.0, 1.0),
    ]
    died = observed.EventRow(number=1, at=0.0, kind="Died", name="", text="gone")
    records = {
        "5": (flight.RaisedError(at=102.0, number=1, text="ValueError: x"),),
        "3": tuple(
            flight.SeenEvent(event=structs.replace(died, number=number, at=at, name=name, incarnation=incarnation))
            for number, at, name, incarnation in (
                (1, 110.0, "inner[n=0]", 0),
                (2, 100.0, "a[n=9]", 0),
                (3, 101.0, "b[n=0]", 1),
            )
        ),
    }
    flights = {
        one.proc.id: flight.Flight(one, 0.0, tuple(own) if one.proc.id == "5" else (), records.get(one.proc.id, ()))
        for one in heads
    }
    events = traced(observe.RunRecords(Path("/none"), flights, {}, False), 100.0, 110.0)
    assert [name for _, name in sorted(names_of(events, "process_name").items())] == [
        f"{name} (pid 7)" for name in ("controller", "a[n=9]", "b[n=0]", "b[n=0]", "b[n=1]")
    ]
    sorts = [one["args"]["sort_index"] for one in events if one["name"] == "process_sort_index"]
    assert sorts == [1, 2, 3, 4, 5]
    assert names_of(events, "thread_name") == {(5, 1): "m[n=0]", (5, 2): "other[n=0]", (5, 3): "agent"}
    assert [one["args"]["sort_index"] for one in events if one["name"] == "thread_sort_index"] == [1, 2, 3]
    slices = [one for one in events if one["ph"] == "X"]
    assert [(one["name"], one["cat"], one["tid"], one["ts"], one["dur"]) for one in slices] == [
        ("step", "call", 1, 1.25e6, 0.75e6),
        ("load", "call", 2, 1.5e6, 1e6),
        ("a call", "agent", 3, 3e6, 333_333.333),
        ("spawn", "agent", 3, 4e6, 1e6),
    ]
    caller = {"caller": "controller", "waited_us": 0.0}
    assert [one["args"] for one in slices] == [
        {"outcome": "raised", "caller": "controller", "id": "", "waited_us": 2.5e5, "error": "ValueError: x"},
        {"outcome": "cancelled", **caller, "id": "9.4@5"},
        {"outcome": "returned", "caller": "process beef", "id": "beef.5@5", "waited_us": 0.0},
        {"outcome": "returned", **caller, "id": "9.6@5"},
    ]
    told = [(one["name"], one["ts"], one["pid"], one["tid"], one["args"]) for one in events if one["ph"] == "i"]
    assert told == [
        ("Died a[n=9]", 0.0, 2, 0, {"text": "gone", "incarnation": 0}),
        ("Died b[n=0]", 1e6, 4, 0, {"text": "gone", "incarnation": 1}),
        ("Died inner[n=0]", 10e6, 3, 0, {"text": "gone", "incarnation": 0}),
    ]


def test_last_sign_of_life_is_the_newest_of_any_kind() -> None:
    """A start, an end, a call that waits, lasts or ends, an event, and another record."""
    timeline = observe.Timeline()
    record = records_of([call(1, 100.0, 4.0, 2.0), call(2, 100.0, 1.0, 3.0)])
    timeline.take(record, 0.0)
    assert timeline.last_at == 104.0
    event = observed.EventRow(number=1, at=105.0, kind="Died", name="procs[n=0]")
    timeline.take(records_of([], event), 0.0)
    assert timeline.last_at == 105.0
    one = record.flights["5"]
    for at, newer in (
        (106.0, structs.replace(one, records=(flight.RaisedError(at=106.0, number=1, text=""),))),
        (107.0, structs.replace(one, ended_at=107.0)),
        (108.0, structs.replace(one, head=structs.replace(one.head, started_at=108.0))),
    ):
        timeline.take(structs.replace(record, flights={"5": newer}), 0.0)
        assert timeline.last_at == at
    timeline.take(record, 0.0)
    assert timeline.last_at == 108.0


def test_calls_before_the_time_that_is_wanted_are_not_kept() -> None:
    """TM-2: unless they run, or end after it; those that were overwritten are counted from the first that is kept."""
    timeline = observe.Timeline()
    calls = [
        call(1, 90.0, 0.0, 9.0),
        call(2, 90.0, 0.0, 10.0),
        call(3, 90.0, 0.0, 0.0, flight.RUNNING),
        call(7, 100.0, 0.0, 1.0),
        call(9, 101.0, 0.0, 1.0),
    ]
    timeline.take(records_of(calls), 100.0)
    assert timeline.count == 4
    assert (timeline.missing(100.0), timeline.missing(0.0), timeline.missing(200.0)) == (1, 4, 0)
    found = b"".join(observe.trace_bytes(timeline, 100.0, 110.0))
    assert json.loads(found)["otherData"] == {"since": 100.0, "until": 110.0, "missing": 1}


@pytest.mark.daily
@pytest.mark.real
async def test_calls_of_a_live_run_are_traced(tmp_path: Path) -> None:
    """Q10: one that ran before, one that comes meanwhile, one that raises; each at its coordinate."""
    file = tmp_path / "run.json"
    expected = {
        ("procs[gpus=0]", "wait", "running", "controller"),
        ("procs[gpus=1]", "wait", "running", "controller"),
        ("procs[gpus=1]", "fail", "raised", "controller"),
    }
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        waiters = await procs.spawn("waiters", Waiter)
        others = await procs.spawn("others", Waiter)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(waiters.wait.call)

            async def fail_again() -> None:
                while True:
                    with pytest.raises(ValueError, match="no such shard"):
                        await others.slice(gpus=1).fail.call_one()
                    await trio.sleep(0.1)

            nursery.start_soon(fail_again)
            found, errors = set[tuple[str, ...]](), set[str]()
            while not (found >= expected and errors):
                assert await trio.to_thread.run_sync(run, ["trace", str(file), "--seconds", "0.3"]) == 0
                events = checked(file.read_bytes())
                places = names_of(events, "process_name")
                found = {
                    (places[one["pid"], 0].split(" ")[0], one["name"], one["args"]["outcome"], one["args"]["caller"])
                    for one in events
                    if one["ph"] == "X" and one["cat"] == "call"
                }
                errors = {one["args"]["error"] for one in events if one["name"] == "fail" and "error" in one["args"]}
            nursery.cancel_scope.cancel()
    assert [name.split(" ")[0] for name in places.values()] == ["controller", "procs[gpus=0]", "procs[gpus=1]"]
    assert found - expected <= {("procs[gpus=1]", "fail", "running", "controller")}  # was read while it ran
    assert errors == {"ValueError: no such shard"}


@pytest.mark.real
def test_last_seconds_of_a_dead_run_are_traced(tmp_path: Path) -> None:
    """Q10: what ran when everything was killed runs up to the end."""
    file = tmp_path / "run.json"
    with victim("slow") as one:
        for pid in (one.pid, *one.workers):
            os.kill(pid, signal.SIGSTOP)
        for pid in (*one.workers, one.pid):
            os.kill(pid, signal.SIGKILL)
        one.wait()
        assert run(["trace", str(file), "--seconds", "1000"]) == 0
    events = checked(file.read_bytes())
    assert {one["args"]["name"].split(" ")[0] for one in events if one["name"] == "process_name"} == {
        "controller",
        *(f"procs[gpus={rank}]" for rank in range(4)),
    }
    ranks = [one["args"]["outcome"] for one in events if one["name"] == "rank"]
    assert ranks == ["returned"] * 4


def test_trace_of_no_run_says_so(tmp_path: Path) -> None:
    assert run(["trace", "--run", str(tmp_path)]) == 3
