"""What the page is told of a run: bounded, failures first, and every text harmless."""

from __future__ import annotations

import json

import pytest
from tests.dashboard.rigged import RiggedSource, WaitingSource

pytest.importorskip("cyclopts")

from trimesh import limits
from trimesh._wire import flight
from trimesh._wire.observed import ActorRow, CallRow, EndpointRow, EventRow, HostRow, ProcRow, ProcView, WaitRow
from trimesh.cli.dashboard.board import grids, see, wait_picture, with_end
from trimesh.cli.dashboard.detail import detail, page_json
from trimesh.cli.dashboard.hosts import host_table
from trimesh.cli.dashboard.problems import Problem, problems
from trimesh.cli.dashboard.timeline import TaskBar, latencies, one_call, places, task_stream
from trimesh.observe import Cause, RunSnapshot, activity_between
from trimesh.observe.run_snapshot import merge

HOSTILE = "<img src=x onerror=alert(1)>\x1b]0;owned\x07\u202e</script>"


def proc(rank: int, state: str = "running", **fields: object) -> ProcRow:
    given: dict[str, object] = {"memory_bytes": 100 << 20, **fields}
    return ProcRow(  # pyright: ignore[reportCallIssue]
        id=f"{rank + 1}",
        parent="0",
        name=f"procs[gpus={rank}]",
        mesh="procs",
        point={"gpus": rank},
        state=state,
        **given,
    )


def call(rank: int, endpoint: str = "step", state: str = "running", **fields: object) -> CallRow:
    given: dict[str, object] = {"id": f"0.7@{rank + 1}", "age": 9.0, **fields}
    return CallRow(  # pyright: ignore[reportCallIssue]
        proc=f"{rank + 1}", name=f"workers[gpus={rank}]", mesh="workers", endpoint=endpoint, state=state, **given
    )


def workers(count: int) -> tuple[ActorRow, ...]:
    return tuple(
        ActorRow(proc=f"{rank + 1}", name=f"workers[gpus={rank}]", mesh="workers", point={"gpus": rank})
        for rank in range(count)
    )


def kinds(found: list[Problem]) -> list[str]:
    return [one.kind for one in found]


def test_four_thousand_ranks_are_a_letter_each():
    """DX-2: in order, with what is wrong where it is; small enough for a browser each second."""
    source = RiggedSource()
    earlier, later = source.snapshot(), source.snapshot()
    seen = see(later, earlier)
    data = page_json(seen.board)
    [trainers] = [one for one in seen.placed if one.grid.name == "trainers"]
    assert trainers.grid.sizes == (512, 8)
    assert len(trainers.grid.letters) == 4096
    assert {at: letter for at, letter in enumerate(trainers.grid.letters) if letter != "r"} == {
        77: "S",
        78: "S",
        300: "L",
        1234: "D",
        2222: "T",
    }
    assert trainers.names[77] == "trainers[hosts=9,gpus=5]"
    assert trainers.grid.rate[10] == 80
    assert len(data) < 250_000
    assert kinds(list(seen.board.problems)) == ["failure", "silent", "stopped", "stuck", "memory"]


def test_restarted_member_is_shown_as_it_is_now():
    rows = [proc(0, "dead"), proc(1), proc(0, incarnation=1)]
    seen = RunSnapshot(taken_at=0.0, procs=tuple(rows))
    [placed], _ = grids(activity_between(seen), (), ())
    assert placed.grid.letters == "rr"


@pytest.mark.parametrize(
    "points", [[{"a": 0}, {"a": 10**9}], [{"a": 0}, {"b": 0}], [{"a": -1}, {"a": 0}], [{}, {"a": 1}]]
)
def test_mesh_whose_points_are_no_extent_is_a_row(points: list[dict[str, int]]):
    """GD-2: whatever a process says of itself."""
    rows = tuple(ProcRow(id=str(at), mesh="m", name=f"m{at}", point=point) for at, point in enumerate(points))
    [placed], _ = grids(activity_between(RunSnapshot(taken_at=0.0, procs=rows)), (), ())
    assert (placed.grid.letters, placed.grid.sizes, placed.names) == ("rr", (2,), ("m0", "m1"))


