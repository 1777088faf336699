"""Snapshots merged from the reports of processes; wait graphs, stacks and rates from snapshots."""

from __future__ import annotations

import io

import pytest
from msgspec import structs

from trimesh import limits, observe
from trimesh._wire.observed import (
    HOST_SILENT,
    ActorRow,
    CallRow,
    EndpointRow,
    EventRow,
    GrantRow,
    HostRow,
    JobRow,
    LinkRow,
    MetricRow,
    PinRow,
    ProcRow,
    ProcView,
    PublicationRow,
    WaitRow,
    decode_views,
    encode,
)
from trimesh.observe.run_snapshot import merge, program_line


def call(call_id: str, *waits: str, age: float = 1.0, state: str = "running") -> CallRow:
    waiting = tuple(WaitRow(kind="call", call=other) for other in waits)
    return CallRow(id=call_id, proc="1", name=call_id, mesh="m", endpoint="e", state=state, age=age, waits=waiting)


def test_callee_knows_the_state_and_caller_the_rest():
    """ME-2: what each side knows of a call is in its one row."""
    made = CallRow(id="1.2@3", proc="3", name="a", mesh="a", endpoint="e", part_of="0.1@1", age=2.0, caller_proc="1")
    come = CallRow(id="1.2@3", proc="3", name="a", mesh="a", endpoint="e", state="queued", age=1.5, left=4.0)
    views = [ProcView(proc=ProcRow(id="1"), calls=(made,)), ProcView(proc=ProcRow(id="3", parent="1"), calls=(come,))]
    [row] = merge(views, 0.0).calls
    assert (row.state, row.part_of, row.age, row.left) == ("queued", "0.1@1", 2.0, 4.0)


def test_caller_knows_that_it_cancels():
    """ME-2: its state counts, whatever the callee says."""
    made = CallRow(id="1.2@3", proc="3", name="a", mesh="a", endpoint="e", state="cancelling", caller_proc="1")
    come = CallRow(id="1.2@3", proc="3", name="a", mesh="a", endpoint="e", state="running")
    views = [ProcView(proc=ProcRow(id="1"), calls=(made,)), ProcView(proc=ProcRow(id="3", parent="1"), calls=(come,))]
    [row] = merge(views, 0.0).calls
    assert row.state == "cancelling"


def test_process_that_has_said_nothing_is_silent():
    """ME-1: its owner knows of it."""
    child = ProcRow(id="2", parent="1", name="procs[gpus=0]")
    [first, _] = merge([ProcView(proc=ProcRow(id="1"), children=(child,))], 0.0).procs
    assert (first.name, first.state) == ("procs[gpus=0]", "silent")


def test_owner_and_process_report_on_it_together():
    """ME-1, ME-2: whether it runs says the process, how it ends its owner; each figure from the one that has it."""
    child = ProcRow(
        id="2", parent="1", name="p", memory_bytes=5, cpu_seconds=3.0, record="f", stalled_seconds=1.0, stack="old"
    )
    said = ProcRow(
        id="2", gpu_percent=7, gpu_memory_bytes=8, torch="2.9", stalled_seconds=4.0, stack="new", kernel_state="S"
    )

    def merged(owner: str, own: str, **more: object) -> ProcRow:
        views = [
            ProcView(proc=ProcRow(id="1"), children=(structs.replace(child, state=owner),)),
            ProcView(proc=structs.replace(said, state=own, **more)),
        ]
        return next(row for row in merge(views, 0.0).procs if row.id == "2")

    row = merged("running", "running")
    assert (row.name, row.parent, row.record, row.stalled_seconds, row.stack) == ("p", "1", "f", 4.0, "new")
    assert (row.memory_bytes, row.cpu_seconds) == (5, 3.0)
    assert (row.gpu_percent, row.gpu_memory_bytes, row.torch, row.kernel_state) == (7, 8, "2.9", "")
    row = merged("running", "silent", memory_bytes=6, cpu_seconds=4.0, record="g", stalled_seconds=0.0)
    assert (row.memory_bytes, row.cpu_seconds, row.record, row.kernel_state) == (6, 4.0, "g", "S")
    assert row.stalled_seconds == 1.0
    states = {
        ("running", "stuck"): "stuck",
        ("exiting", "stuck"): "stuck",
        ("exiting", "running"): "exiting",
        ("dead", "running"): "dead",
        ("held", "stuck"): "held",
    }
    assert {(owner, own): merged(owner, own).state for owner, own in states} == states
    assert (merged("held", "stuck").stack, merged("stopped", "stuck").stack) == ("", "new")


