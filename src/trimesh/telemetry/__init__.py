"""Traces and metrics of calls, by OpenTelemetry: `instrument()` in each process that is to have them.

Needs the extra `telemetry`, which is the API alone: the program brings its SDK and exporter, and sets them up in the
controller and, by `setup=`, in each process. A process that was not instrumented pays nothing for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from trimesh._runtime.life import trace_calls

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider


__all__ = ["instrument", "uninstrument"]

_put_back: list[Callable[[], None]] = []


def instrument(*, tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None) -> None:
    """Have the calls of this process traced and measured, and items of channels linked. Idempotent.

    Call it in the program before the outermost block, and in each process by `spawn_procs(setup=...)`: actors that are
    spawned before it are not traced. A call is one span of kind CLIENT at its caller, whatever the number of members,
    and a child of kind SERVER at each of them, where what the endpoint does belongs to it. A broadcast is a span of
    kind PRODUCER; at the members a span of kind CONSUMER, in a trace of its own, links to it. A span in which an item
    of a channel is received gets a link to the span in which it was sent.

    Args:
        tracer_provider: Where spans go; None for the one that is set in OpenTelemetry.
        meter_provider: Where durations go; the same.

    Raises:
        ModuleNotFoundError: The extra `telemetry` is not installed.
    """
    try:
        from trimesh.telemetry.spans import CallSpans  # noqa: PLC0415 - OpenTelemetry may be missing
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "opentelemetry":
            raise
        raise ModuleNotFoundError(
            "trimesh.telemetry needs OpenTelemetry: pip install 'trimesh-actors[telemetry]'", name=error.name
        ) from error
    if not _put_back:
        _put_back.append(trace_calls(CallSpans(tracer_provider, meter_provider)))


def uninstrument() -> None:
    """Trace no calls any more; what is under way ends without a span. Idempotent."""
    if _put_back:
        _put_back.pop()()
