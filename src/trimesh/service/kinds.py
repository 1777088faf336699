"""Serialization of the handles of pools, slots, replay buffers and stores without pickle (`pickle="off"`)."""

from __future__ import annotations

from typing import Any

import msgspec

from trimesh._wire.typed.codec import DecodeSource, ValueKind, register_kind
from trimesh.actor.actor_mesh import ActorMesh
from trimesh.errors import ProtocolError
from trimesh.service.pool.engine import CallOptions, PoolFront, WhenFull
from trimesh.service.pool.pool import Pool, PoolSession
from trimesh.service.replay import ReplayBuffer, ReplayFront
from trimesh.service.slots import Slots, SlotsFront
from trimesh.service.store import Store, StoreShard


def _front_of(front: Any, cls: type) -> ActorMesh:
    if not isinstance(front, ActorMesh) or front.__reduce__()[1][2] is not cls:
        raise ProtocolError(f"a handle of a service must come with its {cls.__qualname__}, got {front!r:.100}")
    return front


def _put_pool_together(
    _: DecodeSource, is_session: Any = None, front: Any = None, name: Any = None, *options: Any
) -> Pool[Any]:
    try:
        chosen = CallOptions(*msgspec.convert(options, tuple[int, float, Any, WhenFull, str | None]))
        chosen.check()
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        raise ProtocolError(f"a handle of a pool must have valid options: {error}") from error
    if not isinstance(name, str):
        raise ProtocolError(f"a pool must have a name, got {name!r:.100}")
    return (PoolSession if is_session else Pool)(_front_of(front, PoolFront), name, chosen)


def _take_pool_apart(pool: Pool[Any], _: object) -> tuple[Any, ...]:
    _, (front, name, options) = pool.__reduce__()
    return isinstance(pool, PoolSession), front, name, *msgspec.structs.astuple(options)


def _take_apart(handle: Any, _: object) -> tuple[Any, ...]:
    front: tuple[Any, ...] = handle.__reduce__()[1]
    return front


def _kind_of(name: str, handle: type, front_class: type) -> ValueKind:
    """Return the kind of a handle that consists of its front."""

    def put_together(_: DecodeSource, front: Any = None) -> Any:
        return handle(_front_of(front, front_class))

    return ValueKind(name, handle, _take_apart, put_together)


def register() -> None:
    register_kind(ValueKind("pool", Pool, _take_pool_apart, _put_pool_together))
    register_kind(_kind_of("slots", Slots, SlotsFront))
    register_kind(_kind_of("replay buffer", ReplayBuffer, ReplayFront))
    register_kind(_kind_of("store", Store, StoreShard))