def test_processes_with_problems_come_first():
    """Then the controller, then by mesh and coordinates; each with its last event."""
    states = ("dead", "silent", "stopped", "stuck", "held", "exiting", "starting", "running")
    children = [
        ProcRow(id=f"{at}", parent="c", name=f"b[g={at}]", mesh="b", point={"g": 9 - at}, state=state)
        for at, state in enumerate(states)
    ]
    children += [ProcRow(id="x", parent="c", name="a[g=1]", mesh="a", point={"g": 1}, state="starting")]
    events = tuple(
        EventRow(number=at, at=float(-at), kind=kind, name="a[g=1]", text=text, is_failure=kind == "Died")
        for at, (kind, text) in enumerate((("Restarted", ""), ("Died", "gone"), ("Started", "")))
    )
    seen = merge([ProcView(proc=ProcRow(id="c"), children=tuple(children), events=events)], 5.0, by="thread")
    assert [row.id for row in seen.procs] == ["0", "7", "1", "2", "3", "4", "5", "x", "6", "c"]
    assert {row.id: row.last_event for row in seen.procs if row.last_event} == {"x": "Restarted"}
    assert [event.number for event in seen.events] == [2, 1, 0]
    assert [event.number for event in seen.failures] == [1]
    assert (seen.taken_at, seen.by) == (5.0, "thread")


def publication(number: int, proc: str, *, is_waiting: bool = False, pinned: tuple[int, ...] = ()) -> PublicationRow:
    return PublicationRow(proc=proc, number=number, is_waiting=is_waiting, pinned=pinned)


def link(peer: str, queued: int, waiting: int, sent: int, received: int) -> LinkRow:
    return LinkRow(proc="1", peer=peer, queued_bytes=queued, waiting=waiting, bytes_sent=sent, bytes_received=received)


def series(metric: str, mesh: str, rank: int, incarnation: int = 0, proc: str = "1") -> MetricRow:
    return MetricRow(proc=proc, name="", metric=metric, mesh=mesh, point={"g": rank}, incarnation=incarnation)


def counted(calls: int, mesh: str, endpoint: str, rank: int, proc: str = "1") -> EndpointRow:
    return EndpointRow(proc=proc, name="", calls=calls, mesh=mesh, endpoint=endpoint, point={"g": rank})


def test_tables_are_sorted_cut_and_added_up():
    """ME-3: the least urgent rows are left out, and counted, with those that the processes have left out."""

    tables: dict[str, list[object]] = {
        "actors": [ActorRow(proc="1", name=str(queued), mesh="a", queued=queued) for queued in (9, 3, 1)],
        "calls": [call(str(age), age=age) for age in (9.0, 3.0, 1.0)],
        "links": [link("a", 2, 0, 0, 0), link("b", 1, 5, 0, 0), link("c", 1, 4, 3, 8), link("d", 1, 4, 9, 0)],
        "grants": [GrantRow(proc="1", kind="buffer", nbytes=nbytes) for nbytes in (9, 3, 1)],
        "publications": [
            publication(9, "9", is_waiting=True),
            publication(8, "8", pinned=(1, 2)),
            publication(7, "6", pinned=(1,)),
            publication(8, "6", pinned=(1,)),
            publication(1, "7", pinned=(1,)),
        ],
        "metrics": [
            series("a", "z", 9),
            series("b", "a", 9),
            series("b", "b", 1, 9),
            series("b", "b", 2, 1, "9"),
            series("b", "b", 2, 2, "1"),
            series("b", "b", 2, 2, "2"),
        ],
        "endpoints": [
            counted(9, "z", "z", 9),
            counted(2, "a", "z", 9),
            counted(2, "b", "a", 9),
            counted(2, "b", "b", 1, "9"),
            counted(2, "b", "b", 2, "1"),
            counted(2, "b", "b", 2, "2"),
        ],
    }
    own = [
        ProcView(
            proc=ProcRow(id=str(at)),
            cut={"calls": 2, "links": 1},
            happened={"b": {"Died": at}, "a": {"Started": 1}},
            retries=at,
            samples_dropped=at,
            events=(EventRow(number=at, at=float(at), kind="Died", name="x", is_failure=True),),
            **{name: tuple(rows[at::2][::-1]) for name, rows in tables.items()},  # type: ignore[arg-type]
        )
        for at in (0, 1)
    ]
    seen = merge(own, 0.0)
    for name, rows in tables.items():
        assert list(getattr(seen, name)) == rows, name
    assert (seen.retries, seen.samples_dropped) == (1, 1)
    assert seen.happened == {"a": {"Started": 2}, "b": {"Died": 1}}
    assert list(seen.happened) == ["a", "b"]
    assert seen.cut == {"calls": 4, "links": 2}
    few = merge(own, 0.0, rows_max=1)
    for name, rows in tables.items():
        assert list(getattr(few, name)) == rows[:1], name
        assert few.cut[name] == len(rows) - 1 + seen.cut.get(name, 0)
    assert ([event.number for event in few.events], [event.number for event in few.failures]) == ([1], [0])
    assert (few.cut["events"], few.cut["failures"], few.cut["procs"]) == (1, 1, 1)


