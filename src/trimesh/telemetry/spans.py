"""OpenTelemetry spans of calls and links of channel items; imported by `instrument`."""

from __future__ import annotations

import contextvars
import time
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from opentelemetry import context as contexts
from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from trimesh import limits
from trimesh._routing.collector import LocalFailure, Raised
from trimesh._wire import messages
from trimesh.errors import place_name

if TYPE_CHECKING:
    from trimesh._runtime.actors import Cell
    from trimesh._runtime.calls import OutgoingCall
    from trimesh._runtime.peers import IncomingCall


SCOPE: Final = "trimesh"
_PROPAGATOR: Final = TraceContextTextMapPropagator()


class _Running:
    """A running span and its start time."""

    __slots__ = ("began_at", "method", "span")

    def __init__(self, span: Span, method: str) -> None:
        self.span = span
        self.method = method
        self.began_at = time.perf_counter()


class CallSpans:
    """Tracer that makes the spans of one process's calls, and the links of its channel items; see `Tracing`."""

    def __init__(
        self, tracer_provider: trace.TracerProvider | None, meter_provider: metrics.MeterProvider | None
    ) -> None:
        self._tracer = trace.get_tracer(SCOPE, tracer_provider=tracer_provider)
        meter = metrics.get_meter(SCOPE, meter_provider=meter_provider)
        bounds = list(BUCKETS)
        self._client, self._server = (
            meter.create_histogram(name, unit="s", description=text, explicit_bucket_boundaries_advisory=bounds)
            for name, text in (
                (CLIENT_SECONDS, "from the sending of a call to its outcome"),
                (SERVER_SECONDS, "for which an endpoint has run"),
            )
        )
        self._sent: dict[OutgoingCall, _Running] = {}
        self._traces: WeakKeyDictionary[IncomingCall, str] = WeakKeyDictionary()
        self._served: dict[IncomingCall, _Running] = {}
        self._linked: WeakKeyDictionary[Span, set[str]] = WeakKeyDictionary()

    # ---- outgoing calls --------------------------------------------------------------------------------------

    def sends(self, call: OutgoingCall) -> str:
        request = call.request
        attributes: dict[str, Any] = {
            SYSTEM: SCOPE,
            METHOD: request.what,
            MESH: request.mesh,
            ENDPOINT: request.endpoint,
            MEMBERS: len(call.targets),
        }
        kind = SpanKind.PRODUCER if call.is_broadcast else SpanKind.CLIENT
        span = self._tracer.start_span(request.what, kind=kind, attributes=attributes)
        self._sent[call] = _Running(span, request.what)
        return _header_of(trace.set_span_in_context(span))

    def settled(self, call: OutgoingCall) -> None:
        running = self._sent.pop(call, None)
        if running is not None:
            error = _error_of(call)
            self._end(running, error, None if call.is_broadcast else self._client)

    # ---- incoming calls --------------------------------------------------------------------------------------

    def came(self, call: IncomingCall, trace: str) -> None:
        if trace:
            self._traces[call] = trace

    def began(self, cell: Cell, call: IncomingCall) -> None:
        spec = cell.spec
        method = f"{spec.name}.{call.spec.name}"
        attributes: dict[str, Any] = {
            SYSTEM: SCOPE,
            METHOD: method,
            MESH: spec.name,
            ENDPOINT: call.spec.name,
            POINT: place_name("", spec.point),
            INCARNATION: spec.incarnation,
            QUEUED: max(0.0, cell.proc.now() - call.received_at),
        }
        if call.caller is not None:
            attributes[CALLER] = f"{call.caller.mesh}.{call.caller.endpoint or ''}"
        parent = _context_of(self._traces.pop(call, ""))
        if call.is_broadcast:
            sender = trace.get_current_span(parent).get_span_context()
            links = [Link(sender)] if sender.is_valid else []
            span = self._tracer.start_span(
                method, context=Context(), kind=SpanKind.CONSUMER, links=links, attributes=attributes
            )
        else:
            span = self._tracer.start_span(method, context=parent, kind=SpanKind.SERVER, attributes=attributes)
        self._served[call] = _Running(span, method)

    def enter(self, call: IncomingCall, context: contextvars.Context) -> None:
        running = self._served.get(call)
        if running is not None:
            context.run(contexts.attach, trace.set_span_in_context(running.span, Context()))

    def ended(self, call: IncomingCall) -> None:
        running = self._served.pop(call, None)
        if running is None:
            return
        error = ""
        if call.error_text:
            error = call.error_text.partition(":")[0]
            running.span.set_status(Status(StatusCode.ERROR, call.error_text))
        elif call.is_cancelled:
            error = "cancelled"
        self._end(running, error, self._server)

    # ---- items of channels -----------------------------------------------------------------------------------

    def sends_item(self) -> str:
        return _header_of(None)

    def received_item(self, trace: str) -> None:
        span = get_current_span()
        if not span.is_recording():
            return
        linked = self._linked.setdefault(span, set())
        if trace in linked or len(linked) >= limits.TRACE_LINKS_MAX:
            return  # one sender may send any number of items, and the SDK keeps few links of a span
        sender = get_current_span(_context_of(trace)).get_span_context()
        if sender.is_valid:
            linked.add(trace)
            span.add_link(sender)

    def _end(self, running: _Running, error: str, histogram: metrics.Histogram | None) -> None:
        span, attributes = running.span, {SYSTEM: SCOPE, METHOD: running.method}
        if error:
            attributes[ERROR] = error
            span.set_attribute(ERROR, error)
            if error != "cancelled":
                span.set_status(Status(StatusCode.ERROR))
        if histogram is not None:
            histogram.record(time.perf_counter() - running.began_at, attributes, trace.set_span_in_context(span))
        span.end()


