"""What has happened to the members that a process owns: the newest events of all its meshes, as rows for readers."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from trimesh import limits
from trimesh._runtime.watch.causes import causes_of
from trimesh._wire import observed
from trimesh._wire.flight import SeenEvent
from trimesh.errors import place_name
from trimesh.events import Died, Failed, GaveUp, Lagged, Unacknowledged

if TYPE_CHECKING:
    from trimesh._runtime.recording.recorder import FlightRecorder
    from trimesh.events import Event, MemberEvent

_FAILURES: Final = (Died, Failed, GaveUp, Unacknowledged)


class Journal:
    """Keeps the newest `limits.OBSERVED_EVENTS` events of one process; the text of an error, never the error.

    Attributes:
        began_at: Unix time at which this process has joined its family; a controller does so with its outermost block.
        count: Events so far.
        recorder: Keeps them in a file, too; None without.
    """

    def __init__(self) -> None:
        self.began_at = time.time()
        self.count = 0
        self.recorder: FlightRecorder | None = None
        self._rows: deque[observed.EventRow] = deque(maxlen=limits.OBSERVED_EVENTS)

    def take(self, event: Event) -> None:
        """Note what has happened to a member."""
        if not isinstance(event, Lagged):
            self.count += 1
            row = _row(self.count, event)
            self._rows.append(row)
            if self.recorder is not None:
                stack = getattr(event, "stack", "")[: limits.RECORD_STACK_CHARS]
                self.recorder.note(SeenEvent(event=row, stack=stack))

    def after(self, number: int) -> list[observed.EventRow]:
        """Return the events that are kept and have a greater number, oldest first."""
        return [row for row in list(self._rows) if row.number > number]


def _row(number: int, event: MemberEvent) -> observed.EventRow:
    point = {label: event.point[label] for label in event.point}
    return observed.EventRow(
        number=number,
        at=time.time(),
        kind=type(event).__name__,
        name=place_name(event.mesh, point),
        mesh=event.mesh,
        point=point,
        incarnation=event.incarnation,
        text=_text(event),
        is_failure=isinstance(event, _FAILURES),
        causes=() if (error := _error(event)) is None else causes_of(error),
    )


def _error(event: Any) -> BaseException | None:
    return getattr(event, "error", None) or getattr(event, "cause", None)


def _text(event: Any) -> str:
    if (error := _error(event)) is not None:
        return f"{type(error).__name__}: {error}"[: limits.OBSERVED_TEXT_CHARS]
    if (seconds := getattr(event, "seconds", None)) is not None:
        return f"its Trio loop has not run for {seconds:.1f} s"
    if pid := getattr(event, "pid", None):
        return f"pid {pid} on {event.host}"
    return ""