def test_machines_are_those_that_were_reported_and_those_with_processes():
    """Lost ones come first, then silent ones, then those with most failures."""
    procs = [
        ProcRow(id="1", host="a", torch="2.9"),
        ProcRow(id="2", host="a", state="stuck", torch="2.10"),
        ProcRow(id="3", host="b", state="silent", kernel_state=HOST_SILENT),
        ProcRow(id="4", host="b", state="silent", kernel_state="S"),
        ProcRow(id="5", host="c", state="silent", kernel_state=HOST_SILENT),
        ProcRow(id="6", host="f", torch="2.9"),
        ProcRow(id="7", host="f", torch="2.9"),
    ]
    hosts = (
        HostRow(name="d", agent="silent"),
        HostRow(name="a", agent="silent", pid=1),
        HostRow(name="a", pid=2),
        HostRow(name="e", agent="lost", said="gone"),
    )
    views = [
        ProcView(proc=one, hosts=hosts if one.id == "1" else (), job=JobRow(id="1", pid=7, host="a", insecure=("f",)))
        for one in procs
    ]
    rows = merge(views, 0.0).hosts
    assert [(row.name, row.state, row.procs, row.failed, row.is_insecure, row.torch) for row in rows] == [
        ("d", "silent", 0, 0, False, ()),
        ("c", "silent", 1, 1, False, ()),
        ("e", "lost", 0, 0, False, ()),
        ("a", "running", 2, 1, False, ("2.10", "2.9")),
        ("b", "running", 2, 2, False, ()),
        ("f", "running", 2, 0, True, ("2.9",)),
    ]
    assert (rows[2].said, rows[3].pid) == ("gone", 1)


STACK = """Thread 0x1 (most recent call first):
  File "/usr/lib/python3.11/socket.py", line 1 in recv
  File "/home/me/train.py", line 2 in step
  File "/home/me/main.py", line 3 in main
"""


def test_call_has_the_line_of_its_process_that_does_not_run():
    """If it has none, and runs there."""
    procs = [
        ProcRow(id="1", state="stuck", stack=STACK),
        ProcRow(id="2", state="silent", stack='Thread 0x1\n  File "/usr/lib/python3.11/socket.py", line 1 in recv'),
        ProcRow(id="3", state="silent"),
        ProcRow(id="4", stack=STACK),
    ]
    known = structs.replace(call("known"), at="line 7")
    calls = [structs.replace(call(proc.id, age=9.0 - at), proc=proc.id) for at, proc in enumerate(procs)]
    others = [structs.replace(call("queued"), state="queued"), structs.replace(call("elsewhere"), proc="9"), known]
    views = [ProcView(proc=ProcRow(id="0"), calls=(*calls, *others)), *(ProcView(proc=proc) for proc in procs)]
    assert {one.id: one.at for one in merge(views, 0.0).calls} == {
        "1": 'File "/home/me/train.py", line 2 in step',
        "2": 'File "/usr/lib/python3.11/socket.py", line 1 in recv',
        "3": "its process is silent",
        "4": "",
        "queued": "",
        "elsewhere": "",
        "known": "line 7",
    }
    assert program_line(STACK) == 'File "/home/me/train.py", line 2 in step'
    assert program_line("Thread 0x1\n") == ""