def _error_of(call: OutgoingCall) -> str:
    """Return the error type of a call as the caller knows it; empty for none."""
    outcomes = call.collector.outcomes
    for outcome in outcomes:
        if isinstance(outcome, LocalFailure):
            return type(outcome.error).__name__
        if isinstance(outcome, Raised | messages.Refused):
            return OTHER
    return "cancelled" if any(isinstance(one, messages.CancelAck) or one is None for one in outcomes) else ""


def _header_of(context: Context | None) -> str:
    """Return the header for the span of a context, None for the current one; empty without a span.

    A trace state that is too long is left out, as W3C Trace Context allows: the receiver would refuse the header, and
    that would end the link.
    """
    carrier = dict[str, str]()
    _PROPAGATOR.inject(carrier, context)
    parent = carrier.get("traceparent", "")
    text = f"{parent} {carrier.get('tracestate', '')}".strip()
    return text if len(text) <= limits.TRACE_CONTEXT_CHARS_MAX else parent


def _context_of(text: str) -> Context:
    """Return the context that a trace header names; empty if the header is invalid."""
    parent, _, state = text.partition(" ")
    return _PROPAGATOR.extract({"traceparent": parent, "tracestate": state}, Context())


# ---- names -----------------------------------------------------------------------------------------------------------

# Names of attributes and metrics by OpenTelemetry's conventions for RPC (1.44), in one place because they change.
#
# Only spans carry coordinates: a metric label must not have a value for each rank.

SYSTEM: Final = "rpc.system.name"
METHOD: Final = "rpc.method"
ERROR: Final = "error.type"
MEMBERS: Final = "trimesh.members"
MESH: Final = "trimesh.mesh"
ENDPOINT: Final = "trimesh.endpoint"
POINT: Final = "trimesh.point"
INCARNATION: Final = "trimesh.incarnation"
CALLER: Final = "trimesh.caller"
QUEUED: Final = "trimesh.queued_seconds"

CLIENT_SECONDS: Final = "rpc.client.call.duration"
SERVER_SECONDS: Final = "rpc.server.call.duration"

OTHER: Final = "_OTHER"
"""Error type of an error whose class is not known here; the other process records the class in its own span."""

BUCKETS: Final = (
    *(0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005),
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0),
)
"""Bucket bounds in seconds: a call within a host takes some 30 us, but the conventions begin at 5 ms."""
