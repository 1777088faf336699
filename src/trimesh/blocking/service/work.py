"""`Slots`, `ReplayBuffer` and `Store`, without `await`."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any, Generic, Literal, TypeVar

from trimesh import limits, service
from trimesh.blocking.body import FacedBody, body_of
from trimesh.blocking.handle import FacedObject, home_of, inner_of
from trimesh.blocking.proc_mesh import ProcMesh
from trimesh.service.accounts.replay import By

T = TypeVar("T")


class Slots(FacedObject["service.Slots"]):
    """Permission to begin work that can still be used when it is ready; see `trimesh.service.Slots`."""

    def lease(self, group: int = 1) -> AbstractContextManager[service.Lease]:
        """Hold slots while the body runs: `with slots.lease() as lease:`; see `trimesh.service.Slots.lease`."""
        return body_of(self._inner.lease(group), "a lease of slots", self._home)

    def advance(self, *, version: int) -> None:
        """Go on to a version, once the generators have it; see `trimesh.service.Slots.advance`."""
        self._wait(self._inner.advance, version=version)

    def release(self, count: int) -> None:
        """Free slots of work that was handed on and will not be trained; see `trimesh.service.Slots.release`."""
        self._wait(self._inner.release, count)

    def statistics(self) -> service.SlotStatistics:
        """Return the state, in numbers of slots."""
        return self._now(self._inner.statistics)

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes; see `trimesh.service.Slots.state_dict`."""
        return self._now(self._inner.state_dict)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state, before the first lease; see `trimesh.service.Slots.load_state_dict`."""
        self._now(lambda: self._inner.load_state_dict(state))


class ReplayBuffer(FacedObject["service.ReplayBuffer[T]"], Generic[T]):
    """Stored work, each item accounted for once; see `trimesh.service.ReplayBuffer`."""

    def add(self, value: T, *, version: int | None = None, group: Hashable = None, priority: float = 1.0) -> None:
        """Store an item; wait while the buffer is full, unless it evicts; see `trimesh.service.ReplayBuffer.add`."""
        self._wait(self._inner.add, value, version=version, group=group, priority=priority)

    def take(self, count: int, *, max_age: int | None = None) -> list[T]:
        """Wait for `count` items and consume them, the oldest first; see `trimesh.service.ReplayBuffer.take`."""
        return self._wait(self._inner.take, count, max_age=max_age)

    def taking(self, count: int, *, max_age: int | None = None) -> AbstractContextManager[list[T]]:
        """Like `take`, but consumed when the body ends well: `with buffer.taking(64) as batch:`."""
        return body_of(self._inner.taking(count, max_age=max_age), "a batch of a replay buffer", self._home)

    def sample(self, count: int, *, max_age: int | None = None, by: By = "uniform") -> list[T]:
        """Wait until `count` items are there and draw them; see `trimesh.service.ReplayBuffer.sample`."""
        return self._wait(self._inner.sample, count, max_age=max_age, by=by)

    def advance(self, *, version: int) -> None:
        """Go on to a version, from which ages are counted; linked slots do so by themselves."""
        self._wait(self._inner.advance, version=version)

    def clear(self, *, reason: str) -> int:
        """Evict all stored items for this reason; return how many."""
        return self._now(lambda: self._inner.clear(reason=reason))

    def statistics(self) -> service.ReplayStatistics:
        """Return the state, in numbers of items."""
        return self._now(self._inner.statistics)

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes; see `trimesh.service.ReplayBuffer.state_dict`."""
        return self._now(self._inner.state_dict)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state, before the first item; see `trimesh.service.ReplayBuffer.load_state_dict`."""
        self._now(lambda: self._inner.load_state_dict(state))


class Store(FacedObject["service.Store"]):
    """Values by key; see `trimesh.service.Store`."""

    def put(self, key: str, value: Any, *, ttl: float | None = None) -> int:
        """Store a value as the newest version of a key, and return that; see `trimesh.service.Store.put`."""
        return self._wait(self._inner.put, key, value, ttl=ttl)

    def get(self, key: str, *, version: int | None = None) -> Any:
        """Return a value; see `trimesh.service.Store.get`."""
        return self._wait(self._inner.get, key, version=version)

    def get_into(self, key: str, destination: Any, *, version: int | None = None) -> int:
        """Copy a large value into memory that is there already; see `trimesh.service.Store.get_into`."""
        return self._wait(self._inner.get_into, key, destination, version=version)

    def wait_newer(self, key: str, version: int = 0) -> int:
        """Wait until a key has a version above `version`, and return the newest."""
        return self._wait(self._inner.wait_newer, key, version)

    def version(self, key: str) -> int:
        """Return the newest version of a key, 0 if it is not there."""
        return self._wait(self._inner.version, key)

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys that begin with `prefix`, sorted."""
        return self._wait(self._inner.keys, prefix)

    def delete(self, key: str) -> bool:
        """Remove all versions of a key; return whether there were any."""
        return self._wait(self._inner.delete, key)

    def statistics(self) -> service.StoreStatistics:
        """Return the state in numbers."""
        return self._wait(self._inner.statistics)


def open_slots(*, batch: int, staleness: int, version: int = 0) -> AbstractContextManager[Slots]:
    """Bound how stale work can be when it is used.

    `with open_slots(batch=64, staleness=2) as slots:`, inside of the block of a mesh. See
    `trimesh.service.open_slots` for arguments and errors.
    """
    body = body_of(service.open_slots(batch=batch, staleness=staleness, version=version), "slots")
    return FacedBody(body, lambda slots: Slots(slots, body))


def open_replay(
    *,
    capacity: int,
    capacity_bytes: int = limits.REPLAY_BYTES,
    key: Callable[[Any], int] | None = None,
    seed: int = 0,
    max_age: int | None = None,
    when_full: Literal["wait", "evict"] = "wait",
    slots: Slots | None = None,
    spill: str | os.PathLike[str] | None = None,
    spill_bytes: int = limits.REPLAY_SPILL_BYTES,
) -> AbstractContextManager[ReplayBuffer[Any]]:
    """Store work between those that make it and those that train.

    `with open_replay(capacity=10_000) as buffer:`, inside of the block of a mesh. See
    `trimesh.service.open_replay` for arguments and errors.
    """
    block = service.open_replay(
        capacity=capacity,
        capacity_bytes=capacity_bytes,
        key=key,
        seed=seed,
        max_age=max_age,
        when_full=when_full,
        slots=inner_of(slots),
        spill=spill,
        spill_bytes=spill_bytes,
    )
    body = body_of(block, "a replay buffer", home_of(slots))
    return FacedBody(body, lambda buffer: ReplayBuffer(buffer, body))


def open_store(
    procs: ProcMesh | None = None, *, capacity_bytes: int = limits.STORE_BYTES, retain: int = 1
) -> AbstractContextManager[Store]:
    """Keep values by key, beside those that make and use them.

    `with open_store(procs) as store:`, inside of the block of a mesh. See `trimesh.service.open_store` for arguments
    and errors.
    """
    block = service.open_store(inner_of(procs), capacity_bytes=capacity_bytes, retain=retain)
    body = body_of(block, "a store", home_of(procs))
    return FacedBody(body, lambda store: Store(store, body))