def test_equal_stacks_are_one():
    """Those of main threads first, then those of the fewest members; of all, or of one process or actor."""
    procs = tuple(ProcRow(id=str(at), name=f"p[g={at}]", state="stuck", stack=STACK) for at in range(2))
    procs += (ProcRow(id="2", name="p[g=2]", stack="Thread\n  File x"), ProcRow(id="3", name="p[g=3]"))
    calls = tuple(
        structs.replace(call(f"a[g={at}]"), proc=str(at), mesh="a", stack=("File y",) if at else ("File z", "File y"))
        for at in range(3)
    )
    seen = observe.RunSnapshot(taken_at=0.0, procs=procs, calls=(*calls, call("without")))
    shared = {(one.what, one.lines[-1:], one.members) for one in observe.shared_stacks(seen, "p[g=0]")}
    assert shared == {
        ("main thread", ('File "/home/me/main.py", line 3 in main',), ("p[g=0]",)),
        ("a.e", ("File y",), ("a[g=0]",)),
    }
    assert [(one.what, len(one.lines), one.members) for one in observe.shared_stacks(seen)] == [
        ("main thread", 1, ("p[g=2]",)),
        ("main thread", 3, ("p[g=0]", "p[g=1]")),
        ("a.e", 2, ("a[g=0]",)),
        ("a.e", 1, ("a[g=1]", "a[g=2]")),
    ]
    assert [one.members for one in observe.shared_stacks(seen, "a[g=1]")] == [("a[g=1]",)]


def test_activity_is_that_between_two_snapshots():
    """Counts of a closed link do not make a rate below 0; without an earlier snapshot nothing is known."""

    def at(seconds: float, received: int, sent: int, cpu: float) -> observe.RunSnapshot:
        link = LinkRow(
            proc="1", peer="0", messages_received=received, messages_sent=sent, bytes_received=received, bytes_sent=sent
        )
        procs = (ProcRow(id="1", cpu_seconds=cpu), ProcRow(id="2"))
        actors = tuple(ActorRow(proc="1", name=name, mesh="a", queued=2, running=1) for name in ("b", "a"))
        hosts = (
            HostRow(name="a", at=seconds, cpu_seconds=cpu, received_bytes=received, sent_bytes=sent),
            HostRow(name="b"),
        )
        calls = (call("x", age=2.0), call("y", age=3.0), structs.replace(call("z", age=9.0), proc="9"))
        return observe.RunSnapshot(
            taken_at=seconds, procs=procs, actors=actors, links=(link, link), calls=calls, hosts=hosts
        )

    earlier, later = at(10.0, 5, 9, 1.0), at(12.0, 8, 11, 4.0)
    one, other = observe.activity_between(later, earlier)
    assert (one.received, one.sent, one.nbytes, one.cpu) == (3.0, 2.0, 5.0, 1.5)
    assert (one.queued, one.running, one.oldest, one.actors) == (4, 2, 3.0, ("a", "b"))
    assert (other.received, other.queued, other.oldest, other.cpu, other.actors) == (0.0, 0, 0.0, None, ())
    assert [row.id for row in observe.calls_of(later, "1")] == ["x", "y"]
    closed = observe.activity_between(at(12.0, 0, 0, 0.5), earlier)[0]
    assert (closed.received, closed.sent, closed.nbytes, closed.cpu) == (0.0, 0.0, 0.0, 0.0)
    for before in (None, later, at(13.0, 0, 0, 1.0)):
        first = observe.activity_between(later, before)[0]
        assert (first.received, first.sent, first.cpu) == (0.0, 0.0, None)
        assert observe.hosts_between(later, before)[0] == observe.HostActivity(host=later.hosts[0])
    assert observe.activity_between(at(12.0, 8, 11, 0.0), earlier)[0].cpu is None
    machine, unknown = observe.hosts_between(later, earlier)
    assert (machine.cpu, machine.received, machine.sent) == (1.5, 1.5, 1.0)
    assert unknown == observe.HostActivity(host=later.hosts[1])
    machine = observe.hosts_between(at(12.0, 0, 0, 0.5), earlier)[0]
    assert (machine.cpu, machine.received, machine.sent) == (0.0, 0.0, 0.0)


