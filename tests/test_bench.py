"""The benchmarks are whole: every workload has a side or a reason for each library, and a ratio says who is better."""

from __future__ import annotations

import pytest
from bench.figures import DOCUMENT, TIMES_MONARCH, render
from bench.meshes.mesh import Mesh
from bench.peer import PEERS
from bench.report import Result, durations, rows, table
from bench.run import ROOT, WORKLOADS, workload_module
from bench.scale import FULL, Metric


def test_every_file_of_a_workload_is_run() -> None:
    files = {path.stem for path in (ROOT / "bench" / "workloads").glob("*.py") if "METRICS = [" in path.read_text()}

    assert files == set(WORKLOADS)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_workload_has_a_side_or_a_reason_for_each_library(workload: str) -> None:
    module = workload_module(workload)
    sides = {side for side in ("trimesh", *PEERS) if hasattr(module, f"{side}_side") or hasattr(module, "any_side")}
    lacks = getattr(module, "LACKS", {})

    assert "trimesh" in sides - lacks.keys()
    assert sides | lacks.keys() == {"trimesh", *PEERS}
    assert all(lacks.values())


def test_names_of_metrics_are_their_own() -> None:
    names = [metric.name for workload in WORKLOADS for metric in workload_module(workload).METRICS]

    assert len(names) == len(set(names))


def test_trimesh_mesh_has_all_operations() -> None:
    from bench.meshes import trimesh_mesh

    operations = {name for name in vars(Mesh) if not name.startswith("_")}

    assert operations
    assert all(callable(getattr(trimesh_mesh.Mesh, name, None)) for name in operations)


@pytest.mark.parametrize(("is_rate", "ours", "theirs"), [(False, 10.0, 40.0), (True, 40.0, 10.0)])
def test_ratio_says_how_much_better_trimesh_is(*, is_rate: bool, ours: float, theirs: float) -> None:
    result = Result(Metric("m", "a figure", "us", goals=(20,), is_rate=is_rate))
    for value in (ours, ours, 1e6):
        result.add("trimesh", {"m": [value]})
    result.add("ray", {"m": [theirs]})
    result.add("xoscar", {})

    (row,) = rows([result], ["ray", "xoscar"])

    assert (row["trimesh"], row["ray"], row["xoscar"]) == (ours, theirs, None)
    assert row["ratios"] == {"ray": 4.0, "xoscar": None}
    assert row["is_met"] is True
    assert "4.0 x" in table([result], ["ray", "xoscar"])


def test_figures_of_a_run_become_the_table_of_the_document() -> None:
    fast, slow = (
        Result(Metric("call_one", "a call", "us", goals=(20,))),
        Result(Metric("m", "another", "us", goals=(5,))),
    )
    fast.add("trimesh", {"call_one": [10.0]})
    fast.add("monarch", {"call_one": [90.0]})
    slow.add("trimesh", {"m": [4.0]})
    machine = {"cpu": "a machine", "cores": 2, "kernel": "6", "python": "3.11", "load": 0.1}
    data = {"machine": machine, "figures": rows([fast, slow], ["monarch"])}

    made = render("before\n<!-- figures -->\nold\n<!-- end -->\nafter\n", data)

    assert "| a call | p50 | 10.0 us | 90.0 us | 9.0 x | 20.0 us and 10 x Monarch | **missed** |" in made
    assert "| another | p50 | 4.00 us | - |  | 5.00 us | met |" in made
    assert "2 of 3 goals are met. Missed: a call (p50: 10 x Monarch)." in made
    assert made.startswith("before\n<!-- figures -->\na machine, 2 cores")
    assert made.endswith("<!-- end -->\nafter\n")
    assert "old" not in made


def test_goals_beside_monarch_are_of_metrics_that_there_are() -> None:
    names = {metric.name for workload in WORKLOADS for metric in workload_module(workload).METRICS}

    assert TIMES_MONARCH.keys() <= names


def test_the_document_has_a_place_for_the_figures() -> None:
    with pytest.raises(ValueError, match="needs one place"):
        render(
            "none",
            {
                "machine": {"cpu": "", "cores": 1, "kernel": "", "python": "", "load": 0},
                "figures": rows([Result(Metric("m", "m", "us"))], []),
            },
        )
    assert DOCUMENT.read_text().count("<!-- figures -->") == 1


def test_durations_add_up() -> None:
    times = {"kill": {"trimesh": [1.0, 2.0], "ray": [10.0]}, "stream": {"trimesh": [4.0]}}

    lines = durations(times, ["trimesh", "ray"]).splitlines()

    assert [line.split() for line in lines[2:]] == [
        ["kill", "3", "10", "13"],
        ["stream", "4", "-", "4"],
        ["together", "7", "10", "17"],
    ]


def test_a_peer_does_fewer_of_what_takes_seconds() -> None:
    peer = FULL.for_peer()

    assert (peer.spawns, peer.kills) == (1, 1)
    assert 0 < peer.calls < FULL.calls
    assert (peer.spawn_sizes, peer.offered_mebibytes) == (FULL.spawn_sizes, FULL.offered_mebibytes)
