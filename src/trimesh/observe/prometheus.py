"""Snapshots as text for Prometheus: base units, and no label with a value for each rank."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from trimesh import limits
from trimesh._wire.observed import EndpointRow, MetricRow
from trimesh.observe.run_snapshot import RunSnapshot


def prometheus_text(snapshot: RunSnapshot) -> str:
    """Return the numbers of a run in the text format 0.0.4 of Prometheus."""
    return "".join(f"{line}\n" for line in _lines(snapshot))


def _lines(seen: RunSnapshot) -> Iterator[str]:
    yield from _family(
        "trimesh_procs", "gauge", "Processes by state.", "state", Counter(one.state for one in seen.procs)
    )
    yield from _family(
        "trimesh_actors", "gauge", "Actors by state.", "state", Counter(one.state for one in seen.actors)
    )
    yield from _family(
        "trimesh_calls", "gauge", "Calls under way by state.", "state", Counter(one.state for one in seen.calls)
    )
    yield from _one(
        "trimesh_calls_queued", "gauge", "Calls that wait in mailboxes.", sum(a.queued for a in seen.actors)
    )
    oldest = max((call.age for call in seen.calls), default=0.0)
    yield from _one("trimesh_oldest_call_age_seconds", "gauge", "Age of the oldest call under way.", oldest)
    stalled = max((proc.stalled_seconds for proc in seen.procs), default=0.0)
    yield from _one("trimesh_loop_stall_seconds", "gauge", "Longest time for which a loop has not run.", stalled)
    memory = sum(proc.memory_bytes for proc in seen.procs)
    yield from _one("trimesh_resident_memory_bytes", "gauge", "Resident memory of all processes.", memory)
    sent = sum(link.bytes_sent for link in seen.links)
    yield from _one("trimesh_link_sent_bytes_total", "counter", "Bytes sent over open links.", sent)
    messages = sum(link.messages_sent for link in seen.links)
    yield from _one("trimesh_link_sent_messages_total", "counter", "Messages sent over open links.", messages)
    waiting = sum(link.queued_bytes for link in seen.links)
    yield from _one("trimesh_link_queued_bytes", "gauge", "Bytes that wait because a peer is slow.", waiting)
    granted = sum(grant.nbytes for grant in seen.grants)
    yield from _one("trimesh_granted_memory_bytes", "gauge", "Memory that other processes may reach.", granted)
    kinds = Counter(event.kind for event in seen.events)
    yield from _family("trimesh_recent_events", "gauge", "Kept events by kind.", "kind", kinds)
    yield from _runtime_counters(seen)
    dropped = seen.samples_dropped
    yield from _one("trimesh_samples_dropped_total", "counter", "Logged samples that were dropped.", dropped)
    yield from _programs_own(seen.metrics)


def _runtime_counters(seen: RunSnapshot) -> Iterator[str]:
    cpu = math.fsum(proc.cpu_seconds for proc in seen.procs)
    yield from _one("trimesh_cpu_seconds_total", "counter", "Processor time of all processes.", cpu)
    memory = sum(proc.gpu_memory_bytes for proc in seen.procs)
    yield from _one("trimesh_gpu_memory_bytes", "gauge", "Memory of all processes on GPUs.", memory)
    yield from _one("trimesh_call_retries_total", "counter", "Calls that were sent again.", seen.retries)
    for kind, text in (("Restarted", "Restarts of members."), ("Died", "Deaths of members.")):
        counts = {mesh: kinds[kind] for mesh, kinds in seen.happened.items() if kind in kinds}
        yield from _family(f"trimesh_{kind.lower()}_total", "counter", text, "mesh", counts)
    endpoints = dict[tuple[str, str], list[EndpointRow]]()
    for row in seen.endpoints:
        endpoints.setdefault((row.mesh, row.endpoint), []).append(row)
    labels = {key: f'mesh="{_label(key[0])}",endpoint="{_label(key[1])}"' for key in sorted(endpoints)}
    for field, text in (
        ("calls", "Calls that began."),
        ("errors", "Calls that raised."),
        ("cancelled", "Calls that were cancelled."),
        ("bytes_received", "Bytes of arguments."),
    ):
        yield f"# HELP trimesh_endpoint_{field}_total {text}"
        yield f"# TYPE trimesh_endpoint_{field}_total counter"
        for key, label in labels.items():
            yield f"trimesh_endpoint_{field}_total{{{label}}} {sum(getattr(row, field) for row in endpoints[key])}"
    yield "# HELP trimesh_endpoint_seconds Durations of ended calls in their slots."
    yield "# TYPE trimesh_endpoint_seconds histogram"
    for key, label in labels.items():
        yield from _buckets(
            "trimesh_endpoint_seconds", label, limits.LATENCY_BOUNDS, [row.counts for row in endpoints[key]]
        )


def _buckets(name: str, label: str, bounds: Sequence[float], each: Sequence[Sequence[int]]) -> Iterator[str]:
    """Yield the buckets of several members, added up, and their count."""
    same = [counts for counts in each if len(counts) == len(bounds) + 1]
    total = 0
    for place, bound in enumerate((*bounds, math.inf)):
        total += sum(counts[place] for counts in same)
        yield f'{name}_bucket{{{label},le="{"+Inf" if bound == math.inf else f"{bound:g}"}"}} {total}'
    yield f"{name}_count{{{label}}} {total}"


def _one(name: str, kind: str, text: str, value: float) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    yield f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"


def _family(name: str, kind: str, text: str, label: str, values: Mapping[str, int]) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    for key, value in sorted(values.items()):
        yield f'{name}{{{label}="{_label(key)}"}} {value}'


# ---- metrics of the program: summed or summarised over the members of a mesh -----------------------------------------


def _programs_own(rows: Sequence[MetricRow]) -> Iterator[str]:
    found = dict[tuple[str, str], dict[str, list[MetricRow]]]()
    for row in rows:
        found.setdefault((row.metric, row.kind), {}).setdefault(row.mesh, []).append(row)
    used = set[str]()
    for (metric, kind), meshes in sorted(found.items()):
        name = re.sub(r"[^a-zA-Z0-9_]", "_", metric)
        name = f"_{name}" if name[0].isdigit() else name
        if kind == "counter" and not name.endswith("_total"):
            name += "_total"
        while name in used:  # a/b and a_b are two metrics
            name += "_"
        used.add(name)
        text = f"Metric {_printable(metric)} of the program.".replace("\\", "\\\\")
        yield f"# HELP {name} {text}"
        yield f"# TYPE {name} {'gauge' if kind == 'value' else kind}"
        for mesh, members in sorted(meshes.items()):
            yield from _of_mesh(name, kind, f'mesh="{_label(mesh or "controller")}"', members)


def _of_mesh(name: str, kind: str, label: str, members: Sequence[MetricRow]) -> Iterator[str]:
    values = [row.value for row in members]
    if kind == "counter":
        yield f"{name}{{{label}}} {math.fsum(values):.17g}"
    elif kind == "histogram":
        bounds = members[0].bounds
        same = [row for row in members if row.bounds == bounds]
        yield from _buckets(name, label, bounds, [row.counts for row in same])
        yield f"{name}_sum{{{label}}} {math.fsum(row.value for row in same):.17g}"
    else:
        for word, value in (("mean", sum(values) / len(values)), ("min", min(values)), ("max", max(values))):
            yield f'{name}{{{label},over="{word}"}} {value:.17g}'


def _label(text: str) -> str:
    return _printable(text).replace("\\", "\\\\").replace('"', '\\"')


def _printable(text: str) -> str:
    return "".join(one if one.isprintable() else f"\\x{ord(one):02x}" for one in text)
