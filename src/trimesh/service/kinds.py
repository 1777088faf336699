"""How pools, slots, replay buffers and stores travel in a family where nothing is pickled (`pickle="off"`)."""

from __future__ import annotations

from typing import Any

import msgspec

from trimesh._wire.typed.kinds import DecodeSource, ValueKind, register_kind
from trimesh.actor.actor_mesh import ActorMesh
from trimesh.errors import ProtocolError
from trimesh.service.pool.call_options import CallOptions, WhenFull
from trimesh.service.pool.front import PoolFront
from trimesh.service.pool.pool import Pool, PoolSession
from trimesh.service.store.shard import StoreShard
from trimesh.service.store.store import Store
from trimesh.service.work.replay import ReplayBuffer, ReplayFront
from trimesh.service.work.slots import Slots, SlotsFront


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
        raise ProtocolError(f"the options of a pool do not fit: {error}") from error
    if not isinstance(name, str):
        raise ProtocolError(f"a pool must have a name, got {name!r:.100}")
    return (PoolSession if is_session else Pool)(None, _front_of(front, PoolFront), name, chosen)


def _take_pool_apart(pool: Pool[Any], _: object) -> tuple[Any, ...]:
    _, (_, front, name, options) = pool.__reduce__()
    return isinstance(pool, PoolSession), front, name, *msgspec.structs.astuple(options)


def _put_slots_together(_: DecodeSource, front: Any = None) -> Slots:
    return Slots(None, _front_of(front, SlotsFront))


def _put_buffer_together(_: DecodeSource, front: Any = None) -> ReplayBuffer[Any]:
    return ReplayBuffer(None, _front_of(front, ReplayFront))


def _put_store_together(_: DecodeSource, shards: Any = None) -> Store:
    return Store(_front_of(shards, StoreShard))


def _take_store_apart(store: Store, _: object) -> tuple[Any]:
    return (store.__reduce__()[1][0],)


def _front_alone(handle: Slots | ReplayBuffer[Any], _: object) -> tuple[Any]:
    return (handle.__reduce__()[1][1],)


def register() -> None:
    """Register the kinds of this module."""
    register_kind(ValueKind("pool", Pool, _take_pool_apart, _put_pool_together))
    register_kind(ValueKind("slots", Slots, _front_alone, _put_slots_together))
    register_kind(ValueKind("replay buffer", ReplayBuffer, _front_alone, _put_buffer_together))
    register_kind(ValueKind("store", Store, _take_store_apart, _put_store_together))
