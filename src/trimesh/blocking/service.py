"""Blocking pools, slots, replay buffers and stores, for plain scripts, notebooks and threads.

`from trimesh.blocking.service import open_pool`, then `with open_pool(generators) as pool: pool.generate(prompt)`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Generic, Literal, ParamSpec, TypeVar, cast, overload

import trio

from trimesh import limits, service
from trimesh.actor.options import Retry
from trimesh.actor.verbs import Outcome
from trimesh.blocking.calls import (
    Endpoint,
    FacedObject,
    Verb,
    bound,
    calls_here,
    calls_in_trio,
    enters,
    home_of,
    inner_of,
    returns_face,
    waits,
)
from trimesh.blocking.meshes import ActorMesh, ProcMesh
from trimesh.blocking.work import AnyBody, CallFuture, Each, FacedBody, body_of, submit
from trimesh.service.accounts import By
from trimesh.service.dispatch import PoolRoute
from trimesh.service.pool.pool import MapVerb, MapVerbs, SettledMapVerbs

__all__ = [
    "Pool",
    "PoolSession",
    "ReplayBuffer",
    "Slots",
    "Store",
    "face",
    "open_pool",
    "open_replay",
    "open_slots",
    "open_store",
]

A = TypeVar("A")
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class PoolVerb(Verb[P, T]):
    """An endpoint of the replicas of a pool."""

    __slots__ = ()

    def submit(self, /, *args: P.args, **kwargs: P.kwargs) -> CallFuture[T]:
        """Make a request and return its future. The block of the pool owns the request and waits for it.

        A request made in a pause waits for its end, so the block of the pause must not wait for the request.
        """
        return submit(self._work(args, kwargs), self._home, at_home=True)

    def stream(self, /, *args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[Iterator[T]]:
        """Read the items of an endpoint that is an async generator: `pool.stream.generate(prompt)`."""
        inner = cast("service.PoolEndpoint[P, T]", self._verb)
        body = body_of(bound(inner.stream, args, kwargs)(), f"a stream of {inner!r}", self._home)
        return FacedBody(body, lambda items: Each(items, self._home))


class Pool(FacedObject["service.Pool[A]"], Generic[A]):
    """Replicas of an actor behind one name; see `trimesh.service.Pool`.

    `pool.generate(prompt)` runs the endpoint `generate` on one replica and waits for its result; `pool.generate.submit`
    returns a future. `pool[Generator.generate]` is the same verb with types. Sent to an actor it arrives as the pool of
    `trimesh.service`.
    """

    options = returns_face(calls_here(service.Pool[Any].options))
    paused = enters(service.Pool[Any].paused, "a pause of {0!r}")
    autoscale = enters(service.Pool[Any].autoscale, "autoscaling of {0!r}")
    resize = waits(service.Pool[Any].resize)
    cancel = calls_in_trio(service.Pool[Any].cancel)
    cancel_all = calls_in_trio(service.Pool[Any].cancel_all)
    statistics = calls_in_trio(service.Pool[Any].statistics)

    def session(self, name: str) -> AbstractContextManager[PoolSession[A]]:
        """Send requests to the same replica while it lives: `with pool.session("conversation-7") as chat:`."""
        body = body_of(self._inner.session(name), f"a session of {self._inner!r}", self._home)
        return FacedBody(body, lambda session: PoolSession(session, self._home))

    @property
    def map(self) -> PoolMaps:
        """Run an endpoint once for each item: `with pool.map.generate(prompts) as results:`.

        `for index, value in results` yields results as they arrive; see `trimesh.service.Pool.map`.
        """
        return PoolMaps(self._inner.map, self._home)

    @property
    def map_settled(self) -> SettledPoolMaps:
        """Like `map`, but `for index, outcome in results`: a failure ends only its item.

        See `trimesh.service.Pool.map_settled`.
        """
        return SettledPoolMaps(self._inner.map_settled, self._home)

    @property
    def stream(self) -> PoolStreams:
        """Read an endpoint that is an async generator: `with pool.stream.generate(prompt) as tokens:`.

        `for token in tokens` yields its items; see `trimesh.service.Pool.stream`.
        """
        return PoolStreams(self)

    def rolling(self, at_most: int = 1) -> AbstractContextManager[Iterator[type[A]]]:
        """Take one replica after the other out of service: `with pool.rolling() as replicas: for replica in replicas`.

        Each is the blocking mesh of one replica; see `trimesh.service.Pool.rolling`.
        """
        home = self._home

        def show(mesh: Any) -> type[A]:
            return cast("type[A]", ActorMesh(mesh, home))

        body = body_of(self._inner.rolling(at_most), f"a roll of {self._inner!r}", home)
        return FacedBody(body, lambda replicas: map(show, Each(replicas, home)))

    def each(self, update: Callable[[type[A]], object], *, at_most: int = 1) -> None:
        """Update every replica, and those that come later: `pool.each(lambda replica: replica.pull.call(7))`.

        `update` is a plain function of the blocking mesh of one replica, called in a thread of its own; see
        `trimesh.service.Pool.each`.
        """
        home = self._home
        if not callable(update):
            raise TypeError(f"each takes a function of the mesh of a replica, got {update!r}")

        async def update_one(mesh: Any) -> None:
            await trio.to_thread.run_sync(update, cast("type[A]", ActorMesh(mesh, home)))

        self._wait(self._inner.each, update_one, at_most=at_most)

    def __getitem__(self, endpoint: Endpoint[P, R]) -> PoolVerb[P, R]:
        """Return the verb of an endpoint with its types: `pool[Generator.generate](prompt)`."""
        return PoolVerb(self._inner[endpoint], self._home)

    def __getattr__(self, name: str) -> PoolVerb[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return PoolVerb(getattr(self._inner, name), self._home)


class PoolSession(Pool[A]):
    """A pool whose requests go to one replica while it lives."""

    @property
    def moved(self) -> bool:
        """True if the session had to leave its first replica, whose state for it is lost."""
        return self._now(lambda: cast("service.PoolSession[A]", self._inner).moved)


class PoolStreams:
    """The endpoints of a pool as streams: `pool.stream.generate(prompt)`."""

    def __init__(self, pool: Pool[Any]) -> None:
        self._pool = pool

    def __getitem__(self, endpoint: Endpoint[P, R]) -> Callable[P, AbstractContextManager[Iterator[R]]]:
        """Return an endpoint with its types: `pool.stream[Generator.generate](prompt)`."""
        return self._pool[endpoint].stream

    def __getattr__(self, name: str) -> Callable[..., AbstractContextManager[Iterator[Any]]]:
        return cast("PoolVerb[..., Any]", getattr(self._pool, name)).stream


class PoolMaps:
    """The endpoints of a pool as maps: `pool.map.generate(prompts)`."""

    def __init__(self, inner: MapVerbs, home: AnyBody | None) -> None:
        self._inner = inner
        self._home = home

    def __getitem__(self, endpoint: Endpoint[P, R]) -> PoolMapVerb[R]:
        """Return an endpoint with the type of its result: `pool.map[Generator.generate](prompts)`."""
        return PoolMapVerb(self._inner[endpoint], self._home)

    def __getattr__(self, name: str) -> PoolMapVerb[Any]:
        return PoolMapVerb(getattr(self._inner, name), self._home)


class SettledPoolMaps:
    """The endpoints of a pool as maps of outcomes: `pool.map_settled.generate(prompts)`."""

    def __init__(self, inner: SettledMapVerbs, home: AnyBody | None) -> None:
        self._inner = inner
        self._home = home

    def __getitem__(self, endpoint: Endpoint[P, R]) -> PoolMapVerb[Outcome[R]]:
        """Return an endpoint with the type of its result: `pool.map_settled[Generator.generate](prompts)`."""
        return PoolMapVerb(self._inner[endpoint], self._home)

    def __getattr__(self, name: str) -> PoolMapVerb[Outcome[Any]]:
        return PoolMapVerb(getattr(self._inner, name), self._home)


class PoolMapVerb(Generic[R]):
    """One endpoint of a pool, to be run for each item."""

    def __init__(self, inner: MapVerb[R], home: AnyBody | None) -> None:
        self._inner = inner
        self._home = home

    def __call__(
        self, items: Iterable[Any], *, window: int | None = None
    ) -> AbstractContextManager[Iterator[tuple[int, R]]]:
        """See `Pool.map`.

        Args:
            items: Iterated in the thread of Trio, so that taking an item must not block, nor wait for calls.
            window: Items that may be under way (`limits.MAP_WINDOW`).
        """
        body = body_of(self._inner(map(inner_of, items), window=window), "the results of a pool", self._home)
        return FacedBody(body, lambda results: Each(results, self._home))


class Slots(FacedObject["service.Slots"]):
    """Permits for work that will not be too stale when it is used; see `trimesh.service.Slots`."""

    lease = enters(service.Slots.lease, "a lease of slots")
    advance = waits(service.Slots.advance)
    release = waits(service.Slots.release)
    statistics = calls_in_trio(service.Slots.statistics)
    state_dict = calls_in_trio(service.Slots.state_dict)
    load_state_dict = calls_in_trio(service.Slots.load_state_dict)


class ReplayBuffer(FacedObject["service.ReplayBuffer[T]"], Generic[T]):
    """Stored work, each item accounted for once; see `trimesh.service.ReplayBuffer`."""

    def add(self, value: T, *, version: int | None = None, group: Hashable = None, priority: float = 1.0) -> None:
        """Store an item; wait while the buffer is full, unless it evicts; see `trimesh.service.ReplayBuffer.add`."""
        self._wait(self._inner.add, value, version=version, group=group, priority=priority)

    def take(self, count: int, *, max_age: int | None = None) -> list[T]:
        """Wait for `count` items and consume them, the oldest first; see `trimesh.service.ReplayBuffer.take`."""
        return self._wait(self._inner.take, count, max_age=max_age)

    def taking(self, count: int, *, max_age: int | None = None) -> AbstractContextManager[list[T]]:
        """Like `take`, but consume the items when the body ends without error: `with buffer.taking(64) as batch:`."""
        return body_of(self._inner.taking(count, max_age=max_age), "a batch of a replay buffer", self._home)

    def sample(self, count: int, *, max_age: int | None = None, by: By = "uniform") -> list[T]:
        """Wait until `count` items are there and draw them; see `trimesh.service.ReplayBuffer.sample`."""
        return self._wait(self._inner.sample, count, max_age=max_age, by=by)

    advance = waits(service.ReplayBuffer[Any].advance)
    clear = calls_in_trio(service.ReplayBuffer[Any].clear)
    statistics = calls_in_trio(service.ReplayBuffer[Any].statistics)
    state_dict = calls_in_trio(service.ReplayBuffer[Any].state_dict)
    load_state_dict = calls_in_trio(service.ReplayBuffer[Any].load_state_dict)


class Store(FacedObject["service.Store"]):
    """Values by key; see `trimesh.service.Store`."""

    put = waits(service.Store.put)
    get = waits(service.Store.get)
    get_into = waits(service.Store.get_into)
    wait_newer = waits(service.Store.wait_newer)
    version = waits(service.Store.version)
    keys = waits(service.Store.keys)
    delete = waits(service.Store.delete)
    statistics = waits(service.Store.statistics)


def open_pool(
    mesh: type[A],
    *,
    along: str | None = None,
    route: PoolRoute | Callable[..., Any] | None = None,
    concurrency: int | service.Adaptive = limits.POOL_CONCURRENCY,
    queue: int = limits.POOL_QUEUE,
    queue_bytes: int = limits.POOL_QUEUE_BYTES,
    sessions: int = limits.POOL_SESSIONS,
    health: service.Health | None = None,
    procs: ProcMesh | None = None,
    retry: Retry | None = None,
    hedge: float | Literal["p95"] | None = None,
    budget: float = limits.POOL_BUDGET,
    rate: service.Rate | None = None,
) -> AbstractContextManager[Pool[A]]:
    """Put the actors of a mesh behind one name.

    `with open_pool(generators, along="replica") as pool: text = pool.generate(prompt)`. A `route` function is called in
    the thread of Trio. See `trimesh.service.open_pool` for arguments and errors.
    """
    inner = inner_of(mesh)
    block = service.open_pool(
        inner,
        along=along,
        route=route,
        concurrency=concurrency,
        queue=queue,
        queue_bytes=queue_bytes,
        sessions=sessions,
        health=health,
        procs=inner_of(procs),
        retry=retry,
        hedge=hedge,
        budget=budget,
        rate=rate,
    )
    body = body_of(block, f"the pool of {inner!r}", home_of(mesh))
    return FacedBody(body, lambda pool: Pool(pool, body))


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
    """Store work between its producers and the trainers.

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
    """Keep values by key, near their producers and users.

    `with open_store(procs) as store:`, inside of the block of a mesh. See `trimesh.service.open_store` for arguments
    and errors.
    """
    block = service.open_store(inner_of(procs), capacity_bytes=capacity_bytes, retain=retain)
    body = body_of(block, "a store", home_of(procs))
    return FacedBody(body, lambda store: Store(store, body))


@overload
def face(handle: service.Pool[A]) -> Pool[A]: ...
@overload
def face(handle: service.Slots) -> Slots: ...
@overload
def face(handle: service.ReplayBuffer[T]) -> ReplayBuffer[T]: ...
@overload
def face(handle: service.Store) -> Store: ...
def face(handle: Any) -> Any:
    """Return the blocking form of a handle of `trimesh.service`, such as one that an endpoint received.

    In an endpoint with `thread=True`: `face(self.pool).generate(prompt)`. The call has the deadline of the endpoint,
    and is cancelled with it.

    Raises:
        TypeError: It is another object.
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
                f"service.face takes a pool, slots, a replay buffer or a store, got {handle!r}: for meshes write "
                "trimesh.blocking.face(mesh)"
            )
