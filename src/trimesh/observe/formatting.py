"""Log formatters that add the coordinates of the logging code; snapshots as text for Prometheus.

To install them:

    handler.setFormatter(observe.LogFormatter())        # 12:00:01 INFO trainers[gpus=3].step train: loss 0.4
    handler.setFormatter(observe.JsonLogFormatter())    # one JSON object a line
    queue_handler.addFilter(observe.Coordinates())      # where records are formatted in another task
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from trimesh._runtime.actors import caller_here
from trimesh._wire.messages import CallerPlace
from trimesh.errors import place_name
from trimesh.observe.run_snapshot import RunSnapshot

_FIELDS: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_OWN: Final = frozenset({"member", "mesh", "point", "endpoint", "incarnation"})


class Coordinates(logging.Filter):
    """Passes every record and adds the coordinates of the code that made it.

    Attributes of the record: `member` (`mesh[label=0].endpoint`, or "-" outside of actors), `mesh`, `point` (a dict),
    `endpoint`, `incarnation`. Add it to a handler: a filter of a logger does not get records of child loggers.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the coordinates of the running code, unless the record has them."""
        add_coordinates(record)
        return True


def add_coordinates(record: logging.LogRecord) -> None:
    """Add the coordinates of the running code to a record, unless it has some."""
    if hasattr(record, "member"):
        return
    place = caller_here()
    point = {} if place is None else _point_of(place)
    name = "-" if place is None else place_name(place.mesh, point)
    record.mesh = "" if place is None else place.mesh
    record.point = point
    record.endpoint = "" if place is None else place.endpoint or ""
    record.incarnation = 0 if place is None else place.incarnation
    record.member = f"{name}.{place.endpoint}" if place is not None and place.endpoint else name


def _point_of(place: CallerPlace) -> dict[str, int]:
    found, rest = list[tuple[str, int]](), place.rank
    for label, size in zip(reversed(place.labels), reversed(place.sizes), strict=True):
        found.append((label, rest % max(size, 1)))
        rest //= max(size, 1)
    return dict(reversed(found))


class LogFormatter(logging.Formatter):
    """Formats records as text with coordinates.

    Args:
        fmt: Format of `logging.Formatter`, which may use the attributes of `Coordinates`, too.
        datefmt: Format of times, as for `logging.Formatter`.
    """

    def __init__(self, fmt: str | None = None, datefmt: str | None = None) -> None:
        super().__init__(fmt or "%(asctime)s %(levelname)s %(member)s %(name)s: %(message)s", datefmt)

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as text."""
        add_coordinates(record)
        return super().format(record)


class JsonLogFormatter(logging.Formatter):
    """Formats records as one JSON object a line: time, level, logger, message, coordinates, pid, fields of `extra`.

    A value of `extra` that JSON cannot encode is written as its `repr`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as JSON."""
        add_coordinates(record)
        said: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "pid": record.process,
        }
        said |= {name: value for name in sorted(_OWN) if (value := vars(record).get(name)) not in (None, "", {})}
        said |= {name: value for name, value in vars(record).items() if name not in _FIELDS | _OWN | said.keys()}
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            said["stack"] = self.formatStack(record.stack_info)
        return msgspec.json.encode(said, enc_hook=repr).decode()


# ---- a snapshot as text for Prometheus: base units, and no label with a value for each rank --------------------------


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


def _one(name: str, kind: str, text: str, value: float) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    yield f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"


def _family(name: str, kind: str, text: str, label: str, values: Mapping[str, int]) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    for key, value in sorted(values.items()):
        yield f'{name}{{{label}="{key}"}} {value}'
