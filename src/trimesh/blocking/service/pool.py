"""`Pool`: replicas behind one name, without `await`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Generic, ParamSpec, Self, TypeVar, cast

from trimesh import limits, service
from trimesh.blocking.actor_mesh import ActorMesh
from trimesh.blocking.body import AnyBody, CallFuture, FacedBody, body_of
from trimesh.blocking.calls import Endpoint, Verb
from trimesh.blocking.handle import FacedObject, home_of, inner_of
from trimesh.blocking.proc_mesh import ProcMesh
from trimesh.blocking.work import Each, submit
from trimesh.service.dispatch.routes import PoolRoute
from trimesh.service.pool.call_options import PauseMode, WhenFull
from trimesh.service.pool.pool import MapVerb

A = TypeVar("A")
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class PoolVerb(Verb[P, T]):
    """An endpoint of the replicas of a pool."""

    __slots__ = ()

    def submit(self, /, *args: P.args, **kwargs: P.kwargs) -> CallFuture[T]:
        """Make a request, and return a future of its result. It belongs to the block of the pool, which waits for it.

        In a pause it waits for the end of the pause, so it must not belong to that.
        """
        return submit(self._work(args, kwargs), self._home, at_home=True)


class Pool(FacedObject["service.Pool[A]"], Generic[A]):
    """Replicas of an actor behind one name; see `trimesh.service.Pool`.

    `pool.generate(prompt)` runs the endpoint `generate` on one replica and waits for its result, `pool.generate.submit`
    returns a future of it. `pool[Generator.generate]` is the same with its types. Sent to an actor it is the pool of
    `trimesh.service`.
    """

    def options(
        self,
        *,
        priority: int | None = None,
        cost: float | None = None,
        group: Any = None,
        when_full: WhenFull | None = None,
    ) -> Self:
        """Return a handle on the same pool with options for its calls; see `trimesh.service.Pool.options`."""
        inner = self._inner.options(priority=priority, cost=cost, group=group, when_full=when_full)
        return type(self)(inner, self._home)

    def session(self, name: str) -> AbstractContextManager[PoolSession[A]]:
        """Send requests to one replica while it lives: `with pool.session("conversation-7") as chat:`."""
        body = body_of(self._inner.session(name), f"a session of {self._inner!r}", self._home)
        return FacedBody(body, lambda session: PoolSession(session, self._home))

    @property
    def map(self) -> PoolMaps:
        """Run an endpoint once for each item: `with pool.map.generate(prompts) as results:`.

        `for index, value in results` gives results as they come; see `trimesh.service.Pool.map`.
        """
        return PoolMaps(self._inner, self._home)

    def paused(self, mode: PauseMode) -> AbstractContextManager[None]:
        """Hold the queue back while the body runs: `with pool.paused("wait"):`; see `trimesh.service.Pool.paused`."""
        return body_of(self._inner.paused(mode), f"a pause of {self._inner!r}", self._home)

    def rolling(self, at_most: int = 1) -> AbstractContextManager[Iterator[type[A]]]:
        """Take one replica after the other out of service: `with pool.rolling() as replicas: for replica in replicas`.

        Each is the mesh of one replica, without `await`; see `trimesh.service.Pool.rolling`.
        """
        home = self._home

        def show(mesh: Any) -> type[A]:
            return cast("type[A]", ActorMesh(mesh, home))

        body = body_of(self._inner.rolling(at_most), f"a roll of {self._inner!r}", home)
        return FacedBody(body, lambda replicas: map(show, Each(replicas, home)))

    def resize(self, replicas: int) -> None:
        """Use the first `replicas` of the mesh only; see `trimesh.service.Pool.resize`."""
        self._wait(self._inner.resize, replicas)

    def cancel(self, *, group: Any, reason: str = "its group was cancelled") -> int:
        """Cancel the requests of a group; return how many. See `trimesh.service.Pool.cancel`."""
        return self._now(lambda: self._inner.cancel(group=group, reason=reason))

    def cancel_all(self, *, reason: str) -> int:
        """Cancel all requests; return how many. See `trimesh.service.Pool.cancel_all`."""
        return self._now(lambda: self._inner.cancel_all(reason=reason))

    def statistics(self) -> service.PoolStatistics:
        """Return the state of the pool, in numbers of requests."""
        return self._now(self._inner.statistics)

    def __getitem__(self, endpoint: Endpoint[P, R]) -> PoolVerb[P, R]:
        """Return an endpoint with its types: `pool[Generator.generate](prompt)`."""
        return PoolVerb(self._inner[endpoint], self._home)

    def __getattr__(self, name: str) -> PoolVerb[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return PoolVerb(getattr(self._inner, name), self._home)


class PoolSession(Pool[A]):
    """A pool whose requests go to one replica while it lives."""

    @property
    def moved(self) -> bool:
        """Whether the session had to leave its first replica: what that knew of it is gone."""
        return self._now(lambda: cast("service.PoolSession[A]", self._inner).moved)


class PoolMaps:
    """The endpoints of a pool as maps: `pool.map.generate(prompts)`."""

    def __init__(self, inner: service.Pool[Any], home: AnyBody | None) -> None:
        self._inner = inner
        self._home = home

    def __getitem__(self, endpoint: Endpoint[P, R]) -> PoolMapVerb[R]:
        """Return an endpoint with the type of its result: `pool.map[Generator.generate](prompts)`."""
        return PoolMapVerb(self._inner.map[endpoint], self._home)

    def __getattr__(self, name: str) -> PoolMapVerb[Any]:
        return PoolMapVerb(getattr(self._inner.map, name), self._home)


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
            items: Taken one by one, in the thread of Trio: the next one must be at hand, and must not wait for calls.
            window: Items that may be under way (`limits.MAP_WINDOW`).
        """
        body = body_of(self._inner(map(inner_of, items), window=window), "the results of a pool", self._home)
        return FacedBody(body, lambda results: Each(results, self._home))


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
) -> AbstractContextManager[Pool[A]]:
    """Put the actors of a mesh behind one name.

    `with open_pool(generators, along="replica") as pool: text = pool.generate(prompt)`. A route of yours is called in
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
    )
    body = body_of(block, f"the pool of {inner!r}", home_of(mesh))
    return FacedBody(body, lambda pool: Pool(pool, body))
