"""The culprit of a run and its state at its end, from flight records that are made here (Q7)."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from msgspec import structs
from tests.rows import rows

from trimesh import limits
from trimesh._wire import flight, observed
from trimesh._wire.flight import CANCELLED, RAISED, RETURNED, RUNNING, CallName
from trimesh.observe import Cause, RunRecords
from trimesh.observe.post_mortem import examine

ROOT = 0xC0
"""Id of the controller, which makes the calls."""

START, END = 1_000.0, 1_100.0
"""Unix times of a run: the controller reports for the last time at its end."""

_numbers = itertools.count(1)


def named(rank: int, endpoint: str = "step", mesh: str = "workers") -> CallName:
    return CallName(mesh, {"gpus": rank}, endpoint)


def ran(name: CallName | None, outcome: int = RUNNING, *, at: float = 1_050.0, call: int = 0) -> flight.FlightCall:
    """Return a call, which is of no other member's unless it has a number of the controller's."""
    number = next(_numbers)
    return flight.FlightCall(number, at, ROOT, call or 1_000 + number, name, outcome)


def row_of(rank: int, **fields: Any) -> observed.ProcRow:
    name = f"procs[gpus={rank}]"
    given = {"id": f"{rank + 1:x}", "parent": "c0", "name": name, "mesh": "procs", "point": {"gpus": rank}}
    return observed.ProcRow(**{**given, "pid": 10 + rank, **fields})


def view(rank: int, at: float = END, *, every: float = 1.0, memory: int = 0, **tables: Any) -> flight.SeenView:
    proc = row_of(rank, memory_bytes=memory << 20)
    return flight.SeenView(at=at, trio_at=0.0, every=every, view=observed.ProcView(proc=proc, **tables))


def rank_of(
    rank: int, *records: flight.Record, calls: Any = (), ended_at: float = 0.0, incarnation: int = 0
) -> flight.Flight:
    head = flight.FlightHead(proc=row_of(rank, incarnation=incarnation), started_at=START + 1 + rank)
    return flight.Flight(head, ended_at, tuple(calls), records or (view(rank),))


def event(at: float, kind: str, name: str, text: str = "", stack: str = "", incarnation: int = 0) -> flight.SeenEvent:
    row = observed.EventRow(number=1, at=at, kind=kind, name=name, text=text, incarnation=incarnation)
    return flight.SeenEvent(event=row, stack=stack)


def run_of(
    *ranks: flight.Flight, events: Any = (), left: str | None = None, running: bool = False, calls: Any = ()
) -> RunRecords:
    job = observed.JobRow(id="c0", pid=7, host="here")
    proc = observed.ProcRow(id="c0", pid=7)
    seen = flight.SeenView(at=END, trio_at=0.0, every=1.0, view=observed.ProcView(proc=proc, job=job, calls=calls))
    last = [] if left is None else [flight.LeftBlock(at=END, error=left, line='File "main.py", line 3 in main')]
    head = flight.FlightHead(proc=proc, job=job, started_at=START)
    root = flight.Flight(head, END if left is not None else 0.0, (), (seen, *events, *last))
    flights = {"c0": root, **{one.head.proc.id: one for one in ranks}}
    return RunRecords(Path("/records/1-7-c0"), flights, {}, running)


def cause(*ranks: flight.Flight, **more: Any) -> Cause:
    return examine(run_of(*ranks, **more)).cause


def waits(call_id: str, proc: str, *others: str, state: str = "running", age: float = 50.0) -> observed.CallRow:
    name = f"{call_id}[gpus=0]"
    waiting = tuple(observed.WaitRow(kind="call", call=other) for other in others)
    return observed.CallRow(
        id=call_id, proc=proc, name=name, mesh=call_id, endpoint="get", state=state, age=age, waits=waiting, at="line 9"
    )


# ---- deaths and errors -----------------------------------------------------------------------------------------------

KILLED = "ProcDied: procs[gpus=1] was killed by SIGKILL (pid 7); last output: out of memory"


def test_first_death_that_was_not_mended_is_the_culprit():
    """CU-1: with what the process did, its memory, how often it had died, and its last output."""
    events = [
        event(1_010.0, "Died", "procs[gpus=0]", "ProcDied: procs[gpus=0] was killed by SIGTERM (pid 1)"),
        event(1_011.0, "Restarted", "procs[gpus=0]"),
        event(1_020.0, "Died", "procs[gpus=1]", "ProcDied: before"),
        event(1_021.0, "Restarted", "procs[gpus=1]", incarnation=1),
        event(1_030.0, "Died", "procs[gpus=1]", KILLED, incarnation=1),
        event(1_031.0, "Died", "procs[gpus=2]", "ProcDied: later"),
    ]
    calls = [ran(named(1, "load")), ran(named(1)), ran(named(1, "ended"), RETURNED), ran(CallName("", {}, "spawn"))]
    before = rank_of(1, view(1, memory=100), calls=[ran(named(1, "before"))])
    before = structs.replace(before, head=structs.replace(before.head, proc=row_of(1, id="old")))
    ranks = [rank_of(0, view(0, memory=100)), before, rank_of(2, view(2, memory=90))]
    found = cause(*ranks, rank_of(1, view(1, memory=500), calls=calls, incarnation=1), events=events)
    assert (found.kind, found.name, found.call, found.at) == ("died", "procs[gpus=1]", "workers[gpus=1].step", "")
    assert found.text == (
        "procs[gpus=1] has died first: it was killed by SIGKILL (pid 7), while it ran workers[gpus=1].step; "
        "procs[gpus=1] had 500 MiB of memory, where others of its mesh had 100 MiB; it had died 1 times before; "
        "last output: out of memory"
    )


def test_member_that_was_given_up_or_has_failed_is_the_culprit():
    """A death goes before a failure of an actor, which may follow from it."""
    failed = event(1_010.0, "Failed", "workers[gpus=2]", "KeyError: 'x'")
    gone = event(1_020.0, "GaveUp", "procs[gpus=0]", "5 restarts in 60 s")
    found = cause(rank_of(0), events=[failed, gone])
    assert (found.name, found.text) == ("procs[gpus=0]", "procs[gpus=0] has died first: 5 restarts in 60 s")
    found = cause(rank_of(0), events=[event(1_005.0, "Started", "procs[gpus=0]"), failed])
    assert (found.kind, found.name, found.text) == (
        "died",
        "workers[gpus=2]",
        "workers[gpus=2] has failed: KeyError: 'x'",
    )


def test_crash_has_the_line_of_its_stack():
    """In place of the last output, which is that stack."""
    frames = 'File "/home/me/load.py", line 12 in read; File "/home/me/train.py", line 3 in main'
    text = f"ProcDied: procs[gpus=0] was killed by SIGSEGV (pid 9); last output: Fatal Python error: Fault; {frames}"
    found = cause(rank_of(0), events=[event(1_010.0, "Died", "procs[gpus=0]", text)])
    assert found.text == "procs[gpus=0] has died first: it was killed by SIGSEGV (pid 9)"
    assert found.at == 'File "/home/me/load.py", line 12 in read'
    text = f"ProcDied: it has gone; last output: see {frames}"
    found = cause(rank_of(0), events=[event(1_010.0, "Died", "procs[gpus=0]", text)])
    assert (found.text, found.at) == (f"procs[gpus=0] has died first: it has gone; last output: see {frames}", "")


def test_deaths_in_the_last_second_of_a_killed_run_belong_to_its_end():
    """AP-3: not those before it, nor those of a run that lives, or has raised its error."""
    at_end = event(END - 1.0, "Died", "procs[gpus=0]", "ProcDied: late")
    before = event(END - 1.5, "Died", "procs[gpus=0]", "ProcDied: late")
    assert examine(run_of(rank_of(0), events=[at_end])).procs[0].state == "cut off"
    for found in (
        examine(run_of(rank_of(0), events=[before])),
        examine(run_of(rank_of(0), events=[at_end], running=True)),
        examine(run_of(rank_of(0), events=[at_end], left="ProcDied: late")),
    ):
        assert (found.cause.kind, found.cause.name, found.procs[0].state) == ("died", "procs[gpus=0]", "dead")
    found = examine(run_of(rank_of(0), events=[at_end]))
    assert (found.cause.kind, [one.kind for one in found.events]) == ("none", ["Died"])


def test_call_that_raised_the_error_first_is_the_culprit():
    """Its callers raise the same error after it; without such a call, the program has raised it."""
    calls = [ran(named(1, "read"), RAISED), ran(named(1, "load"), RAISED)]
    raised = [
        flight.RaisedError(at=1_049.0, number=calls[0].number, text="KeyError: 'other'", line="line 1"),
        flight.RaisedError(at=1_050.1, number=calls[1].number, text="ValueError: no such shard", line="line 2"),
    ]
    outer = ran(named(0, "run"), RAISED)
    around = flight.RaisedError(at=1_050.2, number=outer.number, text="ValueError: no such shard", line="line 3")
    ranks = [rank_of(0, around, view(0), calls=[outer]), rank_of(1, *raised, view(1), calls=calls)]
    for left in ("ValueError: no such shard", "ExceptionGroup: 1 of 2: ValueError: no such shard", "ValueError: no"):
        found = cause(*ranks, left=left)
        assert (found.kind, found.name, found.call) == ("raised", "procs[gpus=1]", "workers[gpus=1].load")
        assert (found.at, found.text) == (
            "line 2",
            "workers[gpus=1].load raised ValueError: no such shard, which left the outermost block",
        )
    found = cause(*ranks, left="OSError: disk")
    assert (found.kind, found.name, found.call, found.text, found.at) == (
        "raised",
        "controller",
        "",
        "the outermost block raised OSError: disk",
        'File "main.py", line 3 in main',
    )


# ---- runs that hung --------------------------------------------------------------------------------------------------


def test_calls_that_waited_for_each_other_are_the_culprit():
    calls = (waits("c", "1", "a"), waits("a", "1", "b"), waits("b", "1", "a", age=60.0))
    found = cause(rank_of(0, view(0, calls=calls)))
    assert (found.kind, found.name, found.call, found.at) == ("deadlock", "b[gpus=0]", "b[gpus=0].get", "line 9")
    assert found.text == "these waited for each other: b[gpus=0].get -> a[gpus=0].get -> b[gpus=0].get"


def test_process_whose_loop_did_not_run_is_the_culprit():
    """AP-2: of several the one with the oldest call, by the newest stack that was reported of it."""
    stacks = ('File "a.py", line 1 in old', 'File "a.py", line 2 in step\nFile "main.py", line 9 in main', "File x")
    events = [
        event(1_060.0, "Stalled", "procs[gpus=2]", stack=stacks[0]),
        event(1_070.0, "Stalled", "procs[gpus=2]", stack=stacks[1]),
        event(1_071.0, "Stalled", "procs[gpus=2]"),
        event(1_072.0, "Stalled", "procs[gpus=1]", stack=stacks[2]),
    ]
    silent = [
        rank_of(1, view(1, END - 5.0), calls=[]),
        rank_of(2, view(2, END - 6.0), calls=[ran(named(2), at=END - 50.0)]),
        rank_of(3, view(3, END - 9.0), calls=[ran(named(3), at=END - 20.0)]),
    ]
    found = examine(run_of(rank_of(0), *silent, events=events))
    assert (found.cause.kind, found.cause.name, found.cause.call) == ("stuck", "procs[gpus=2]", "workers[gpus=2].step")
    assert (found.cause.at, found.cause.stack) == ('File "a.py", line 2 in step', stacks[1])
    assert found.cause.text == (
        "the Trio loop of procs[gpus=2] (pid 12) did not run, in workers[gpus=2].step; "
        "nor did those of procs[gpus=1], procs[gpus=3]"
    )
    assert [(one.name, one.state) for one in found.procs] == [
        *((f"procs[gpus={rank}]", "stuck") for rank in (1, 2, 3)),
        ("controller", "cut off"),
        ("procs[gpus=0]", "cut off"),
    ]
    found = examine(run_of(rank_of(0), silent[0]))
    assert found.cause.text == "the Trio loop of procs[gpus=1] (pid 11) did not run"
    assert (found.cause.call, found.cause.at) == ("", "")


def test_process_that_was_silent_for_as_long_as_a_loop_may_stall_computed():
    """AP-2, CU-4: it did not run, and is no culprit."""
    found = examine(
        run_of(rank_of(0, view(0, END - 4.9)), rank_of(1, view(1, END - 2.0)), rank_of(2, view(2, 1_004.0, every=60)))
    )
    assert found.cause.kind == "none"
    assert {one.name: (one.state, round(one.silent_seconds, 1)) for one in found.procs if one.mesh} == {
        "procs[gpus=0]": ("stuck", 4.9),
        "procs[gpus=1]": ("cut off", 2.0),
        "procs[gpus=2]": ("cut off", 96.0),
    }


def called(few: int, many: int, outcome: int, *, call: int = 7, at: float = 1_050.0) -> dict[int, flight.FlightCall]:
    """Return a call to `few` members that runs and `many` that have ended, by rank."""
    return {rank: ran(named(rank), RUNNING if rank < few else outcome, call=call, at=at) for rank in range(few + many)}


@rows(
    "few, many, text",
    [
        (1, 3, "workers[gpus=0] has not come out of workers.step, as 3 others have"),
        (2, 2, "workers[gpus=0], workers[gpus=1] has not come out of workers.step, as 2 others have"),
        (3, 1, "workers[gpus=3] has come out of workers.step, in which 3 others still are"),
        (
            5,
            6,
            "workers[gpus=0], workers[gpus=1], workers[gpus=2], workers[gpus=3] and 1 more has not come out of "
            "workers.step, as 6 others have",
        ),
    ],
)
def test_few_members_that_a_call_has_left_behind_are_the_culprit(few: int, many: int, text: str):
    """CU-2: the few that run, or the few that do not; whatever the others of a process have run besides."""
    other = structs.replace(ran(named(9, "other"), RETURNED, call=7), caller=1)
    for outcome in (RETURNED, CANCELLED):
        ranks = [
            rank_of(rank, calls=[other, ran(CallName("", {}, "x"), RETURNED if rank else RUNNING, at=1.0, call=8), one])
            for rank, one in called(few, many, outcome).items()
        ]
        found = cause(*ranks)
        assert (found.kind, found.call, found.text) == ("left behind", "workers.step", text)
        assert found.name == text.partition(" ")[0].rstrip(",")


def test_of_calls_that_left_members_behind_the_oldest_counts():
    """CU-2, CU-4: if it is as old as a loop may stall; its line is that of the last report."""
    first, second = called(1, 2, RETURNED, at=END - 10.0), called(1, 2, RETURNED, call=8, at=END - 20.0)
    row = observed.CallRow(
        id="c0.8@1",
        proc="1",
        name="workers[gpus=0]",
        mesh="late",
        endpoint="load",
        state="running",
        age=19.0,
        at="line 4",
    )
    for order in ((first, second), (second, first)):
        ranks = [
            rank_of(rank, view(rank, END - 1.0, calls=(row,) if rank == 0 else ()), calls=[one[rank] for one in order])
            for rank in range(3)
        ]
        found = cause(*ranks)
        assert (found.kind, found.call, found.at) == ("left behind", "late.load", "line 4")
    young = [rank_of(rank, calls=[one]) for rank, one in called(1, 2, RETURNED, at=END - 4.9).items()]
    assert cause(*young).kind == "none"
    each = [rank_of(rank, calls=[ran(named(rank), outcome)]) for rank, outcome in enumerate((RUNNING, RETURNED))]
    assert cause(*each).kind == "waiting"


@rows(
    "sizes, culprit",
    [((100, 301, 100), 1), ((100, 300, 100), None), ((1, 65, 1), None), ((1, 66, 1), 1), ((1, 900), None)],
)
def test_process_that_had_far_more_memory_than_the_others_is_the_culprit(sizes: tuple[int, ...], culprit: int | None):
    """Three times as much, and 64 MiB more, in its last report; of two none is the usual one."""
    found = cause(*(rank_of(rank, view(rank, memory=999), view(rank, memory=size)) for rank, size in enumerate(sizes)))
    if culprit is None:
        assert found.kind == "none"
    else:
        assert (found.kind, found.name) == ("memory", f"procs[gpus={culprit}]")
        assert found.text == (
            f"procs[gpus={culprit}] had {sizes[culprit]} MiB of memory, where others of its mesh had {sizes[0]} MiB"
        )


def test_reader_that_kept_a_version_is_the_culprit():
    """If a `publish` waited for it."""
    pins = (observed.PinRow(proc="2", version=4, seconds=9.0),)
    row = observed.PublicationRow(proc="1", number=1, member="t[gpus=0]", latest=9, slots=3, pins=pins, is_waiting=True)
    call = observed.CallRow(
        id="x", proc="2", name="r[gpus=1]", mesh="r", endpoint="keep", state="running", age=2.0, at="line 7"
    )
    reader = rank_of(1, view(1, calls=(call,)))
    found = cause(rank_of(0, view(0, publications=(row,))), reader)
    assert (found.kind, found.name, found.call, found.at) == ("pinned", "procs[gpus=1]", "r[gpus=1].keep", "line 7")
    assert found.text == "procs[gpus=1] kept version 4 of t[gpus=0] pinned; a publish waited 9.0 s for it"
    found = cause(rank_of(0, view(0, publications=(row,))), rank_of(1))
    assert (found.kind, found.call, found.at) == ("pinned", "", "")
    found = cause(rank_of(0, view(0, publications=(structs.replace(row, is_waiting=False),))), reader)
    assert found.kind == "none"


def test_versions_that_no_process_read_go_before_a_call_that_only_runs():
    """CU-3: after one that others wait for."""
    rows_of = [
        observed.PublicationRow(proc="1", number=number, member=name, latest=40, slots=3, unread=40, unread_seconds=age)
        for number, name, age in ((1, "a[gpus=0]", 40.0), (2, "b[gpus=0]", 50.0))
    ]
    runs = waits("store", "1")
    unread = "b[gpus=0] published 40 versions in 50.0 s, and no process has read one of them"
    for calls in ((), (runs,)):
        found = cause(rank_of(0, view(0, publications=tuple(rows_of), calls=calls)))
        assert (found.kind, found.name, found.text) == ("unread", "b[gpus=0]", unread)
    calls = (runs, waits("a", "1", "store"), waits("b", "1", "a"), waits("s", "1", state="sending", age=99.0))
    found = cause(rank_of(0, view(0, publications=tuple(rows_of), calls=calls)))
    assert (found.kind, found.name, found.call, found.at) == ("waiting", "store[gpus=0]", "store[gpus=0].get", "line 9")
    assert found.text == "store[gpus=0].get was running for 50.0 s, and 2 calls waited for it"
    found = cause(rank_of(0, view(0, calls=(runs, waits("s", "1", state="sending", age=99.0)))))
    assert (found.kind, found.text) == ("waiting", "store[gpus=0].get was running for 50.0 s")


def test_run_without_a_culprit_names_its_oldest_call():
    """CU-4: a call that is younger than a loop may stall; whether the run was killed, interrupted, or goes on."""
    calls = (waits("a", "1", age=2.0), waits("b", "1", age=4.9), waits("c", "1", age=1.0))
    one = rank_of(0, view(0, calls=calls))
    doing = "the oldest call, b[gpus=0].get, was running for 4.9 s"
    assert cause(one) == Cause(kind="none", text=f"it was ended from outside; no member had failed, and {doing}")
    assert cause(rank_of(0)).text.endswith(" had failed, and no call was under way")
    assert cause(one, running=True) == Cause(kind="none", text=f"no member has failed; {doing}")
    assert cause(one, left="KeyboardInterrupt: ") == Cause(kind="stopped", text=f"it was stopped by Ctrl-C; {doing}")
    old = rank_of(0, view(0, calls=(waits("b", "1", age=5.0),)))
    assert cause(old).kind == "waiting"


# ---- the state at the end --------------------------------------------------------------------------------------------


def test_processes_and_times_of_a_run():
    """AP-1: each by its last sign of life; those that failed come first, the controller before others alike."""
    calls = [ran(CallName("", {}, "spawn"), at=1_010.0), *(ran(named(1), RETURNED, at=1_020.0 + at) for at in range(6))]
    calls[2:4] = [ran(None, RAISED, at=1_030.0), structs.replace(ran(named(1), CANCELLED), call=0, caller=0xBEEF)]
    raised = flight.RaisedError(at=1_031.0, number=calls[2].number, text="KeyError: 'x'")
    metric = observed.MetricRow(proc="2", name="w", metric="loss", value=0.5)
    ranks = [
        rank_of(3, view(3, 1_040.0), ended_at=1_041.0),
        rank_of(
            1,
            view(1, 1_090.0, every=10, memory=3),
            view(1, 1_095.0, every=10, memory=5, metrics=(metric,)),
            raised,
            calls=calls,
        ),
        rank_of(0, event(1_042.0, "Started", "inner[gpus=0]"), calls=[ran(named(0), RETURNED, at=1_043.0)]),
    ]
    records = run_of(*ranks, events=[event(1_050.0, "Died", "procs[gpus=0]"), event(1_001.0, "Started", "procs")])
    found = examine(records)
    assert (found.folder, found.ended, found.error, found.unreadable) == ("/records/1-7-c0", "killed", "", {})
    assert found.job is not None
    assert (found.job.pid, found.begun_at, found.last_at) == (7, START, END)
    assert [one.at for one in found.events] == [1_001.0, 1_042.0, 1_050.0]
    assert [(one.name, one.state, one.last_at, one.silent_seconds) for one in found.procs] == [
        ("procs[gpus=0]", "dead", 1_043.0, END - 1_001.0),
        ("controller", "cut off", END, 0.0),
        ("procs[gpus=1]", "cut off", 1_095.0, 5.0),
        ("procs[gpus=3]", "ended", 1_041.0, END - 1_041.0),
    ]
    one = found.procs[2]
    assert (one.id, one.parent, one.mesh, one.point, one.pid, one.began_at) == (
        "2",
        "c0",
        "procs",
        {"gpus": 1},
        11,
        1_002.0,
    )
    assert (one.memory_bytes >> 20, one.metrics, one.record) == (5, (metric,), "/records/1-7-c0/2")
    assert [(call.name, call.outcome, call.caller, call.error) for call in one.calls] == [
        ("spawn (of the runtime)", "running", "controller", ""),
        ("a call", "raised", "controller", "KeyError: 'x'"),
        ("workers[gpus=1].step", "cancelled", "process beef", ""),
        *(("workers[gpus=1].step", "returned", "controller", ""),) * 3,
    ]
    assert (one.calls[1].id, one.calls[2].id) == (f"c0.{calls[2].call}@2", "")
    assert len(one.calls) == 1 + limits.AUTOPSY_CALLS


def test_calls_at_the_end_are_those_that_ran():
    """AP-1: in the last report and after it, not those that had ended since, nor those of a process that has."""
    known, late, over = (
        ran(named(1, name), outcome, at=1_080.0)
        for name, outcome in (("known", RUNNING), ("late", RUNNING), ("over", RETURNED))
    )
    cast = structs.replace(ran(named(1, "cast"), at=1_099.0), call=0)
    seen = tuple(
        observed.CallRow(
            id=f"c0.{one.call}@2", proc="2", name="workers[gpus=1]", mesh="workers", endpoint=name, age=10.0
        )
        for one, name in ((known, "known"), (over, "over"))
    )
    published = (observed.PublicationRow(proc="2", number=1),)
    more = [known, late, over, cast, ran(None), ran(CallName("", {}, "spawn"))]
    living = rank_of(1, view(1, END - 1.0, calls=seen, publications=published), calls=more)
    found = examine(run_of(living)).snapshot
    assert [(one.endpoint, one.age, one.state) for one in found.calls] == [
        ("late", 20.0, "running"),
        ("known", 11.0, "sent"),
        ("cast", 1.0, "running"),
    ]
    assert found.taken_at == END
    row = found.calls[2]
    assert (row.id, row.proc, row.name) == (f"broadcast.{cast.number}@2", "2", "workers[gpus=1]")
    assert (row.mesh, row.point, row.caller_proc) == ("workers", {"gpus": 1}, "c0")
    assert len(found.publications) == 1
    ended = examine(run_of(structs.replace(living, ended_at=END))).snapshot
    assert (ended.calls, ended.publications) == ((), ())
    assert [(one.name, one.state) for one in ended.procs] == [("procs[gpus=1]", "exiting"), ("controller", "running")]
    stopped = examine(run_of(structs.replace(living, ended_at=END), left="KeyboardInterrupt: ")).snapshot
    assert {one.endpoint for one in stopped.calls} == {"late", "known", "over", "cast"}


def test_state_of_a_run_that_raised_or_lives():
    for ended, more in (("running", {"running": True}), ("error", {"left": "ValueError: x"}), ("killed", {})):
        found = examine(run_of(rank_of(0), **more))
        assert (found.ended, found.error) == (ended, more.get("left", ""))
    assert {one.state for one in examine(run_of(rank_of(0), running=True)).procs} == {"running"}
    records = run_of(rank_of(0))
    without_root = structs.replace(records, flights={"1": records.flights["1"]}, unreadable={"c0": "gone"})
    found = examine(without_root)
    assert (found.job, found.unreadable, found.last_at) == (None, {"c0": "gone"}, END)
