"""A snapshot as text that Prometheus reads: base units, and no label whose values grow with ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from trimesh.observe.merging import RunSnapshot


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
    yield from _one("trimesh_loop_stall_seconds", "gauge", "For how long the most stalled loop has not run.", stalled)
    memory = sum(proc.memory_bytes for proc in seen.procs)
    yield from _one("trimesh_resident_memory_bytes", "gauge", "Resident memory of all processes.", memory)
    sent = sum(link.bytes_sent for link in seen.links)
    yield from _one("trimesh_link_sent_bytes_total", "counter", "Bytes sent by links that are open.", sent)
    messages = sum(link.messages_sent for link in seen.links)
    yield from _one("trimesh_link_sent_messages_total", "counter", "Messages sent by links that are open.", messages)
    waiting = sum(link.queued_bytes for link in seen.links)
    yield from _one("trimesh_link_queued_bytes", "gauge", "Bytes that wait because a peer is slow.", waiting)
    granted = sum(grant.nbytes for grant in seen.grants)
    yield from _one("trimesh_granted_memory_bytes", "gauge", "Memory that other processes may reach.", granted)
    kinds = Counter(event.kind for event in seen.events)
    yield from _family("trimesh_recent_events", "gauge", "Events that are kept, by kind.", "kind", kinds)


def _one(name: str, kind: str, text: str, value: float) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    yield f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"


def _family(name: str, kind: str, text: str, label: str, values: Mapping[str, int]) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    for key, value in sorted(values.items()):
        yield f'{name}{{{label}="{key}"}} {value}'
