"""What the runtime knows about an endpoint: read from the class, used on both sides of the wire."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs

ENDPOINTS: Final = "__trimesh_endpoints__"
"""Attribute of an actor class that holds its endpoints by name."""


class Kind(enum.Enum):
    """How an endpoint runs."""

    ASYNC = "async"
    """A coroutine function, on the Trio thread."""
    INLINE = "inline"
    """A plain function, on the Trio thread; nothing else runs meanwhile."""
    THREAD = "thread"
    """A plain function, in a worker thread."""
    GENERATOR = "generator"
    """An async generator function, on the Trio thread; `stream` calls it."""


@attrs.frozen
class EndpointSpec:
    """One endpoint of an actor class.

    Attributes:
        name: Attribute of the class.
        fn: The plain function.
        kind: How it runs.
        concurrency: How many of its group may run at once on one actor.
        group: Name of the group it shares slots with, or None for the one slot of the actor.
        idempotent: Running it twice does no harm; only then may it be retried.
        signature: Without `self`.
    """

    name: str
    fn: Callable[..., Any]
    kind: Kind
    concurrency: int
    group: str | None
    idempotent: bool
    signature: inspect.Signature

    @property
    def slots(self) -> str:
        """Key of the slots that it takes: of its group, of its own, or of the actor (rule C4)."""
        if self.group is not None:
            return f"group {self.group}"
        return f"endpoint {self.name}" if self.concurrency != 1 else ""


def endpoints_of(cls: type) -> Mapping[str, EndpointSpec]:
    """Return the endpoints of an actor class by name."""
    found: Mapping[str, EndpointSpec] = getattr(cls, ENDPOINTS, {})
    return found
