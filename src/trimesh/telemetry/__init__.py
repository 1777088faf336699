"""OpenTelemetry traces and metrics of calls: `instrument()` enables them in one process.

Needs the extra `telemetry`, which contains only the API: the program brings its SDK and exporter, and sets them up in
the controller and, by `setup=`, in each process. A process that is not instrumented has no cost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from trimesh._runtime.life import trace_calls
from trimesh._runtime.metrics import Counter, Gauge, Histogram, counter, gauge, histogram

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider


__all__ = ["Counter", "Gauge", "Histogram", "counter", "gauge", "histogram", "instrument", "uninstrument"]

_put_back: list[Callable[[], None]] = []


def instrument(*, tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None) -> None:
    """Trace and measure the calls of this process, link items of channels, report its metrics. Idempotent.

    Call it in the program before the outermost block, and in each process by `spawn_procs(setup=...)`: actors spawned
    before it are not traced. A call is one span of kind CLIENT at its caller, for any number of members, and a child
    span of kind SERVER at each of them, the parent of spans that the endpoint makes. A broadcast is a span of kind
    PRODUCER; at each member a span of kind CONSUMER, in a separate trace, links to it. A span in which an item of a
    channel is received gets a link to the span in which it was sent. What the program logs or counts becomes an
    observable instrument with the mesh as its attribute.

    Args:
        tracer_provider: Receives the spans; None takes OpenTelemetry's global one.
        meter_provider: Receives the durations; None takes the global one.

    Raises:
        ModuleNotFoundError: The extra `telemetry` is not installed.
    """
    try:
        from trimesh.telemetry.meters import MetricMeters  # noqa: PLC0415 - OpenTelemetry may be missing
        from trimesh.telemetry.spans import CallSpans  # noqa: PLC0415 - the same
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "opentelemetry":
            raise
        raise ModuleNotFoundError(
            "trimesh.telemetry needs OpenTelemetry: pip install 'trimesh-actors[telemetry]'", name=error.name
        ) from error
    if not _put_back:
        _put_back.append(trace_calls(CallSpans(tracer_provider, meter_provider)))
        _put_back.append(MetricMeters(meter_provider).end)


def uninstrument() -> None:
    """Stop tracing calls and reporting metrics; calls in progress end without a span. Idempotent."""
    while _put_back:
        _put_back.pop()()