def test_what_most_wait_for_is_the_culprit():
    """WG-1, WG-2: of what waits for nothing, the one that most wait for."""
    seen = observe.RunSnapshot(
        taken_at=0.0,
        calls=(call("alone", age=9.0), call("a", "c"), call("b", "a"), call("c", "d"), call("d")),
    )
    graph = observe.WaitGraph(seen)
    assert [(one.call.id, one.waiters) for one in graph.culprits()] == [("d", 3), ("alone", 0)]
    assert [one.id for one in graph.roots()] == ["alone", "b"]
    assert graph.waits_for == {"a": ("c",), "b": ("a",), "c": ("d",)}


def test_calls_that_wait_for_themselves_are_a_circle():
    """WG-1: said once, from one of them on; what waits for the circle is none of it."""
    seen = observe.RunSnapshot(taken_at=0.0, calls=(call("z", "a"), call("a", "b"), call("b", "c"), call("c", "a")))
    [first] = observe.WaitGraph(seen).culprits()
    assert first.cycle == ("a", "b", "c")


def test_full_mailbox_waits_for_the_calls_of_its_actor():
    """WG-1: a message that waits for room; two ways to one call count once, a call that is not there not at all."""
    holders = [call("h1", state="running"), call("h2", "h1", "h1", "gone", state="waiting")]
    calls = [structs.replace(one, name="a") for one in holders]
    sending = [structs.replace(call(name, state="sending"), name="a") for name in ("s1", "s2")]
    queued = structs.replace(call("q", state="queued"), name="a")
    graph = observe.WaitGraph(observe.RunSnapshot(taken_at=0.0, calls=(*calls, *sending, queued)))
    assert graph.waits_for == {"h2": ("h1",), "s1": ("h1", "h2"), "s2": ("h1", "h2")}
    assert [(one.call.id, one.waiters, one.cycle) for one in graph.culprits()] == [("h1", 3, ()), ("q", 0, ())]
    assert graph.deadlocked() == set()


def test_circles_come_before_other_culprits():
    """WG-1, WG-2: each is said once; then those with most waiters, then the oldest."""
    calls = (
        call("old", age=9.0),
        call("new", age=2.0),
        call("w", "a"),
        call("a", "b", "x", age=1.0),
        call("b", "c"),
        call("c", "b", "a"),
        call("x"),
        call("self", "self"),
    )
    graph = observe.WaitGraph(observe.RunSnapshot(taken_at=0.0, calls=calls))
    assert [(one.call.id, one.waiters, one.cycle) for one in graph.culprits()] == [
        ("a", 4, ("a", "b", "c")),
        ("self", 1, ("self",)),
        ("x", 4, ()),
        ("old", 0, ()),
        ("new", 0, ()),
    ]
    assert graph.deadlocked() == {"a", "b", "c", "self"}


