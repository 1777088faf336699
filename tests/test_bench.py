"""The benchmarks are whole: every workload has a side or a reason for each library, and a ratio says who is better."""

from __future__ import annotations

import pytest
from bench.figures import DOCUMENT, TIMES_PEER, render
from bench.meshes.mesh import Mesh
from bench.peer import PEERS
from bench.report import Result, durations, rows, table
from bench.run import ROOT, WORKLOADS, workload_module
from bench.scale import FULL, Metric
from bench.workloads import asyncio as asyncio_workload


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

    made = render("before\n<!-- figures -->\nformer\n<!-- end -->\nafter\n", data)

    assert "| a call | 10.0 us | 90.0 us | 20.0 us, **10 x Monarch** |" in made
    assert "| another |" not in made, "it has no peer and meets its goal"
    assert "2 of 3 goals are met; the others are bold." in made
    assert made.startswith("before\n<!-- figures -->\na machine, 2 cores")
    assert made.endswith("<!-- end -->\nafter\n")
    assert "former" not in made


def test_goals_beside_peers_are_of_metrics_that_there_are() -> None:
    names = {metric.name for workload in WORKLOADS for metric in workload_module(workload).METRICS}

    assert TIMES_PEER.keys() <= PEERS.keys()
    for goals in TIMES_PEER.values():
        assert goals.keys() <= names


class SteadyProgram:
    """Answers each request of a measurement with the same samples."""

    def __init__(self, **samples: list[float]) -> None:
        self._samples = samples

    def request(self, kind: str, actor: str) -> list[float]:
        assert kind in {kind.name for kind in asyncio_workload.KINDS}
        return self._samples[actor]


def test_asyncio_workload_divides_best_medians_by_those_from_trio_to_trio() -> None:
    found = {metric.name: [] for metric in asyncio_workload.METRICS}
    quiet = {
        "trio": SteadyProgram(trio=[9.0, 10.0, 500.0], asyncio=[20.0]),
        "asyncio": SteadyProgram(trio=[30.0], asyncio=[40.0]),
    }
    busy = {name: SteadyProgram(trio=[60.0], asyncio=[60.0]) for name in quiet}

    turns = [
        asyncio_workload.take_turn(programs, found, is_reversed=programs is busy) for programs in (quiet, busy, quiet)
    ]
    asyncio_workload.add_ratios(turns, found)

    assert found["asyncio_call_trio_trio"] == [9.0, 10.0, 500.0, 60.0, 9.0, 10.0, 500.0]
    assert found["asyncio_call_trio_asyncio_ratio"] == [2.0]
    assert found["asyncio_call_asyncio_trio_ratio"] == [3.0]
    assert found["asyncio_call_asyncio_asyncio_ratio"] == [4.0]
    assert found["asyncio_call_uvloop_trio"] == found["asyncio_call_uvloop_trio_ratio"] == []
    assert found["asyncio_stream_asyncio_trio_ratio"] == [1.0]


def test_asyncio_program_has_a_measurement_of_each_kind() -> None:
    from bench.asyncio_program import Measurement

    assert all(callable(getattr(Measurement, kind.name, None)) for kind in asyncio_workload.KINDS)


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
