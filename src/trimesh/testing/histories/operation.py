"""One operation of a history: who asked for what, when, and what came of it. PURE."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Literal, cast

import attrs

from trimesh.shape.point import place_name

Call = tuple[Any, ...]
"""What was asked: the name of the operation and its arguments, as `("write", "x", 3)`."""

Moment = tuple[float, int]
"""Seconds, and which of the events of that time it was; two events with equal moments happened in any order."""

Status = Literal["ok", "fail", "unknown"]


@attrs.frozen
class Operation:
    """One operation.

    Attributes:
        client: Who asked, as a point or a name; of one client several may be under way.
        call: What for.
        begin: When.
        status: "ok": it has happened, and `result` came back. "fail": it has not happened, and never will. "unknown":
            it may have happened, or may yet, at any time after `begin`.
        result: What came back.
        end: When that was known; None for what is under way still.
    """

    client: Hashable
    call: Call
    begin: Moment
    status: Status = "unknown"
    result: Any = None
    end: Moment | None = None

    def __str__(self) -> str:
        return f"{client_text(self.client)} {call_text(self.call)} {self.outcome}"

    @property
    def outcome(self) -> str:
        """What came of it, for people: `-> 3`, `failed`, `unknown`."""
        return f"-> {self.result!r}" if self.status == "ok" else "failed" if self.status == "fail" else "unknown"


def client_text(client: Hashable) -> str:
    return place_name("", cast("Mapping[str, int]", client)) if isinstance(client, Mapping) else str(client)


def call_text(call: Call) -> str:
    """Return what was asked, for people: `write('x', 3)`."""
    return f"{call[0]}({', '.join(map(repr, call[1:]))})"