def test_publications_are_grouped_by_mesh_and_reader():
    """UV-1 to UV-3: versions that readers keep, those that a `publish` waits for first; versions without a reader."""
    procs = tuple(ProcRow(id=str(at), name=f"p[g={at}]", mesh="p") for at in range(4))
    long = limits.STALL_SECONDS

    def row(proc: str, *pins: PinRow, member: str = "", number: int = 1, **more: object) -> PublicationRow:
        given = {"latest": 9, "slots": 3, "pins": pins, **more}
        return PublicationRow(proc=proc, number=number, member=member, **given)  # type: ignore[arg-type]

    calls = (
        structs.replace(call("young", age=1.0), proc="3"),
        structs.replace(call("old", age=2.0, state="waiting"), proc="3"),
        structs.replace(call("queued", age=3.0, state="queued"), proc="3"),
        structs.replace(call("elsewhere", age=4.0), proc="1"),
    )
    pins = PinRow(proc="3", version=5, seconds=long), PinRow(proc="3", version=4, seconds=long + 2)
    rows = (
        row("0", *pins, PinRow(proc="3", version=9, seconds=long), member="t[g=0]"),
        row("1", PinRow(proc="3", version=4, seconds=long + 1), member="t[g=1]", latest=10, slots=4),
        row("2", PinRow(proc="2", version=1, seconds=long), number=2),
        row("9", PinRow(proc="x", version=2, seconds=long), is_waiting=True),
        row("0", PinRow(proc="3", version=4, seconds=long / 2), PinRow(proc="2", version=3), number=3),
    )
    found = observe.kept_versions(observe.RunSnapshot(taken_at=0.0, procs=procs, publications=rows, calls=calls))
    assert [(one.holders, one.publishers, one.versions, one.seconds) for one in found] == [
        (("process x",), ("process 9",), (2,), long),
        (("p[g=3]",), ("t[g=0]", "t[g=1]"), (4, 5), long + 2),
        (("p[g=2]",), ("p[g=2]",), (1,), long),
    ]
    assert [(one.latest, one.kept, one.slots, one.is_waiting) for one in found] == [
        (9, 1, 3, True),
        (10, 2, 4, False),
        (9, 1, 3, False),
    ]
    assert [None if one.call is None else one.call.id for one in found] == [None, "old", None]

    least = limits.UNREAD_SECONDS
    unread = (
        row("0", member="t[g=0]", unread=5, unread_seconds=least + 1, readers=("1", "x"), nbytes=3),
        row("1", member="t[g=1]", unread=4, unread_seconds=least, readers=("1",), nbytes=4, latest=10),
        row("2", member="u[g=0]", unread=4, unread_seconds=least),
        row("3", member="u[g=1]", unread=3, unread_seconds=least),
        row("9", unread=9, unread_seconds=least),
        row("2", number=4, unread=9, unread_seconds=least - 1),
    )
    assert observe.unread_versions(observe.RunSnapshot(taken_at=0.0, procs=procs, publications=unread)) == [
        observe.UnreadVersions(
            publishers=("t[g=0]", "t[g=1]"),
            count=4,
            seconds=least,
            latest=10,
            readers=("p[g=1]", "process x"),
            nbytes=7,
        ),
        observe.UnreadVersions(publishers=("process 9",), count=9, seconds=least, latest=9),
    ]


def test_of_four_thousand_processes_each_is_there_once():
    """With a call each, decoded from what they send."""
    views = tuple(
        ProcView(
            proc=ProcRow(id=str(rank), parent="0", name=f"procs[gpus={rank}]", mesh="procs", point={"gpus": rank}),
            calls=(CallRow(id=f"0.{rank}@{rank}", proc=str(rank), name="a", mesh="a", endpoint="e", state="running"),),
        )
        for rank in range(1, 4097)
    )
    root = ProcView(proc=ProcRow(id="0"), children=tuple(view.proc for view in views))
    data = encode((root, *views))
    seen = merge(decode_views(data), 0.0)
    assert sorted(int(row.id) for row in seen.procs) == list(range(4097))
    assert sorted(int(row.proc) for row in seen.calls) == list(range(1, 4097))


def test_four_thousand_processes_are_drawn():
    """Q1: from the bytes of an answer to the text on the terminal, with one in a hundred that is stuck."""
    pytest.importorskip("cyclopts")
    from rich.console import Console

    from trimesh.cli.processes import print_lines, run_lines

    stack = 'File "train.py", line 3 in step\n' * 5
    views = tuple(
        ProcView(
            proc=ProcRow(
                id=str(rank),
                parent="0",
                name=f"procs[hosts={rank // 8},gpus={rank % 8}]",
                mesh="procs",
                point={"hosts": rank // 8, "gpus": rank % 8},
                state="stuck" if rank % 100 == 0 else "running",
                stack=stack if rank % 100 == 0 else "",
            ),
            actors=(ActorRow(proc=str(rank), name=f"trainer[gpus={rank}]", mesh="trainer", cls="Trainer"),),
            calls=(CallRow(id=f"0.{rank}@{rank}", proc=str(rank), name="a", mesh="a", endpoint="e", state="running"),),
        )
        for rank in range(1, 4097)
    )
    data = encode((ProcView(proc=ProcRow(id="0"), children=tuple(view.proc for view in views)), *views))
    shown = io.StringIO()
    console = Console(file=shown, width=200, highlight=False)
    print_lines(console, run_lines(merge(decode_views(data), 0.0)))
    assert shown.getvalue().startswith("a run: procs[hosts=12,gpus=4] and 39 more stuck; see: trimesh stack ")
    assert "procs[hosts=62,gpus=4]" in shown.getvalue()
