"""What processes say, made one snapshot; who waits for whom in it."""

from __future__ import annotations

import io

import pytest

from trimesh import observe
from trimesh._wire.observed import (
    ActorRow,
    CallRow,
    LinkRow,
    MetricRow,
    ProcRow,
    ProcView,
    WaitRow,
    decode_views,
    encode,
)
from trimesh.observe import RunSnapshot
from trimesh.observe.run_snapshot import merge


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


def test_text_for_prometheus_has_sums_and_names_of_its_own() -> None:
    """Metrics of the program whose names differ only in characters that Prometheus lacks are apart."""
    procs = [ProcRow(id=f"{rank:x}", name=f"p[gpus={rank}]", memory_bytes=5, cpu_seconds=0.5) for rank in range(2)]
    links = [LinkRow(proc="0", peer="1", bytes_sent=7, messages_sent=2, queued_bytes=3) for _ in range(2)]
    names = (("a/b", "value"), ("a_b", "value"), ("2x", "gauge"), ("done", "counter"), ("seen_total", "counter"))
    rows = [
        MetricRow(proc=f"{rank:x}", name="p", mesh="p", metric=name, kind=kind, value=rank + 1.0)
        for name, kind in names
        for rank in range(2)
    ]
    seen = RunSnapshot(taken_at=1.0, procs=tuple(procs), links=tuple(links), metrics=tuple(rows), retries=4)
    lines = observe.prometheus_text(seen).splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert values["trimesh_resident_memory_bytes"] == "10"
    assert (values["trimesh_link_sent_bytes_total"], values["trimesh_link_queued_bytes"]) == ("14", "6")
    assert (values["trimesh_link_sent_messages_total"], values["trimesh_call_retries_total"]) == ("4", "4")
    assert float(values["trimesh_cpu_seconds_total"]) == 1.0
    assert (values['done_total{mesh="p"}'], values['seen_total{mesh="p"}']) == ("3", "3")
    own = {line.split()[2]: line.split()[3] for line in lines if line.startswith("# TYPE") and "trimesh_" not in line}
    assert own == {"_2x": "gauge", "a_b": "gauge", "a_b_": "gauge", "done_total": "counter", "seen_total": "counter"}
