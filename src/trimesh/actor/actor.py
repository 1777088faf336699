"""`Actor`: base class of objects that live in other processes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from trimesh._runtime.values import ENDPOINTS, EndpointSpec, bind_endpoints
from trimesh.actor.endpoint import EndpointMethod

if TYPE_CHECKING:
    from trimesh.actor.handle_types import HandleAttributes
else:
    HandleAttributes = object

MESH_ATTRIBUTES: Final = frozenset(
    {
        "alive",
        "events",
        "exclude",
        "extent",
        "flatten",
        "name",
        "points",
        "rename",
        "size",
        "slice",
        "split",
        "statistics",
    }
)
"""Attributes of a mesh handle besides its endpoints; an endpoint cannot have one of these names."""


class _NotHere:
    """An attribute that actor classes have in Ray only; reading it raises an error with the spelling used here."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        from trimesh.actor.options import no_attribute  # noqa: PLC0415 - only errors need it

        raise no_attribute(owner, self._name)


class Actor(HandleAttributes):
    """Base class of actors.

    A subclass has a plain `__init__`, which runs in the actor's own process, endpoints (methods marked with
    `@endpoint`), and optionally `lifespan`, an `@asynccontextmanager` method: set-up before its `yield`, clean-up
    after it. Background tasks belong to a nursery around the `yield`.

    `await procs.spawn("name", Subclass, ...)` returns a handle on the actors of all processes. Type checkers see it as
    an object of the subclass, with the attributes of a mesh (`extent`, `slice`, ...; see `handle_types`).
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Collect the endpoints of the class.

        Raises:
            TypeError: An endpoint has the name of a mesh attribute; endpoints of one group state different
                concurrency; `lifespan` is no async context manager.
        """
        super().__init_subclass__(**kwargs)
        found: dict[str, EndpointSpec] = {}
        for base in reversed(cls.__mro__):
            for name, value in vars(base).items():
                if isinstance(value, EndpointMethod):
                    # A decorator below @endpoint may have given the function another name.
                    spec = value.spec
                    found[name] = spec if spec.name == name else msgspec.structs.replace(spec, name=name)
                elif name in found:
                    del found[name]  # overridden by something that is no endpoint
        _check_names(cls, found)
        _check_groups(cls, found)
        _check_lifespan(cls)
        setattr(cls, ENDPOINTS, bind_endpoints(cls, found))

    if not TYPE_CHECKING:
        options = _NotHere()
        remote = _NotHere()

        def __getattr__(self, name: str) -> Any:
            if name in MESH_ATTRIBUTES:
                raise AttributeError(
                    f"{name} belongs to a mesh of {type(self).__name__}, not to one live actor: "
                    "use trimesh.current_point(), current_rank() or current_size() here"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _check_names(cls: type, endpoints: Mapping[str, EndpointSpec]) -> None:
    for name in endpoints:
        if name.startswith("_"):
            raise TypeError(
                f"the name of an endpoint must not begin with an underscore, which marks a private method, got "
                f"{cls.__qualname__}.{name}: call it {name.strip('_') or 'step'!r}"
            )
        if name in MESH_ATTRIBUTES or name == "lifespan":
            raise TypeError(
                f"an endpoint must not be called {name!r}, which mesh handles use themselves: "
                f"rename the endpoint of {cls.__qualname__}"
            )


def _check_groups(cls: type, endpoints: Mapping[str, EndpointSpec]) -> None:
    stated: dict[str, EndpointSpec] = {}
    for spec in endpoints.values():
        if spec.group is None:
            continue
        first = stated.setdefault(spec.group, spec)
        if first.concurrency != spec.concurrency:
            raise TypeError(
                f"endpoints of one group must state the same concurrency: in group {spec.group!r} of "
                f"{cls.__qualname__}, {first.name} says {first.concurrency} and {spec.name} says {spec.concurrency}"
            )


def _check_lifespan(cls: type) -> None:
    lifespan = vars(cls).get("lifespan")
    if inspect.isasyncgenfunction(lifespan) or inspect.iscoroutinefunction(lifespan):
        raise TypeError(
            f"{cls.__qualname__}.lifespan must return an async context manager, got a plain async function: "
            "put @contextlib.asynccontextmanager above it, and a `yield` into it"
        )