def test_actor_is_as_bad_as_its_process():
    """GD-1: and says what it does where that is well."""
    actors = (
        ActorRow(proc="1", name="a0", mesh="a", point={"g": 0}, queued=2, running=1),
        ActorRow(proc="2", name="a1", mesh="a", point={"g": 1}, running=1),
        ActorRow(proc="3", name="a2", mesh="a", point={"g": 2}),
        ActorRow(proc="4", name="a3", mesh="a", point={"g": 3}, running=1),
        ActorRow(proc="1", name="a4", mesh="a", point={"g": 4}, state="ended"),
    )
    procs = (proc(0), proc(1), proc(2), proc(3, "silent"))
    seen = RunSnapshot(taken_at=0.0, procs=procs, actors=actors)
    placed, _ = grids(activity_between(seen), actors, ())
    [letters] = [one.grid.letters for one in placed if one.grid.kind == "actors"]
    assert letters == "qbiLx"


def test_actor_mesh_is_on_the_mesh_of_its_processes():
    """GD-3: where most of its members are; the oldest call of each cell has its endpoint."""
    procs = (*(proc(rank) for rank in range(3)), ProcRow(id="9", parent="0", name="other", mesh="other"))
    rows = [ActorRow(proc=one, name=f"a[g={at}]", mesh="a", point={"g": at}) for at, one in enumerate("129")]
    calls = (call(0, "load", age=2.0), call(0, "step", id="0.8@1", age=9.25))
    seen = RunSnapshot(taken_at=0.0, procs=procs, actors=(*rows, *workers(2)), calls=calls)
    placed = {one.grid.name: one.grid for one in grids(activity_between(seen), seen.actors, calls)[0]}
    assert (placed["a"].on, placed["workers"].on, placed["procs"].on) == ("procs", "procs", "")
    assert (placed["workers"].oldest, placed["workers"].age) == (("step", ""), (9.2, 0.0))
    assert (placed["procs"].oldest, placed["other"].oldest) == (("step", "", ""), ())


def test_process_that_does_not_answer_keeps_what_was_last_seen():
    """GD-4: memory, actors; also for several snapshots."""
    before = RunSnapshot(taken_at=1.0, procs=(proc(0, cpu_seconds=3.0),), actors=workers(1))
    seen = see(before)
    for at in (2.0, 3.0):
        seen = see(RunSnapshot(taken_at=at, procs=(proc(0, "silent", memory_bytes=0),)), seen.snapshot)
        found = {one.grid.name: one.grid for one in seen.placed}
        assert (found["procs"].letters, found["procs"].memory, found["procs"].cpu) == ("L", (100,), ())
        assert found["workers"].letters == "L"


def test_sums_are_rates_between_two_snapshots():
    """Cores, ended calls and messages; none in the first snapshot, where nothing is known of them."""
    first, second = (
        RunSnapshot(
            taken_at=at,
            procs=(proc(0, cpu_seconds=at, gpu_percent=40, gpu_memory_bytes=7), proc(1)),
            endpoints=(EndpointRow(proc="1", name="a", endpoint="step", calls=int(at * 50), errors=3),),
        )
        for at in (10.0, 12.0)
    )
    sums = see(first).board.sums
    assert (sums.ended, sums.cpu, sums.messages, sums.errors) == (None, None, None, 3)
    seen = see(second, first)
    sums = seen.board.sums
    assert (sums.ended, sums.cpu, sums.messages, sums.gpu, sums.gpu_memory) == (50.0, 1.0, 0.0, 40, 7)
    assert seen.placed[0].grid.cpu == (100, 0)
    assert seen.placed[0].grid.gpu == (40, 0)


def test_calls_that_wait_for_each_other_are_marked_in_the_cells():
    """GD-1: of their actors and processes; a process that does not run keeps its own letter."""
    calls = tuple(
        call(rank, id=f"c{rank}", state="waiting", waits=(WaitRow(kind="call", call=f"c{(rank + 1) % 3}"),))
        for rank in range(3)
    )
    procs = (proc(0), proc(1), proc(2, "stopped"), proc(3))
    placed = see(RunSnapshot(taken_at=1.0, procs=procs, actors=workers(4), calls=calls)).placed
    assert {one.grid.name: one.grid.letters for one in placed} == {"procs": "WWTr", "workers": "WWTi"}


