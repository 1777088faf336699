"""Spans and durations of calls, by the real SDK of OpenTelemetry (Q12)."""

from __future__ import annotations

import gzip
import itertools
import os
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
import trio

pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.runtime.frames import RecordingTransport
from tests.runtime.test_channels import item, meet, open_and_send, receive

from trimesh import Actor, endpoint, jobs, limits, open_channel, telemetry, this_host, this_proc
from trimesh._runtime.actors.cell import Cell
from trimesh._runtime.actors.server import Server
from trimesh._runtime.calls import invocation
from trimesh._runtime.calls.outgoing import OutgoingCall
from trimesh._runtime.channels.ports import Port
from trimesh._runtime.channels.receiver import Home
from trimesh._runtime.life.proc import Proc
from trimesh._wire import messages
from trimesh.ids import ProcId
from trimesh.telemetry import spans as names

pytestmark = pytest.mark.real


class Step(Actor):
    @endpoint
    async def step(self, number: int) -> int:
        return number

    @endpoint
    async def pass_on(self, other: Any, number: int) -> int:
        return int(await other.step.call_one(number))

    @endpoint
    def fail(self) -> None:
        raise ValueError("no such shard")

    @endpoint
    def note(self) -> None:
        return

    @endpoint
    async def count(self) -> Any:
        yield 1
        yield 2

    @endpoint
    async def send(self, port: Any, count: int) -> None:
        async with port:
            for number in range(count):
                await port.send(number)

    @endpoint
    async def take(self, to: Any) -> list[int]:
        async with open_channel(int, capacity=0) as (port, receiver):
            await to.send(port)
            await port.aclose()
            return [number async for number in receiver]


