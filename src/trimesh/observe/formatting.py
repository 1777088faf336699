"""Log formatters that add the coordinates of the logging code.

To install them:

    handler.setFormatter(observe.LogFormatter())        # 12:00:01 INFO trainers[gpus=3].step train: loss 0.4
    handler.setFormatter(observe.JsonLogFormatter())    # one JSON object a line
    queue_handler.addFilter(observe.Coordinates())      # where records are formatted in another task
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from trimesh._runtime.actors import caller_here
from trimesh._wire.messages import CallerPlace
from trimesh.errors import place_name

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
