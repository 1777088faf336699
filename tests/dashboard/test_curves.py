"""Curves of metrics on the page: mean and spread over ranks, bounded."""

from __future__ import annotations

import pytest

pytest.importorskip("cyclopts")

from trimesh import limits
from trimesh.cli.dashboard.curves import Curves
from trimesh.observe import MetricRow, RunSnapshot, SampleRow


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


def test_counters_show_their_growth_and_histograms_their_mean():
    """Between two looks; a NaN is left out."""
    curves = Curves()
    for second, total in ((1.0, 10.0), (3.0, 30.0)):
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
    assert found["loss"].x == ()