def test_host_has_figures_of_the_machine_and_of_its_processes():
    """HT-1, HT-2: rates by the clock of the host; processes by a column, problems first; no unknown column."""
    rows = [
        tuple(
            proc(rank, "silent" if rank == 2 else "running", host="ab"[rank // 2], cpu_seconds=1 + at * rank)
            for rank in range(4)
        )
        for at in (0, 1)
    ]
    first, second = (
        RunSnapshot(
            taken_at=at,
            procs=procs,
            hosts=(
                HostRow(name="a", at=7.0 + 2 * at, cpu_seconds=5.0 * at, received_bytes=8 * at, sent_bytes=4 * at),
                HostRow(name="b", agent="silent"),
            ),
        )
        for at, procs in enumerate(rows, 1)
    )
    table = host_table(see(second, see(first).snapshot), "cpu")
    names = [(one.machine.host.name, one.cpu, one.memory >> 20) for one in table.hosts]
    assert names == [("a", 1.0, 200), ("b", 5.0, 200)]
    machines = [(one.machine.cpu, one.machine.received, one.machine.sent) for one in table.hosts]
    assert machines == [(2.5, 4.0, 2.0), (None, None, None)]
    assert [one.machine.host.name for one in host_table(see(second), name="gpus=1").hosts] == ["a"]
    silent = (HostRow(name="a", agent="silent", state="silent", procs=2),)
    third = RunSnapshot(taken_at=3.0, procs=rows[1], hosts=silent)
    [one] = see(third, second).hosts  # GD-4
    assert (one.host.at, one.host.cpu_seconds, one.host.agent, one.host.procs) == (11.0, 10.0, "silent", 2)
    assert one.cpu is None
    assert [one.name for one in table.procs] == [f"procs[gpus={rank}]" for rank in (2, 3, 1, 0)]
    assert [one.host for one in host_table(see(second), "name", "gpus=3").procs] == ["b"]
    with pytest.raises(ValueError, match="must be one of memory, cpu"):
        host_table(see(second), "age")


def test_first_failure_comes_first_with_its_causes_and_a_restarted_one_last():
    """PQ-1: equal ones of several members are one line (PM-2), and a dead process that failed is not told twice."""
    events = (
        EventRow(number=1, at=5.0, kind="Died", name="procs[gpus=1]", mesh="procs", text="gone", is_failure=True),
        EventRow(
            number=2, at=6.0, kind="Died", name="procs[gpus=0]", mesh="procs", text="x", is_failure=True, causes=("c",)
        ),
        EventRow(number=3, at=7.0, kind="Died", name="procs[gpus=2]", mesh="procs", text="x", is_failure=True),
        EventRow(number=4, at=8.0, kind="Restarted", name="procs[gpus=1]", mesh="procs"),
    )
    failures = tuple(event for event in events if event.is_failure)
    seen = RunSnapshot(
        taken_at=9.0, procs=(proc(0, "dead"), proc(1), proc(2, "dead")), events=events, failures=failures
    )
    first, last = problems(seen)
    assert (first.kind, first.title, first.chain, first.when) == (
        "failure",
        "procs[gpus=0] and 1 more died",
        ("c",),
        6.0,
    )
    assert (last.kind, last.names, last.is_sure) == ("restarted", ("procs[gpus=1]",), False)


def died(number: int, name: str, at: float = 5.0, kind: str = "Died") -> EventRow:
    text = "ProcDied: procs[gpus=1] was killed" * (kind == "Died")
    mesh = name.partition("[")[0]
    return EventRow(number=number, at=at, kind=kind, name=name, mesh=mesh, text=text, is_failure=kind == "Died")


def test_death_of_a_process_is_one_problem_with_its_actors():
    """PQ-2: the actors report the error of their process."""
    events = tuple(died(at, name) for at, name in enumerate(("procs[gpus=1]", "a[gpus=1]", "b[gpus=1]"), 1))
    seen = RunSnapshot(taken_at=9.0, procs=(proc(0), proc(1, "dead")), events=events, failures=events)
    [one] = problems(seen)
    assert (one.names, one.count, one.parts) == (("procs[gpus=1]",), 1, ("a[gpus=1]", "b[gpus=1]"))


def test_restarted_member_is_a_problem_for_a_minute():
    """PQ-1: then it is in the events only."""
    names = ("procs[gpus=1]", "a[gpus=1]")
    deaths = tuple(died(at, name) for at, name in enumerate(names, 1))
    starts = tuple(died(at, name, at=6.0, kind="Restarted") for at, name in enumerate(names, 3))
    for later, kinds_then in ((limits.PAGE_RESOLVED_SECONDS, ["restarted"]), (limits.PAGE_RESOLVED_SECONDS + 1, [])):
        seen = RunSnapshot(
            taken_at=6.0 + later, procs=(proc(1, incarnation=1),), events=deaths + starts, failures=deaths
        )
        assert kinds(problems(seen)) == kinds_then
        assert len(see(seen).board.events) == 4


def test_call_that_has_not_ended_on_a_silent_process_is_not_a_second_problem():
    """PQ-4: it follows from the first one."""
    procs = (proc(1, "silent", stalled_seconds=9.0), *(proc(rank) for rank in range(2, 8)))
    seen = RunSnapshot(taken_at=9.0, procs=procs, actors=workers(8), calls=(call(1, called=8),))
    assert kinds(problems(seen)) == ["silent"]
    assert kinds(problems(RunSnapshot(taken_at=9.0, actors=workers(8), calls=(call(1, called=8),)))) == ["alone"]


def test_few_that_alone_are_in_a_call_and_few_that_alone_are_not():
    """PQ-3: a slow rank, and one that has left a collective."""
    slow = RunSnapshot(taken_at=0.0, actors=workers(8), calls=(call(5, at="line 3", called=8),))
    [one] = problems(slow)
    assert (one.kind, one.names, one.at, one.is_sure) == ("alone", ("workers[gpus=5]",), "line 3", False)
    left = RunSnapshot(
        taken_at=0.0, actors=workers(8), calls=tuple(call(rank, called=8) for rank in range(8) if rank != 1)
    )
    [one] = problems(left)
    assert (one.kind, one.names) == ("absent", ("workers[gpus=1]",))
    assert (
        problems(RunSnapshot(taken_at=0.0, actors=workers(8), calls=tuple(call(rank, called=8) for rank in range(8))))
        == []
    )
    young = tuple(call(rank, age=0.5, called=8) for rank in range(7))
    assert problems(RunSnapshot(taken_at=0.0, actors=workers(8), calls=young)) == []


def test_call_to_one_member_is_not_compared_with_members_that_were_not_called():
    """PQ-3: nor are calls to each member of its own, nor one whose caller is not known."""
    for called in (1, 0):
        assert problems(RunSnapshot(taken_at=0.0, actors=workers(8), calls=(call(5, called=called),))) == []
    each = tuple(call(rank, id=f"0.{rank}@{rank + 1}", called=1) for rank in range(7))
    assert problems(RunSnapshot(taken_at=0.0, actors=workers(8), calls=each)) == []


def test_call_to_a_slice_is_compared_with_the_members_of_the_slice():
    """PQ-3: four of eight were called, and one is left in it; or all but one are."""
    [one] = problems(RunSnapshot(taken_at=0.0, actors=workers(8), calls=(call(5, called=4),)))
    assert (one.kind, one.names) == ("alone", ("workers[gpus=5]",))
    assert one.title == "workers.step has ended on 3 of 4 members, but not on workers[gpus=5]"
    [one] = problems(
        RunSnapshot(taken_at=0.0, actors=workers(8), calls=tuple(call(rank, called=4) for rank in (1, 2, 3)))
    )
    assert one.title == "1 of 4 members is not in workers.step, in which 3 others are"


def test_full_mailbox_and_who_holds_it():
    calls = (call(0, "hold", at="line 9"), *(call(0, "put", "sending", id=f"s{number}") for number in range(3)))
    found = problems(RunSnapshot(taken_at=0.0, calls=calls))
    [full] = [one for one in found if one.kind == "full"]
    assert "3 messages wait" in full.title
    assert "workers[gpus=0].hold holds it" in full.text
    assert full.at == "line 9"
    assert any(one.kind == "waited for" and "workers[gpus=0].hold" in one.title for one in found)


def test_memory_beside_that_of_the_others():
    rows = [proc(rank, memory_bytes=(1 << 30) if rank == 2 else 100 << 20) for rank in range(4)]
    [one] = problems(RunSnapshot(taken_at=0.0, procs=tuple(rows)))
    assert (one.kind, one.names) == ("memory", ("procs[gpus=2]",))


def test_circle_and_what_many_wait_for():
    """WB-1, WB-2: calls of a circle are a box each, thirty that wait for one are one box with a count."""
    seen = WaitingSource(1, 8).snapshot()
    picture = wait_picture(seen)
    boxes = {f"{box.name}.{box.endpoint}": box for box in picture.boxes}
    assert [box.in_circle for box in picture.boxes].count(True) == 4
    asker, store = boxes["asker[gpus=29].ask"], boxes["store[gpus=3].read"]
    assert (asker.count, store.is_culprit, store.waiters) == (30, True, 30)
    assert store.column > asker.column
    assert (picture.boxes.index(asker), picture.boxes.index(store), 30) in picture.arrows
    circle = next(one for one in problems(seen) if one.kind == "deadlock")
    assert circle.count == 4
    assert "the first deadline ends it" in circle.text
    assert len(circle.chain) == 5


def test_picture_of_thousands_of_different_waits_is_bounded():
    calls = tuple(
        call(0, f"e{at}", id=str(at), waits=(WaitRow(kind="call", call=str((at + 1) % 3000)),)) for at in range(3000)
    )
    picture = wait_picture(RunSnapshot(taken_at=0.0, calls=calls))
    assert (len(picture.boxes), picture.left_out) == (limits.PAGE_NODES_MAX, 3000 - limits.PAGE_NODES_MAX)


def test_every_text_is_cleaned():
    """DX-3: names, lines, errors, keys; nothing that steers a terminal or turns the direction of reading is left."""
    views = [
        ProcView(
            proc=ProcRow(
                id="0", name=HOSTILE, mesh=HOSTILE, point={HOSTILE: 0}, state="stuck", stack=HOSTILE, host=HOSTILE
            ),
            actors=(ActorRow(proc="0", name=HOSTILE, mesh=HOSTILE, cls=HOSTILE),),
            calls=(CallRow(id=HOSTILE, proc="0", name=HOSTILE, mesh=HOSTILE, endpoint=HOSTILE, at=HOSTILE),),
            events=(
                EventRow(number=1, at=0.0, kind="Died", name=HOSTILE, text=HOSTILE, is_failure=True, causes=(HOSTILE,)),
            ),
        )
    ]
    seen = see(merge(views, 0.0))
    for data in (page_json(seen.board), page_json(detail(seen, page_name(seen.placed[0].names[0])))):
        assert all(char.isprintable() for text in texts(json.loads(data)) for char in text.replace("\n", ""))
    assert b"owned" in page_json(seen.board)


def page_name(name: str) -> str:
    return str(json.loads(page_json(name)))


def texts(value: object) -> list[str]:
    if isinstance(value, dict):
        return [text for key, one in value.items() for text in (key, *texts(one))]
    if isinstance(value, list):
        return [text for one in value for text in texts(one)]
    return [value] if isinstance(value, str) else []


def test_details_of_a_cell_and_of_a_name():
    seen = see(RiggedSource(2, 4, is_well=True).snapshot())
    for name in ("actors:trainer:5", "procs:trainers:5", "trainers[hosts=1,gpus=1]", "trainer[hosts=1,gpus=1]"):
        found = detail(seen, name)
        assert found is not None
        assert (found.activity.proc.name, found.is_ours, len(found.calls)) == ("trainers[hosts=1,gpus=1]", True, 1)
    for name in ("procs:trainers:8", "procs:x:1", "procs:trainers:-1", "", "nothing"):
        assert detail(seen, name) is None, name


def test_run_that_has_ended_says_of_what_first():
    seen = with_end(
        see(RiggedSource(1, 4).snapshot()), "ended", "it has ended", Cause(kind="died", text="r3 has died"), number=9
    )
    assert (seen.board.state, seen.board.number, seen.board.problems[0].title) == ("ended", 9, "r3 has died")
    assert seen.board.meshes


def flown(
    number: int, at: float, lasted: float, outcome: int = flight.RETURNED, endpoint: str = "e"
) -> flight.FlightCall:
    return flight.FlightCall(number, at, 1, number, flight.CallName("m", {}, endpoint), outcome, 0.0, lasted)


def test_short_calls_of_a_time_line_are_put_together(monkeypatch: pytest.MonkeyPatch):
    """TN-1, TN-2: thousands are some hundred bars that count them all; what overlaps has a slot of its own."""
    calls = (*(flown(at, 100 + at / 1000, 0.0005) for at in range(9000)), flown(9001, 100, 0, flight.RUNNING, "long"))
    record = flight.Flight(flight.FlightHead(proc=proc(0)), 0.0, calls, ())
    monkeypatch.setattr("trimesh.cli.dashboard.timeline.read_record", lambda _: record)
    [row] = task_stream([proc(0)], 100.0, 10.0).rows
    assert sum(bar.count for bar in row.bars) == 9001
    assert len(row.bars) <= limits.PAGE_TASK_BARS + 2
    assert row.slots == 2
    assert [bar for bar in row.bars if bar.outcome == 0] == [TaskBar(0.0, 10_000.0, 1, 0, 1, 1, 9001)]


def test_call_of_a_dead_process_ends_with_it(monkeypatch: pytest.MonkeyPatch):
    """TN-4: at its last sign of life, not now."""
    died = flight.SeenEvent(event=EventRow(number=1, at=104.0, kind="Died", name="x"))
    record = flight.Flight(flight.FlightHead(proc=proc(0)), 0.0, (flown(1, 101.0, 0.0, flight.RUNNING),), (died,))
    monkeypatch.setattr("trimesh.cli.dashboard.timeline.read_record", lambda _: record)
    lengths = [task_stream([proc(0, state)], 100.0, 10.0).rows[0].bars[0].length for state in ("dead", "running")]
    assert lengths == [3_000.0, 9_000.0]


def test_time_line_says_why_a_process_has_none():
    [row] = task_stream([proc(0, record="/nowhere/at/all")], 0.0, 10.0).rows
    assert row.error == "its flight record is not on this machine"


def test_latency_of_calls_that_have_ended():
    calls = [flown(at, 0.0, at / 100, flight.RAISED if at == 3 else flight.RETURNED) for at in range(1, 101)]
    [one] = latencies([*calls, flown(101, 0.0, 0.0, flight.RUNNING)])
    assert (one.endpoint, one.count, one.failed, one.p50, one.p99, one.longest) == ("m.e", 100, 1, 0.51, 1.0, 1.0)


def test_one_call_of_a_time_line_has_its_error(monkeypatch: pytest.MonkeyPatch):
    """By its number; one that was overwritten is not there."""
    raised = flight.RaisedError(at=6.0, number=7, text="ValueError: no", line='File "train.py", line 3 in e')
    record = flight.Flight(flight.FlightHead(proc=proc(0)), 0.0, (flown(7, 5.0, 1.5, flight.RAISED),), (raised,))
    monkeypatch.setattr("trimesh.cli.dashboard.timeline.read_record", lambda _: record)
    seen = RunSnapshot(taken_at=9.0, procs=(proc(0),))
    found = one_call(seen, proc(0), 7)
    assert found is not None
    assert (found.name, found.caller, found.at, found.lasted) == ("m.e", "procs[gpus=0]", 5.0, 1.5)
    assert (found.error, found.line) == (raised.text, raised.line)
    assert one_call(seen, proc(0), 8) is None


def test_rows_of_a_time_line_are_by_host():
    rows = (proc(0, host="b"), proc(2, host="a"), proc(1, host="a"), ProcRow(id="0", pid=1))
    found = places(RunSnapshot(taken_at=0.0, procs=rows))
    assert [(one.host, one.name) for one in found] == [
        ("a", "procs[gpus=1]"),
        ("a", "procs[gpus=2]"),
        ("b", "procs[gpus=0]"),
    ]
