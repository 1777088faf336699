"""`SimulatedTimeline`: when simulated ranks would do what, as a trace that Perfetto shows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from trimesh import limits
from trimesh.tensor.controller.trace import named, shown, span, trace_bytes, track

if TYPE_CHECKING:
    from trimesh.tensor.controller.plan import Line


class SimulatedTimeline:
    """What ranks have done, at most `limits.TENSOR_TRACE_EVENTS_MAX` of it.

    Attributes:
        missing: Events beyond the bound, which are not kept.
    """

    def __init__(self) -> None:
        self.missing = 0
        self._events: list[tuple[int, str, Line | None, float, float, int, bool]] = []

    def add(
        self, rank: int, name: str, line: Line | None, begun: float, seconds: float, sent: int, *, is_sending: bool
    ) -> None:
        """Take one event."""
        if len(self._events) >= limits.TENSOR_TRACE_EVENTS_MAX:
            self.missing += 1
            return
        self._events.append((rank, name, line, begun, seconds, sent, is_sending))

    def clear(self) -> None:
        self.missing = 0
        self._events.clear()

    def trace(self, names: Sequence[tuple[int, str]]) -> Iterator[bytes]:
        """Yield a file in the JSON trace event format.

        Args:
            names: Ranks, and what they are called.
        """
        return trace_bytes(self._all(names), {"missing": self.missing})

    def _all(self, names: Sequence[tuple[int, str]]) -> Iterator[dict[str, Any]]:
        for rank, name in names:
            yield from track(rank + 1, 1, name, ("operators", "collectives"))
        for rank, name, line, begun, seconds, sent, is_sending in self._events:
            arguments: dict[str, Any] = {} if line is None else {"line": shown(line)}
            kind, thread = "operator", 1
            if is_sending:
                arguments["sent_bytes"] = sent
                kind, thread = "collective", 2
            yield span(rank + 1, thread, kind, named(name, line), begun, seconds, arguments)
