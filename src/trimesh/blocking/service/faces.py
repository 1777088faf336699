"""The form without `await` of a pool, slots, a replay buffer or a store that came from elsewhere."""

from __future__ import annotations

from typing import Any, TypeVar, overload

from trimesh import service
from trimesh.blocking.handle import FacedObject
from trimesh.blocking.service.pool import Pool, PoolSession
from trimesh.blocking.service.work import ReplayBuffer, Slots, Store

A = TypeVar("A")
T = TypeVar("T")


@overload
def face(handle: service.Pool[A]) -> Pool[A]: ...
@overload
def face(handle: service.Slots) -> Slots: ...
@overload
def face(handle: service.ReplayBuffer[T]) -> ReplayBuffer[T]: ...
@overload
def face(handle: service.Store) -> Store: ...
def face(handle: Any) -> Any:
    """Return the form without `await` of a handle of `trimesh.service`: one that an endpoint was given, say.

    In an endpoint with `thread=True`: `face(self.pool).generate(prompt)`. The call has the deadline of the endpoint,
    and is cancelled with it.

    Raises:
        TypeError: It is no such handle.
    """
    match handle:
        case FacedObject():
            return handle  # pyright: ignore[reportUnknownVariableType]
        case service.PoolSession():
            return PoolSession(handle)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        case service.Pool():
            return Pool(handle)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        case service.Slots():
            return Slots(handle)
        case service.ReplayBuffer():
            return ReplayBuffer(handle)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        case service.Store():
            return Store(handle)
        case _:
            raise TypeError(
                f"this face takes a pool, slots, a replay buffer or a store, got {handle!r}: for meshes write "
                "trimesh.blocking.face(mesh)"
            )