class Recorded:
    """What this process exports."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.reader = InMemoryMetricReader()
        self.meters = MeterProvider([self.reader])

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def kinds(self, name: str) -> list[str]:
        return sorted(span.kind.name for span in self.spans(name))


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    found = Recorded()
    telemetry.instrument(tracer_provider=found.provider, meter_provider=found.meters)
    telemetry.instrument()
    yield found
    telemetry.uninstrument()
    telemetry.uninstrument()


@pytest.mark.daily
async def test_call_is_a_span_at_both_ends(recorded: Recorded):
    """Q12: CLIENT at the caller, SERVER as its child at each member; what an endpoint calls belongs to it."""
    async with this_proc().spawn("first", Step) as first, this_proc().spawn("other", Step) as other:
        with recorded.provider.get_tracer("program").start_as_current_span("training") as outer:
            assert await first.pass_on.call_one(other, 3) == 3
        with pytest.raises(ValueError, match="no such shard"):
            await first.fail.call_one()
        await first.note.broadcast()
        async with first.count.stream() as items:
            assert [item async for _, item in items] == [1, 2]
    assert recorded.kinds("first.pass_on") == ["CLIENT", "SERVER"]
    way = [outer, *(span for name in ("first.pass_on", "other.step") for span in sorted_spans(recorded, name))]
    for parent, child in itertools.pairwise(way):
        assert child.parent is not None
        assert child.parent.span_id == parent.get_span_context().span_id
        assert child.context.trace_id == outer.get_span_context().trace_id
    client, server = sorted_spans(recorded, "first.fail")
    assert dict(server.attributes or {})[names.ERROR] == "ValueError"
    assert dict(client.attributes or {})[names.ERROR] == names.OTHER
    come, sent = sorted_spans(recorded, "first.note")
    assert (sent.kind.name, come.kind.name, come.parent) == ("PRODUCER", "CONSUMER", None)
    assert [link.context.span_id for link in come.links] == [sent.context.span_id]
    assert recorded.kinds("first.count") == ["CLIENT", "SERVER"]


def sorted_spans(recorded: Recorded, name: str) -> list[ReadableSpan]:
    """Return the spans of a call, CLIENT and SERVER, or CONSUMER and PRODUCER."""
    return sorted(recorded.spans(name), key=lambda span: span.kind.name)


def linked(span: Any) -> list[int]:
    """Return the numbers of the spans that a span, which may not have ended, is linked to."""
    return [link.context.span_id for link in span.links]


async def test_item_links_its_receiver_to_its_sender(recorded: Recorded):
    """Q12: once for each span that has sent, and only where a span sends and another one receives."""
    tracer = recorded.provider.get_tracer("program")
    async with this_proc().spawn("steps", Step) as steps, open_channel(int, capacity=4) as (port, receiver):
        with tracer.start_as_current_span("receiving") as receiving:
            await steps.send.call_one(port.clone(), 3)
            assert [receiver.receive_nowait(), await receiver.receive()] == [0, 1]
            port.send_nowait(7)
            with tracer.start_as_current_span("other") as other:
                assert await receiver.receive() == 2
        [_, served] = sorted_spans(recorded, "steps.send")
        assert linked(receiving) == linked(other) == [served.context.span_id]
        assert await receiver.receive() == 7  # outside of all spans
        await port.send(8)
        with tracer.start_as_current_span("lone") as lone:
            assert await receiver.receive() == 8  # from outside of all spans
    assert linked(lone) == []


async def test_span_has_links_to_a_bound(recorded: Recorded, monkeypatch: pytest.MonkeyPatch):
    """A task may receive items of any number of spans in one span."""
    monkeypatch.setattr(limits, "TRACE_LINKS_MAX", 2)
    tracer = recorded.provider.get_tracer("program")
    senders: list[int] = []
    async with open_channel(int, capacity=4) as (port, receiver):
        for number in range(3):
            with tracer.start_as_current_span("sending") as sending:
                await port.send(number)
            senders.append(sending.get_span_context().span_id)
        with tracer.start_as_current_span("receiving") as receiving:
            assert [await receiver.receive() for _ in range(3)] == [0, 1, 2]
    assert linked(receiving) == senders[:2]


async def test_traced_item_that_comes_after_the_end_is_dropped(recorded: Recorded):
    """No port is left, so nothing keeps what its sender should not have sent."""
    proc = Proc(ProcId(1), RecordingTransport(), seed=1)
    peer, link = meet(proc, 2)
    port, home, transit = open_and_send(proc, peer)
    receive(proc, link, messages.Dropped(transit.channel, 1))
    home.dropped(proc.me, 1)
    receive(proc, link, messages.TracedItem("", messages.encode(item(proc, transit.channel, 1))))
    assert not link.aborted
    with pytest.raises(trio.EndOfChannel):
        home.receive_nowait()
    port.close()


async def test_long_trace_state_stays_behind(recorded: Recorded):
    """What is longer than its receiver takes ends no link: the call and the item go without it."""
    state = trace.TraceState([(f"vendor{number}", "x" * 200) for number in range(8)])
    origin = trace.NonRecordingSpan(trace.SpanContext(5, 6, True, trace.TraceFlags(1), state))
    tracer = recorded.provider.get_tracer("program")
    async with this_proc().spawn("steps", Step) as steps, open_channel(int, capacity=1) as (port, receiver):
        with trace.use_span(origin):
            assert await steps.step.call_one(5) == 5
            await port.send(6)
        with tracer.start_as_current_span("receiving") as receiving:
            assert await receiver.receive() == 6
    assert linked(receiving) == [6]
    assert {span.context.trace_id for span in recorded.spans("steps.step")} == {5}


async def test_durations_have_fine_buckets_and_no_ranks(recorded: Recorded):
    """Q12: a label of a metric has no value for each rank, and a call of 30 us is told from one of 300 us."""
    async with this_proc().spawn("first", Step) as first:
        for number in range(3):
            await first.step.call_one(number)
    data = recorded.reader.get_metrics_data()
    assert data is not None
    found: dict[str, Any] = {
        metric.name: metric.data.data_points
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.name.startswith("rpc.")  # others are of the program
    }
    assert set(found) == {names.CLIENT_SECONDS, names.SERVER_SECONDS}
    for points in found.values():
        [point] = points
        assert point.count == 3
        assert point.explicit_bounds[0] == 0.00001
        assert set(point.attributes) == {names.SYSTEM, names.METHOD}


async def test_untraced_process_runs_what_it_always_does():
    """Q12: nothing of the way of a call is another function before, and after it has been switched off."""
    seams = [
        (OutgoingCall, "start"),
        (OutgoingCall, "forget"),
        (Cell, "deliver"),
        (Cell, "_call_recorder"),
        (Server, "_context_of"),
        (invocation, "_post_at_once"),
        (Port, "_encode"),
        (Home, "arrived"),
        (Home, "_decode"),
    ]
    before = [getattr(place, name) for place, name in seams]
    telemetry.instrument(tracer_provider=TracerProvider())
    assert not any(getattr(place, name) is old for (place, name), old in zip(seams, before, strict=True))
    telemetry.uninstrument()
    assert [getattr(place, name) for place, name in seams] == before


class Collector(HTTPServer):
    """Takes OTLP over HTTP at a port of loopback."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Taking)
        self.spans: list[tuple[int, Span]] = []
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


