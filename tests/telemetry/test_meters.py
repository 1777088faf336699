"""Metrics of the program as instruments of OpenTelemetry (Q12)."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

import trimesh
from trimesh import Actor, endpoint, telemetry, this_host

pytestmark = pytest.mark.real


class Trainer(Actor):
    @endpoint
    def step(self) -> None:
        trimesh.log({"loss/train": 0.5})


@pytest.fixture
def reader() -> Generator[InMemoryMetricReader, None, None]:
    found = InMemoryMetricReader()
    telemetry.counter("before").add(3)
    telemetry.instrument(meter_provider=MeterProvider([found]))
    yield found
    telemetry.uninstrument()


def values(reader: InMemoryMetricReader) -> dict[str, list[tuple[float, dict[str, Any]]]]:
    data = reader.get_metrics_data()
    scopes = [] if data is None else [scope for one in data.resource_metrics for scope in one.scope_metrics]
    return {
        metric.name: [(point.value, dict(point.attributes)) for point in metric.data.data_points]
        for scope in scopes
        for metric in scope.metrics
        if not metric.name.startswith("rpc.")
    }


async def test_metrics_become_instruments(reader: InMemoryMetricReader):
    """Q12: with the mesh as an attribute, and no rank; nothing after `uninstrument`."""
    trimesh.log({"outside": 2})
    telemetry.histogram("wait", [1]).record(0.5)
    async with this_host().spawn_procs({"gpus": 1}), trimesh.this_proc().spawn("trainer", Trainer) as trainer:
        await trainer.step.call()
    found = values(reader)
    assert found["before"] == [(3, {})]
    assert found["outside"] == [(2, {})]
    assert found["wait.count"] == [(1, {})]
    assert found["wait.sum"] == [(0.5, {})]
    assert found["loss/train"] == [(0.5, {"trimesh.mesh": "trainer"})]
    telemetry.uninstrument()
    assert not any(values(reader).values())
