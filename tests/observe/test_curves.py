"""Curves of metrics: mean and spread over ranks, bounded; their past."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from trimesh import limits
from trimesh._runtime.history import HistoryFile
from trimesh._runtime.recording import HISTORY_FILE
from trimesh._runtime.sampling import SampleBatch
from trimesh._wire.observed import ProcRow, ProcView
from trimesh.errors import ConnectError
from trimesh.observe import MetricRow, QueryResult, RunSnapshot, SampleRow, query
from trimesh.observe.curves import Curves
from trimesh.observe.past import Past, PastPoint, read_past


def samples(step: int | None, ranks: int = 64, at: float = 0.0) -> list[SampleRow]:
    return [
        SampleRow(at=at, proc=f"{rank:x}", name=f"t[gpus={rank}]", mesh="t", step=step, values={"loss": rank})
        for rank in range(ranks)
    ]


def test_curve_has_mean_and_spread_over_ranks():
    """By step where there is one, else by time; late ranks count for their step."""
    curves = Curves()
    for step in range(3):
        curves.add(samples(step, 63))
    curves.add(samples(1)[63:])
    curves.add(samples(None, 2, at=7.5))
    by_step, by_time = curves.shown()
    assert (by_step.metric, by_step.mesh, by_step.unit, by_step.ranks) == ("loss", "t", "step", 64)
    assert by_step.x == (0, 1, 2)
    assert by_step.mean == (31.0, 31.5, 31.0)
    assert (by_step.low, by_step.high) == ((0, 0, 0), (62, 63, 62))
    assert (by_time.unit, by_time.x, by_time.mean) == ("time", (7,), (0.5,))


def test_points_and_curves_are_bounded():
    """CV-1: a million steps keep their shape."""
    curves = Curves()
    for step in range(0, 1_000_000, 100):
        curves.add(samples(step, 1))
    [curve] = curves.shown()
    assert limits.PAGE_CURVE_POINTS // 3 < len(curve.x) <= limits.PAGE_CURVE_POINTS
    assert curve.x[-1] > 990_000
    values = {f"name {number}": 1.0 for number in range(limits.PAGE_CURVES + 5)}
    curves.add([SampleRow(at=0.0, proc="1", name="t", values=values)])
    assert len(list(curves.shown())) == limits.PAGE_CURVES
    assert curves.left_out == 6


def test_neighbours_are_merged_when_points_are_many(monkeypatch: pytest.MonkeyPatch):
    """CV-1: two, then four steps at one place; points of the past, too, and few names are counted."""
    monkeypatch.setattr(limits, "PAGE_CURVE_POINTS", 2)
    monkeypatch.setattr(limits, "PAGE_CELLS_MAX", 2)
    curves = Curves()
    found = list[tuple[object, ...]]()
    for step in range(5):
        curves.add([SampleRow(at=1.0, proc="1", name=f"t{step}", step=step, values={"loss": step + 1.0})])
        [curve] = curves.shown()
        found.append((curve.x, curve.mean, curve.low, curve.high, curve.ranks))
    assert found == [
        ((0,), (1.0,), (1.0,), (1.0,), 1),
        ((0, 1), (1.0, 2.0), (1.0, 2.0), (1.0, 2.0), 2),
        ((0, 2), (1.5, 3.0), (1.0, 3.0), (2.0, 3.0), 2),
        ((0, 2), (1.5, 3.5), (1.0, 3.0), (2.0, 4.0), 2),
        ((0, 4), (2.5, 5.0), (1.0, 5.0), (4.0, 5.0), 2),
    ]
    curves.load(Past((), (PastPoint("loss", "", "step", "value", 3, 5, 4.0, 2, 1.5, 9.0),), until=1.0))
    curves.add([SampleRow(at=1.0, proc="1", name="t", step=9, values={"loss": 99.0})])  # PH-2: the history had it
    [curve] = curves.shown()
    assert (curve.x, curve.mean, curve.high, curve.ranks) == ((0, 4), (2.5, 3.0), (4.0, 9.0), 3)
    assert (curve.metric, curve.mesh, curve.kind, len(curves)) == ("loss", "controller", "value", 1)


def test_counters_show_their_growth_and_histograms_their_mean():
    """Between two looks that are not too near; what is no number is left out."""
    curves = Curves()
    for second, total in ((1.0, 10.0), (3.0, 30.0), (3.1, 30.0)):
        counts = (0, int(total))
        rows = (
            MetricRow(proc="1", name="t", metric="tokens", kind="counter", value=total),
            MetricRow(proc="1", name="t", metric="wait", kind="histogram", value=total, bounds=(1.0,), counts=counts),
            MetricRow(proc="1", name="t", metric="queue", kind="gauge", value=total),
        )
        curves.look(RunSnapshot(taken_at=second, metrics=rows))
    curves.add([SampleRow(at=0.0, proc="1", name="t", values={"loss": float("nan")}, step=1)])
    found = {curve.metric: curve for curve in curves.shown()}
    assert (found["tokens"].x, found["tokens"].mean) == ((3,), (10.0,))
    assert found["wait"].mean == (1.0,)
    assert found["queue"].mean == (10.0, 30.0)
    curves.look(RunSnapshot(taken_at=5.0, metrics=rows))  # from the second look on
    assert next(curve for curve in curves.shown() if curve.metric == "tokens").mean == (10.0, 0.0)
    assert "loss" not in found


def written(folder: Path) -> Past:
    """Return the past of a run of 100 s, of two ranks that log 1,000 steps."""
    file = HistoryFile(folder / HISTORY_FILE)
    for second in range(100):
        at = 1_000.0 + second
        tokens = MetricRow(proc="1", name="t[gpus=0]", mesh="t", metric="tokens", kind="counter", value=second * 50.0)
        proc = ProcRow(id="1", memory_bytes=(second + 1) << 20, cpu_seconds=second / 2)
        steps = range(10 * second, 10 * second + 10)
        logged = [sample for step in steps for sample in samples(step, 2, at=at)]
        file.write(SampleBatch(at, (ProcView(proc=proc, metrics=(tokens,)),), tuple(logged)))
    file.close()
    return read_past(partial(query, run=str(folder)))


def test_past_of_a_run_comes_from_its_history(tmp_path: Path):
    """PH-1, PH-2: merged points, sums every 10 s, and each value once, also if the run has it, too."""
    past = written(tmp_path)
    assert [one.at for one in past.sums] == [1_000.0 + second for second in range(0, 100, 10)]
    assert [(one.memory >> 20, one.cpu) for one in past.sums[:2]] == [(1, None), (11, 0.5)]
    assert past.until == 1_099.0
    curves = Curves()
    curves.load(past)
    curves.add([*samples(999, 2, at=1_099.0), *samples(1_000, 2, at=1_100.0)])
    loss, tokens = sorted(curves.shown(), key=lambda one: one.metric)
    assert (loss.unit, loss.kind, loss.ranks, loss.low[0], loss.mean[0], loss.high[0]) == (
        "step",
        "value",
        2,
        0,
        0.5,
        1,
    )
    assert limits.PAGE_CURVE_POINTS // 2 < len(loss.x) <= limits.PAGE_CURVE_POINTS
    assert loss.x[-1] == 1_000
    assert (tokens.unit, tokens.kind, set(tokens.mean), tokens.x[-1]) == ("time", "counter", {50.0}, 1_099)


def test_run_without_a_history_has_no_past():
    def none(*_: object) -> QueryResult:
        raise ConnectError("no run has a history")

    assert read_past(none) == Past()
