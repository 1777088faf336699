"""What to call, as every verb says it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from trimesh._runtime.values.endpoint_spec import EndpointSpec
from trimesh._wire.memory import DefinitionId
from trimesh._wire.messages import CallerPlace, SentView
from trimesh.errors import Origin


class Request(msgspec.Struct, frozen=True, eq=False):
    """What to call.

    Attributes:
        args, kwargs: Already bound against the signature.
        origin: Coordinates of the rank at an index of the targets.
        spec: The endpoint; None for those of agents, which are known by name.
        definitions: What the callee must know besides, for values that are encoded within `args`.
        each: The arguments of each target, in place of `args` and `kwargs`, when they differ.
        view, caller: What the head says of where it goes to and where it comes from.
        abandon_after: Seconds for which a caller that gives up waits for acknowledgements; None for the usual bound.
    """

    mesh: str
    endpoint: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    origin: Callable[[int], Origin]
    spec: EndpointSpec | None = None
    definitions: Sequence[DefinitionId] = ()
    abandon_after: float | None = None
    each: Sequence[tuple[tuple[Any, ...], dict[str, Any]]] | None = None
    view: SentView | None = None
    caller: CallerPlace | None = None

    @property
    def what(self) -> str:
        """The endpoint's name for people."""
        return f"{self.mesh}.{self.endpoint}"

    def __str__(self) -> str:
        return self.what
