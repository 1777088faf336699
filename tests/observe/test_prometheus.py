"""Numbers of a run as text for Prometheus."""

from __future__ import annotations

from typing import Any

import pytest

from trimesh import limits, observe
from trimesh._wire.observed import (
    ActorRow,
    CallRow,
    EndpointRow,
    EventRow,
    GrantRow,
    LinkRow,
    MetricRow,
    ProcRow,
)
from trimesh.observe import RunSnapshot


def values_of(seen: RunSnapshot) -> dict[str, str]:
    """Return each value by its name and labels, after checking that each name is described once, before its values."""
    values, known = dict[str, str](), set[str]()
    lines = observe.prometheus_text(seen).splitlines()
    for line in lines:
        if line.startswith("# TYPE"):
            name, kind = line.split()[2:]
            assert name not in known
            assert kind in ("gauge", "counter", "histogram")
            known.add(name)
            continue
        if line.startswith("#"):
            assert lines[lines.index(line) + 1].split()[:3] == ["#", "TYPE", line.split()[2]]
            continue
        name, value = line.rsplit(" ", 1)
        plain = name.partition("{")[0]
        assert plain in known or plain.rpartition("_")[0] in known, line
        values[name] = value
    return values


def own(rank: int, metric: str, kind: str, **fields: Any) -> MetricRow:
    return MetricRow(
        **{"proc": f"{rank:x}", "name": f"p[gpus={rank}]", "mesh": "p", "metric": metric, "kind": kind, **fields}
    )


def run() -> RunSnapshot:
    """Return a snapshot in which each number is another one."""
    endpoints = [
        EndpointRow(
            proc=f"{rank}",
            name="a",
            mesh='say "a\\"',
            endpoint="step",
            calls=3,
            errors=2,
            cancelled=1,
            bytes_received=9,
            counts=counts,
        )
        for rank, counts in enumerate([(1, 2, 3), (4, 5, 6), (7, 8), ()])
    ]
    return RunSnapshot(
        taken_at=1.0,
        procs=(
            ProcRow(id="0", memory_bytes=5, cpu_seconds=0.25, gpu_memory_bytes=7),
            ProcRow(id="1", state="stuck", stalled_seconds=6.5, memory_bytes=6, cpu_seconds=0.5, gpu_memory_bytes=8),
            ProcRow(id="2", state="stuck", stalled_seconds=1.5),
        ),
        actors=tuple(ActorRow(proc="0", name="a", mesh="a", state=state, queued=2) for state in ("serving", "ended")),
        calls=tuple(
            CallRow(id=str(age), proc="0", name="a", mesh="a", endpoint="e", state="queued", age=age)
            for age in (1.5, 2.5)
        ),
        links=tuple(LinkRow(proc="0", peer="1", bytes_sent=7, messages_sent=2, queued_bytes=3) for _ in range(2)),
        grants=tuple(GrantRow(proc="0", kind="buffer", nbytes=11) for _ in range(2)),
        events=tuple(
            EventRow(number=at, at=0.0, kind=kind, name="a") for at, kind in enumerate(("Died", "Died", "Started"))
        ),
        endpoints=(*endpoints, EndpointRow(proc="0", name="b", mesh="b", endpoint="load", calls=1)),
        happened={"procs": {"Died": 2, "Restarted": 1}, "a": {"Died": 3}},
        retries=4,
        samples_dropped=13,
    )