class _Taking(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            data = gzip.decompress(data)
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
            pid = next(one.value.int_value for one in resource.resource.attributes if one.key == "process.pid")
            self.server.spans += [(pid, span) for scope in resource.scope_spans for span in scope.spans]
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        return


def export_to(port: int) -> None:
    """Set up a process: spans go to a collector."""
    from opentelemetry.sdk.resources import Resource

    provider = TracerProvider(resource=Resource({"process.pid": os.getpid()}))
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(f"http://127.0.0.1:{port}/v1/traces")))
    trace.set_tracer_provider(provider)
    telemetry.instrument()


class Exporting:
    """`setup=` that knows the port."""

    def __init__(self, port: int) -> None:
        self.port = port

    def __call__(self) -> None:
        export_to(self.port)


async def test_trace_over_processes_and_hosts(recorded: Recorded):
    """Q12: one trace over the processes of a host of a job, exported by each of them by OTLP."""
    collector = Collector()
    try:
        async with (
            jobs.LocalJob(1) as hosts,
            hosts.spawn_procs({"gpus": 2}, setup=Exporting(collector.server_port)) as procs,
        ):
            steps = await procs.spawn("steps", Step)
            await steps.slice(gpus=0).pass_on.call_one(steps.slice(gpus=1), 5)
    finally:
        await trio.to_thread.run_sync(collector.shutdown)
        collector.server_close()
    [client] = recorded.spans("steps.pass_on")
    by_name = {(span.name, span.kind): (pid, span) for pid, span in collector.spans}
    first, passed = by_name["steps.pass_on", Span.SPAN_KIND_SERVER]
    _, asking = by_name["steps.step", Span.SPAN_KIND_CLIENT]
    second, served = by_name["steps.step", Span.SPAN_KIND_SERVER]
    assert len({first, second, os.getpid()}) == 3
    assert int.from_bytes(passed.parent_span_id, "big") == client.context.span_id
    assert asking.parent_span_id == passed.span_id
    assert served.parent_span_id == asking.span_id
    assert {int.from_bytes(span.trace_id, "big") for span in (passed, asking, served)} == {client.context.trace_id}
    points = {one.key: one.value.string_value for one in served.attributes}
    assert points[names.POINT] == "[hosts=0,gpus=1]"


async def test_items_link_spans_of_two_processes(recorded: Recorded):
    """Q12: those that a process sends, and those that it receives."""
    collector = Collector()
    try:
        async with this_host().spawn_procs({"gpus": 1}, setup=Exporting(collector.server_port)) as procs:
            steps = await procs.spawn("steps", Step)
            with recorded.provider.get_tracer("program").start_as_current_span("training") as training:
                async with open_channel(capacity=1) as (port, receiver), trio.open_nursery() as nursery:
                    nursery.start_soon(steps.take.call_one, port.clone())
                    there = await receiver.receive()
                    await there.send(5)
                    await there.aclose()
                    nursery.start_soon(steps.send.call_one, port.clone(), 1)
                    assert await receiver.receive() == 0
    finally:
        await trio.to_thread.run_sync(collector.shutdown)
        collector.server_close()
    served = {span.name: span for _, span in collector.spans if span.kind == Span.SPAN_KIND_SERVER}
    take, send = served["steps.take"], served["steps.send"]
    assert linked(training) == [int.from_bytes(span.span_id, "big") for span in (take, send)]
    assert [int.from_bytes(link.span_id, "big") for link in take.links] == [training.get_span_context().span_id]
    assert not send.links


async def test_callee_that_is_not_traced_takes_the_call(recorded: Recorded):
    """Q12: also where nothing is pickled."""
    async with this_host().spawn_procs({"gpus": 1}, pickle="off") as procs:
        steps = await procs.spawn("steps", Step)
        assert await steps.step.call_one(5) == 5
        await steps.note.broadcast()
    assert recorded.kinds("steps.step") == ["CLIENT"]
    assert recorded.kinds("steps.note") == ["PRODUCER"]


async def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "trimesh.telemetry.spans", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'trimesh-actors\[telemetry\]'"):
        telemetry.instrument()