def test_numbers_of_the_runtime_are_sums_over_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Q1, Q17: none is left out, and none has a label of a rank."""
    monkeypatch.setattr(limits, "LATENCY_BOUNDS", (0.5, 2.0))
    found = values_of(run())
    step = 'mesh="say \\"a\\\\\\"",endpoint="step"'
    load = 'mesh="b",endpoint="load"'
    assert found == {
        'trimesh_procs{state="running"}': "1",
        'trimesh_procs{state="stuck"}': "2",
        'trimesh_actors{state="serving"}': "1",
        'trimesh_actors{state="ended"}': "1",
        'trimesh_calls{state="queued"}': "2",
        "trimesh_calls_queued": "4",
        "trimesh_oldest_call_age_seconds": "2.5",
        "trimesh_loop_stall_seconds": "6.5",
        "trimesh_resident_memory_bytes": "11",
        "trimesh_link_sent_bytes_total": "14",
        "trimesh_link_sent_messages_total": "4",
        "trimesh_link_queued_bytes": "6",
        "trimesh_granted_memory_bytes": "22",
        'trimesh_recent_events{kind="Died"}': "2",
        'trimesh_recent_events{kind="Started"}': "1",
        "trimesh_cpu_seconds_total": "0.75",
        "trimesh_gpu_memory_bytes": "15",
        "trimesh_call_retries_total": "4",
        'trimesh_restarted_total{mesh="procs"}': "1",
        'trimesh_died_total{mesh="procs"}': "2",
        'trimesh_died_total{mesh="a"}': "3",
        f"trimesh_endpoint_calls_total{{{step}}}": "12",
        f"trimesh_endpoint_errors_total{{{step}}}": "8",
        f"trimesh_endpoint_cancelled_total{{{step}}}": "4",
        f"trimesh_endpoint_bytes_received_total{{{step}}}": "36",
        f'trimesh_endpoint_seconds_bucket{{{step},le="0.5"}}': "5",
        f'trimesh_endpoint_seconds_bucket{{{step},le="2"}}': "12",
        f'trimesh_endpoint_seconds_bucket{{{step},le="+Inf"}}': "21",
        f"trimesh_endpoint_seconds_count{{{step}}}": "21",
        f"trimesh_endpoint_calls_total{{{load}}}": "1",
        **{f"trimesh_endpoint_{name}_total{{{load}}}": "0" for name in ("errors", "cancelled", "bytes_received")},
        **{f'trimesh_endpoint_seconds_bucket{{{load},le="{bound}"}}': "0" for bound in ("0.5", "2", "+Inf")},
        f"trimesh_endpoint_seconds_count{{{load}}}": "0",
        "trimesh_samples_dropped_total": "13",
    }
    kinds = dict(
        line.split()[2:] for line in observe.prometheus_text(RunSnapshot(taken_at=1.0)).splitlines() if "# TYPE" in line
    )
    assert {name for name, kind in kinds.items() if kind == "counter"} == {name for name in kinds if "_total" in name}


def test_metrics_of_the_program_have_names_of_their_own() -> None:
    """Q13: summed or summarised over a mesh; names that differ only in characters that Prometheus lacks are apart."""
    plain = (
        ("a/b", "value"),
        ("a_b", "value"),
        ("a.b", "gauge"),
        ("2x", "gauge"),
        ("done", "counter"),
        ("seen_total", "counter"),
    )
    rows = [own(rank, name, kind, value=rank + 1.0) for name, kind in plain for rank in range(2)]
    rows += [
        own(0, "wait", "histogram", value=2.5, bounds=(1.0,), counts=(3, 1)),
        own(1, "wait", "histogram", value=1.0, bounds=(1.0,), counts=(1, 1)),
        own(1, "wait", "histogram", value=9.0, bounds=(2.0,), counts=(5, 5)),
        own(0, "\x1bloss\\", "value", value=0.1, mesh=""),
    ]
    found = {
        name: value
        for name, value in values_of(RunSnapshot(taken_at=1.0, metrics=tuple(rows))).items()
        if not name.startswith("trimesh_")
    }
    summary = {"mean": "1.5", "min": "1", "max": "2"}
    assert found == {
        **{
            f'{name}{{mesh="p",over="{over}"}}': value
            for name in ("a_b", "a_b_", "a_b__", "_2x")
            for over, value in summary.items()
        },
        'done_total{mesh="p"}': "3",
        'seen_total{mesh="p"}': "3",
        'wait_bucket{mesh="p",le="1"}': "4",
        'wait_bucket{mesh="p",le="+Inf"}': "6",
        'wait_count{mesh="p"}': "6",
        'wait_sum{mesh="p"}': "3.5",
        **{f'_loss_{{mesh="controller",over="{over}"}}': "0.10000000000000001" for over in summary},
    }
    text = observe.prometheus_text(RunSnapshot(taken_at=1.0, metrics=tuple(rows)))
    assert "# HELP _loss_ Metric \\\\x1bloss\\\\ of the program.\n# TYPE _loss_ gauge\n" in text
    assert "# TYPE done_total counter\n" in text
    assert "# TYPE wait histogram\n" in text
    assert text.endswith("\n")
