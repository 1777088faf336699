"""Pools: `open_pool`, the handle `Pool` on replicas behind one name, its maps and statistics."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, Self, TypeVar, cast, get_args

import attrs
import msgspec
import trio

from trimesh import limits
from trimesh._runtime.tasks import in_trio, in_trio_block, in_trio_now, in_trio_taking
from trimesh.actor.actor import Actor
from trimesh.actor.actor_mesh import ActorMesh, processes_of
from trimesh.actor.host_mesh import this_proc
from trimesh.actor.options import Retry, check_window
from trimesh.actor.proc_mesh import ProcMesh
from trimesh.actor.verbs import Outcome
from trimesh.config import current
from trimesh.context_managers import asynccontextmanager
from trimesh.errors import MeshErrorGroup
from trimesh.plain_numbers import plain_real, plain_whole
from trimesh.service.dispatch import Adaptive, ByFunction, Dispatcher, LeastLoaded, PoolRoute
from trimesh.service.owner_calls import hand_over
from trimesh.service.pool.attempts import Attempts
from trimesh.service.pool.autoscaling import Autoscaling
from trimesh.service.pool.engine import CallOptions, PauseMode, PoolCall, PoolEngine, PoolFront, WhenFull
from trimesh.service.pool.replicas import ElasticReplicas, Health, Rolling
from trimesh.service.pool.streams import FrontItems, PoolItems, PoolStream
from trimesh.service.pool.updates import Updates
from trimesh.service.request_policies import Rate
from trimesh.service.scaling import ScaleBy, Scaler

if TYPE_CHECKING:
    from trimesh.blocking import calls as blocking

_log = logging.getLogger("trimesh")

A = TypeVar("A")
M = TypeVar("M", bound=Actor)
P = ParamSpec("P")
R = TypeVar("R")
Items = Iterable[Any] | AsyncIterable[Any]


@attrs.frozen
class ReplicaStatistics:
    """Statistics of one replica.

    Attributes:
        index: Its index along the dimension of the pool.
        running: Number of requests that it runs.
        cost: Sum of their costs.
        limit: Number of requests that it may run at once.
        is_up: Whether its processes live and answer.
        is_drained: Whether `rolling`, `each` or `resize` keeps it out of service.
        ended: Number of requests that ended there, with any outcome.
    """

    index: int
    running: int
    cost: float
    limit: int
    is_up: bool
    is_drained: bool
    ended: int


@attrs.frozen
class PoolStatistics:
    """Statistics of a pool, in requests since it was opened.

    `made == succeeded + failed + cancelled + refused + running + reading + queued + arriving`, except while a request
    is between two of these states.

    Attributes:
        made: All requests.
        succeeded: Requests that returned a value, and streams that were read to their end.
        failed: Requests whose endpoint or route raised, or whose replica died.
        cancelled: Requests cancelled by their caller or by the pool, and streams that were left early.
        refused: Requests that met a full queue with `when_full="refuse"`.
        retried: Number of times that a request was sent again, mostly to another replica.
        hedged: Number of requests that a second replica ran, too; only the replica's own `running` counts such a run.
        limited: Number of requests that had to wait for `rate=`.
        running: Requests that run on replicas.
        queued: Requests in the queue.
        queued_bytes: Estimated bytes of their arguments.
        arriving: Requests whose callers wait for room in the queue, for the rate, or for the backoff of a retry.
        sessions: Number of known sessions.
        is_paused: Whether `paused` holds the queue.
        replicas: Statistics of all replicas.
        reading: Streams whose generator has ended, in whose block the consumer still is.
        p50: Seconds that half of the last requests took at most, with their time in the queue; None without any.
        p95: The same of 95 of 100; both are of at most `limits.POOL_LATENCIES` requests that returned within
            `limits.POOL_LATENCY_SECONDS`.
    """

    made: int
    succeeded: int
    failed: int
    cancelled: int
    refused: int
    retried: int
    hedged: int
    limited: int
    running: int
    queued: int
    queued_bytes: int
    arriving: int
    sessions: int
    is_paused: bool
    replicas: tuple[ReplicaStatistics, ...]
    reading: int
    p50: float | None
    p95: float | None


class PoolEndpoint(Generic[P, R]):
    """An endpoint of the replicas of a pool: `await pool.generate(prompt)`."""

    def __init__(self, pool: Pool[Any], name: str) -> None:
        self._pool = pool
        self._name = name

    async def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the endpoint on one replica: on all its members if it has several, and return the first one's result.

        Raises:
            Exception: The exception of the endpoint; of a replica of several members a `MeshErrorGroup`.
            ProcDied: The replica died, and the request may have run, so it is not sent again.
            Overloaded: The queue is full, or the rate exceeded, with `options(when_full="refuse")`.
            Paused: The pool was paused by `paused("abort")` while the request ran.
            RemoteCancelled: `cancel` or `cancel_all` cancelled the request.
            MeshStopped: The block of the pool is being left.

        Blocking: a checkpoint, cancellable. A deadline of the caller includes the time in the queue.
        """
        found: R = await in_trio(self._pool._run)(self._name, args, kwargs)  # noqa: SLF001 - two classes of one handle
        return found

    def stream(self, /, *args: P.args, **kwargs: P.kwargs) -> PoolStream[R]:
        """Read the items of an async generator: `async with pool.stream.generate(prompt)`; see `Pool.stream`."""
        return self._pool._stream(self._name, args, kwargs)  # noqa: SLF001 - as above

    def __repr__(self) -> str:
        return f"<endpoint {self._name} of {self._pool!r}>"


class Pool(Generic[A]):
    """Replicas of an actor behind one name; a handle that any actor may hold.

    `await pool.generate(prompt)` runs the endpoint `generate` on one replica. For type checkers
    `pool[Generator.generate]` is the same endpoint with the types of its arguments and its result.

    Outside the process that opened it, a pool has only its endpoints, `options`, `session`, `map`, `stream`
    and `paused`.
    """

    def __init__(
        self, front: Any, name: str, options: CallOptions | None = None, engine: PoolEngine | None = None
    ) -> None:
        self._front = front
        self._name = name
        self._options = CallOptions() if options is None else options
        self._engine = engine  # only in the process of the owner

    def options(
        self,
        *,
        priority: int | None = None,
        cost: float | None = None,
        group: Any = None,
        when_full: WhenFull | None = None,
    ) -> Self:
        """Return a handle on the same pool with options for its calls; None keeps the current value.

        Args:
            priority: Requests of higher priority go first, equal ones first come, first served. Default 0.
            cost: Weight of the request in the load of its replica (tokens, say), above 0. Default 1.
            group: Name of the requests that `cancel(group=)` cancels together.
            when_full: "wait" until the queue has room (default), or "refuse": raise `Overloaded`.

        Raises:
            TypeError, ValueError: A value is invalid.
        """
        given = {"priority": plain_whole(priority), "cost": plain_real(cost), "group": group, "when_full": when_full}
        wanted = {name: value for name, value in given.items() if value is not None}
        options = msgspec.structs.replace(self._options, **wanted)
        options.check()
        return self._with(options)

    def session(self, name: str) -> AbstractAsyncContextManager[PoolSession[A]]:
        """Send requests to one replica while it lives: `async with pool.session("conversation-7") as chat:`.

        A later session of the same name goes to the same replica, unless the pool has dropped it: it keeps the most
        recently used ones (`open_pool(sessions=)`).
        """
        return in_trio_block(self._open_session(name))

    @property
    def map(self) -> MapVerbs:
        """Run an endpoint once for each item: `async with pool.map.generate(prompts) as results:`.

        `async for index, value in results` yields results as they complete; `index` is the position of the item. At
        most `window` items are under way (setting `map_window`). The first failure cancels the others, and the block
        raises it in a group.
        """
        return MapVerbs(self)

    @property
    def stream(self) -> StreamVerbs:
        """Read an endpoint that is an async generator: `async with pool.stream.generate(prompt) as tokens:`.

        Entering waits for a replica; `async for token in tokens` yields its items. A stream is one request: it holds
        its place at the replica until the generator has ended. The replica is at most `stream_window` items ahead
        of the consumer, and waits in its `yield`. Leaving the block early cancels the generator and waits until it has
        unwound.

        After the death of the replica, the iteration raises `ProcDied` behind the items that have arrived. If there is
        none, the stream goes to another replica, as far as a call would. Of a replica of several members the items of
        the first one are yielded; those of the others are dropped.
        """
        return StreamVerbs(self)

    @property
    def map_settled(self) -> SettledMapVerbs:
        """Like `map`, but a failure ends only its own item: yields `(index, Outcome)`.

        `async with pool.map_settled.generate(prompts) as results: async for index, outcome in results: ...`. An
        `Outcome` is that of `call_settled`: `.ok`, `.value`, `.error`, `.unwrap()`. An error of the iteration over the
        items themselves is raised as by `map`.
        """
        return SettledMapVerbs(self)

    def paused(self, mode: PauseMode) -> AbstractAsyncContextManager[None]:
        """Hold the queue while the body runs, for example to update weights: `async with pool.paused("wait"):`.

        Queued requests stay in the queue, and new ones are queued.

        Args:
            mode: Running requests go on ("keep"), end before the body begins ("wait"), or raise `Paused` at their
                callers ("abort").

        Raises:
            ValueError: `mode` is none of these.
            MeshStopped: The pool has ended meanwhile, in another process; raised when the body has ended.
        """
        if mode not in get_args(PauseMode):
            raise ValueError(f'mode must be "keep", "wait" or "abort", got {mode!r}')
        return in_trio_block(self._open_pause(mode))

    def rolling(self, at_most: int = 1) -> AbstractAsyncContextManager[Rolling[A]]:
        """Take one replica after the other out of service: `async with pool.rolling() as replicas:`.

        `async for replica in replicas` yields the mesh of each, once it runs no more requests. It serves again when the
        next one is requested, or the block is left. After a `resize` meanwhile, removed replicas are skipped, and new
        ones have their turn.

        Args:
            at_most: Replicas that may be out of service at once: the one that the body uses, and those that drain.

        Raises:
            ValueError: It is not at least 1, or all replicas would be out.
            RuntimeError: This is not the process that owns the pool.
        """
        return in_trio_block(Rolling[A].open(self._owned(), at_most))

    async def each(self, update: Callable[[A], Awaitable[object]], *, at_most: int = 1) -> None:
        """Update every replica, and those that come later: `await pool.each(load)`.

        `await load(replica)` gets the mesh of each replica, which is out of service and runs no requests meanwhile. The
        method returns when all replicas that live have had their turn. From then on a replica that is restarted,
        replaced or new gets the latest update, once, before it serves requests.

            async def load(replica: Generator) -> None:
                await replica.pull.call(version)

        A replica that dies in its turn gets the update when it is back. If `load` raises, or this call is cancelled,
        the replicas that have had the update keep it, the others serve as before, and the previous update remains the
        latest. An error in a turn after that, of a replica that has come later, fails the block of the pool.

        Args:
            update: An async function; it runs in Trio, also for asyncio programs, and must send no request to the pool.
            at_most: Replicas that may be out of service at once for this call; if that is all, requests wait.

        Raises:
            Exception: The update raised it.
            TypeError, ValueError: An argument is invalid.
            RuntimeError: This is not the process that owns the pool.

        Blocking: a checkpoint, cancellable. A second call waits for the first.
        """
        engine = self._owned()
        if not callable(update):
            raise TypeError(f"each takes an async function of the mesh of a replica, got {update!r}")
        await in_trio(engine.updates.each)(update, at_most)

    async def resize(self, replicas: int) -> None:
        """Use only the first `replicas` of the mesh; wait until the others run no more requests.

        A pool opened with `procs=` resizes its processes: it grows them to this number, or shrinks them to it once the
        other replicas are drained; see `ProcMesh.resize`.

        Raises:
            ValueError: `replicas` is below 1, or more than the mesh has.
            MeshErrorGroup: A new replica could not be started; the pool is unchanged.
            RuntimeError: This is not the process that owns the pool.
        """
        engine = self._owned()
        await in_trio(engine.resize)(replicas)

    def autoscale(
        self,
        least: int,
        most: int,
        *,
        by: ScaleBy,
        every: float = limits.AUTOSCALE_SECONDS,
        grow_after: float = limits.AUTOSCALE_GROW_SECONDS,
        shrink_after: float = limits.AUTOSCALE_SHRINK_SECONDS,
    ) -> AbstractAsyncContextManager[None]:
        """Resize the pool by its load while the body runs: `async with pool.autoscale(1, 8, by=Requests(8)):`.

        The pool was opened with `procs=`; see `resize` for what happens to its processes. It grows at once to the size
        that a load of `grow_after` seconds has needed all the time, and shrinks to the largest one that the last
        `shrink_after` seconds have needed; both periods begin anew with each change. A size that soon proves too small
        is tried again after twice that time, at most 16 times. Leaving the block keeps the size.

        Growing that fails is logged, leaves the pool as it is, and is tried again after `shrink_after`. A load that
        returns stops a shrinking that still waits for requests.

        Args:
            least: Smallest number of replicas, at least 1.
            most: Greatest number.
            by: `Requests(n)` for n requests of a replica, running or waiting; `LatencyTarget(seconds)` for the 95th
                percentile; or a function from `PoolStatistics` to a number of replicas, not rounded, which must not
                wait.
            every: Seconds between two samples of the load.
            grow_after: Seconds for which the load must need more.
            shrink_after: Seconds for which it must need less, at least `grow_after`.

        Raises:
            ValueError: A number is out of its bounds, or the pool was opened without `procs=`.
            TypeError: `by` is no rule, or returned no number.
            RuntimeError: The size of the mesh is fixed (see `ProcMesh.resize`), or this is not the process that owns
                the pool.
        """
        scaler = Scaler(least, most, grow_after=grow_after, shrink_after=shrink_after)
        return in_trio_block(Autoscaling(self._owned(), scaler, by, every, self.statistics).running())

    def cancel(self, *, group: Any, reason: str = "its group was cancelled") -> int:
        """Cancel the queued and running requests of a group, which raise `RemoteCancelled`; return how many."""
        return in_trio_now(self._owned().cancel_for)(reason, lambda call: bool(call.group == group))

    def cancel_all(self, *, reason: str) -> int:
        """Cancel all requests, which raise `RemoteCancelled` with this reason; return how many."""
        return in_trio_now(self._owned().cancel_for)(reason, lambda _: True)

    def statistics(self) -> PoolStatistics:
        """Return the state of the pool, in numbers of requests."""
        engine = self._owned()
        dispatcher, counts = engine.dispatcher, engine.counts
        p50, p95 = engine.latencies.quantiles(in_trio_now(trio.current_time)(), 0.5, 0.95)
        replicas = [
            ReplicaStatistics(
                one.index, one.running, one.cost, one.limit, one.is_up and not one.is_absent, one.is_out, one.ended
            )
            for one in dispatcher.replicas
        ]
        return PoolStatistics(
            counts.made, counts.succeeded, counts.failed, counts.cancelled, counts.refused, counts.retried,
            counts.hedged, counts.limited, dispatcher.running - engine.attempts.beside, dispatcher.waiting.count,
            dispatcher.waiting.bytes,
            len(engine.arrivals) + engine.attempts.delayed,
            len(dispatcher.sessions), dispatcher.pauses > 0, tuple(replicas), engine.reading,
            p50=p50, p95=p95,
        )  # fmt: skip

    def __getitem__(self, endpoint: blocking.Endpoint[P, R]) -> PoolEndpoint[P, R]:
        """Return an endpoint with its types: `await pool[Generator.generate](prompt)`."""
        return PoolEndpoint(self, cast("Any", endpoint).spec.name)

    def __getattr__(self, name: str) -> PoolEndpoint[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        if self._engine is not None:
            getattr(self._engine.mesh, name)  # raises `AttributeError` that names the endpoints
        return PoolEndpoint(self, name)

    def __repr__(self) -> str:
        return f"<pool of {self._name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._front, self._name, self._options)

    async def _run(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._engine is not None:
            return await self._engine.run(name, args, kwargs, self._options)
        result, moves = await self._front.run.call_one(name, args, kwargs, self._options)
        self._note_moves(moves)
        return result

    def _stream(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PoolStream[Any]:
        if self._engine is not None:
            return PoolStream(PoolItems[Any](self._engine, name, args, kwargs, self._options))
        sent = name, args, kwargs, self._options
        return PoolStream(FrontItems[Any](self._front, f"{self._name}.{name}", sent, self._note_moves))

    def _note_moves(self, moves: int) -> None:
        """Store how often the session of this handle has moved."""

    def _with(self, options: CallOptions) -> Self:
        return type(self)(self._front, self._name, options, self._engine)

    def _owned(self) -> PoolEngine:
        if self._engine is None:
            raise RuntimeError(
                "resize, autoscale, rolling, each, cancel and statistics can only be called in the process that opened "
                f"{self!r}; in this process the handle has its endpoints, options, session, map, stream and paused"
            )
        return self._engine

    @asynccontextmanager
    async def _open_session(self, name: str) -> AsyncGenerator[PoolSession[A], None]:
        await trio.lowlevel.checkpoint()
        options = msgspec.structs.replace(self._options, session=name)
        yield PoolSession(self._front, self._name, options, self._engine)

    @asynccontextmanager
    async def _open_pause(self, mode: PauseMode) -> AsyncGenerator[None, None]:
        if self._engine is not None:
            async with self._engine.paused(mode):
                yield
            return
        ended = False
        try:
            async with self._front.hold_pause.stream(mode) as held:
                await anext(held)
                yield
                ended = True
        except MeshErrorGroup as group:
            if ended and len(group.exceptions) == 1:
                raise group.exceptions[0]  # noqa: B904 - `from` would take its remote traceback away
            raise


class PoolSession(Pool[A]):
    """A pool whose requests go to one replica while it lives.

    Attributes:
        moves: Number of times that the session had to go to another replica; in other processes than the owner's, as of
            the last reply.
    """

    moves = 0

    @property
    def moved(self) -> bool:
        """True if the session had to leave its first replica, so that its cached state is lost."""
        return (self._engine.moves_of(self._options.session) if self._engine is not None else self.moves) > 0

    def _note_moves(self, moves: int) -> None:
        self.moves = moves


def open_pool(
    mesh: M,
    *,
    along: str | None = None,
    route: PoolRoute | Callable[..., Any] | None = None,
    concurrency: int | Adaptive = limits.POOL_CONCURRENCY,
    queue: int = limits.POOL_QUEUE,
    queue_bytes: int = limits.POOL_QUEUE_BYTES,
    sessions: int = limits.POOL_SESSIONS,
    health: Health | None = None,
    procs: ProcMesh | None = None,
    retry: Retry | None = None,
    hedge: float | Literal["p95"] | None = None,
    budget: float = limits.POOL_BUDGET,
    rate: Rate | None = None,
) -> AbstractAsyncContextManager[Pool[M]]:
    """Put the actors of a mesh behind one name.

    `async with open_pool(generators, along="replica") as pool: text = await pool.generate(prompt)`.

    Args:
        mesh: The actors; owned by its own block, whose policy (`Isolate`, `Restart`) handles deaths.
        along: Dimension of the replicas: a replica is the slice of the mesh at one index. None makes each member a
            replica.
        route: Assigns requests to replicas: `LeastLoaded()` (the default), `Affinity(...)`, `RoundRobin()`, or a
            function of the request and the replicas with room, which returns one of them.
        concurrency: Number of requests that one replica runs at once, or `Adaptive(...)`. The endpoints need as many
            slots: `@endpoint(concurrency=...)`.
        queue: Number of requests that may be queued; further callers wait for room, or are refused (`Pool.options`).
        queue_bytes: Greatest estimated bytes of the arguments of queued requests.
        sessions: Number of sessions that are kept; beyond it, the least recently used one is dropped.
        health: Health check of replicas; without it only deaths take replicas out of service.
        procs: The processes in which the actors run, if `along` is their first dimension: the pool follows their size,
            and `Pool.resize` changes it.
        retry: Errors after which a request is made again, how often, and after which time: `Retry(2, on=(OSError,))`.
            Only for endpoints with `idempotent=True`. Deaths of replicas need none.
        hedge: Time after which a request of an endpoint with `idempotent=True` is also sent to a second replica, if one
            has room: seconds, or "p95", a tenth more than 95 of 100 requests of the endpoint took at their replicas.
            The first answer counts; the other replica's run is cancelled, without waiting for its end. Requests of
            sessions are not hedged.
        budget: Retries and hedges for each request, from 0 to 1. Beyond it errors are raised at once, and nothing is
            hedged, so that an outage does not multiply the load.
        rate: Greatest rate at which requests and streams enter the pool: `Rate(100)`. It does not hold in the queue.

    Returns:
        A context manager for the pool. Leaving it refuses new requests, cancels those under way with `MeshStopped` at
        their callers, and waits until they have unwound.

    Raises:
        TypeError: `mesh` is no mesh of actors, or `procs` none of processes.
        ValueError: A number is out of its bounds, or the mesh is empty.
        ShapeError: The mesh has no such dimension.
    """
    handle: Any = mesh
    if not isinstance(handle, ActorMesh):
        raise TypeError(f"open_pool takes a mesh of actors, as `await procs.spawn(...)` returns it, got {handle!r}")
    concurrency, queue, queue_bytes = plain_whole(concurrency), plain_whole(queue), plain_whole(queue_bytes)
    if queue == 0:
        raise ValueError(
            "queue must be at least 1, got 0, as requests of sessions, and those whose replica died, pass through it: "
            'to queue as little as possible, write queue=1 and options(when_full="refuse")'
        )
    for name, number in (("concurrency", concurrency), ("queue", queue), ("queue_bytes", queue_bytes)):
        if not isinstance(number, Adaptive) and not (isinstance(number, int) and number >= 1):
            raise ValueError(f"{name} must be a number of at least 1, got {number!r}")
    _check_slots(handle, concurrency)
    views = _replicas(handle, along)
    if not views:
        raise ValueError(f"a pool needs at least one replica, got the empty view {handle!r}")
    if route is None:
        route = LeastLoaded()
    if health is not None and health.then == "replace":
        processes_of(handle)  # raises now rather than when a replica is sick
    dispatcher = Dispatcher[PoolCall](
        len(views),
        route=route if isinstance(route, PoolRoute) else ByFunction(route),
        concurrency=concurrency,
        queue=queue,
        queue_bytes=queue_bytes,
        sessions=sessions,
    )
    attempts = Attempts(handle, retry=retry, hedge=hedge, budget=budget, rate=rate)
    engine = PoolEngine(handle, views, dispatcher, attempts)
    elastic = None if procs is None else ElasticReplicas(engine, procs, along)
    return in_trio_block(_open(engine, health, elastic))


def _check_slots(mesh: ActorMesh, concurrency: int | Adaptive) -> None:
    """Warn of a concurrency above that of all endpoints: further requests would wait at the replica."""
    if isinstance(concurrency, Adaptive) or concurrency == limits.POOL_CONCURRENCY:
        return
    specs = mesh._view.endpoints.values()  # noqa: SLF001 - of endpoints
    slots = max((spec.concurrency for spec in specs), default=1)
    if concurrency > slots and not any(spec.answers_later for spec in specs):  # such an endpoint frees its slot early
        text = (
            "open_pool(concurrency=%d) exceeds the concurrency of the endpoints of %s, %d: further requests wait "
            "at the replica and cannot go to another one; write @endpoint(concurrency=%d), or open_pool(concurrency=%d)"
        )
        _log.warning(text, concurrency, mesh.name, slots, concurrency, slots)


def _replicas(mesh: ActorMesh, along: str | None) -> list[ActorMesh]:
    if along is not None:
        return [mesh.slice(**{along: index}) for index in range(mesh.size(along))]
    return [mesh.slice(**dict(point)) for point in mesh.points()]


@asynccontextmanager
async def _open(
    engine: PoolEngine, health: Health | None, elastic: ElasticReplicas | None
) -> AsyncGenerator[Pool[Any], None]:
    name = f"pool of {engine.mesh.name}"[: limits.NAME_CHARS_MAX]
    async with this_proc().spawn(name, PoolFront, hand_over(engine)) as front, trio.open_nursery() as nursery:
        engine.nursery = nursery
        engine.updates = Updates(engine, nursery)
        nursery.start_soon(engine.watch)
        if health is not None:
            watch = partial(health.watch, engine)
            engine.on_new = lambda index: nursery.start_soon(watch, index)
            for index in range(len(engine.views)):
                engine.on_new(index)
        if elastic is not None:
            engine.change_size, engine.check_size = elastic.resize, elastic.check
            nursery.start_soon(elastic.watch)
        try:
            yield Pool(front, engine.mesh.name, engine=engine)
        finally:
            await engine.close()
            nursery.cancel_scope.cancel(reason="the block of the pool is being left")


# ---- streams and maps ------------------------------------------------------------------------------------------------


class StreamVerbs:
    """The endpoints of a pool as streams: `pool.stream.generate(prompt)`."""

    def __init__(self, pool: Pool[Any]) -> None:
        self._pool = pool

    def __getitem__(self, endpoint: blocking.Endpoint[P, R]) -> Callable[P, PoolStream[R]]:
        """Return an endpoint with its types: `pool.stream[Generator.generate](prompt)`."""
        return self._pool[endpoint].stream

    def __getattr__(self, name: str) -> Callable[..., PoolStream[Any]]:
        return cast("Callable[..., PoolStream[Any]]", getattr(self._pool, name).stream)


class MapVerbs:
    """The endpoints of a pool as maps: `pool.map.generate(prompts)`."""

    def __init__(self, pool: Pool[Any]) -> None:
        self._pool = pool

    def __getitem__(self, endpoint: blocking.Endpoint[P, R]) -> MapVerb[R]:
        """Return an endpoint with the type of its result: `pool.map[Generator.generate](prompts)`."""
        return MapVerb(self._pool[endpoint])

    def __getattr__(self, name: str) -> MapVerb[Any]:
        return MapVerb(getattr(self._pool, name))


class SettledMapVerbs:
    """The endpoints of a pool as maps of outcomes: `pool.map_settled.generate(prompts)`."""

    def __init__(self, pool: Pool[Any]) -> None:
        self._pool = pool

    def __getitem__(self, endpoint: blocking.Endpoint[P, R]) -> MapVerb[Outcome[R]]:
        """Return an endpoint with the type of its result: `pool.map_settled[Generator.generate](prompts)`."""
        return MapVerb(partial(_settle, self._pool[endpoint]))

    def __getattr__(self, name: str) -> MapVerb[Outcome[Any]]:
        return MapVerb(partial(_settle, getattr(self._pool, name)))


async def _settle(endpoint: PoolEndpoint[..., R], item: Any) -> Outcome[R]:
    try:
        return Outcome(value=await endpoint(item))
    except Exception as error:  # noqa: BLE001 - it is the outcome
        return Outcome(error=error)


class MapVerb(Generic[R]):
    """One endpoint of a pool, to be run for each item."""

    def __init__(self, endpoint: PoolEndpoint[..., R] | Callable[[Any], Awaitable[R]]) -> None:
        self._endpoint = endpoint

    def __call__(
        self, items: Iterable[Any] | AsyncIterable[Any], *, window: int | None = None
    ) -> AbstractAsyncContextManager[PoolMap[R]]:
        """See `Pool.map`.

        Args:
            items: Each is the only argument of one call; consumed as calls begin.
            window: Greatest number of items under way; None takes the setting `map_window`.
        """
        return in_trio_block(PoolMap[R].open(self._endpoint, items, window))


class PoolMap(Generic[R]):
    """Results of many requests: `async for index, value in results`."""

    def __init__(self, results: trio.MemoryReceiveChannel[tuple[int, R]]) -> None:
        self._results = results
        self._taken: list[tuple[int, R]] = []

    def __aiter__(self) -> PoolMap[R]:
        return self

    def __anext__(self) -> Awaitable[tuple[int, R]]:
        """Return the next result.

        Raises:
            StopAsyncIteration: All results were returned.
        """
        return in_trio_taking(self._next, self._taken.append)

    async def _next(self) -> tuple[int, R]:
        if self._taken:
            await trio.lowlevel.checkpoint()
            return self._taken.pop(0)
        return await self._results.__anext__()

    @classmethod
    @asynccontextmanager
    async def open(
        cls, endpoint: Callable[[Any], Awaitable[R]], items: Items, window: int | None
    ) -> AsyncGenerator[PoolMap[R], None]:
        """Send requests while the body runs; leaving it early cancels those under way."""
        most = current().map_window if window is None else check_window(window)
        sender, receiver = trio.open_memory_channel[tuple[int, R]](0)
        room = trio.Semaphore(most)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_feed, endpoint, items, room, sender)
            yield cls(receiver)
            nursery.cancel_scope.cancel(reason="the consumer of the map has left")


async def _feed(
    endpoint: Callable[[Any], Awaitable[R]],
    items: Items,
    room: trio.Semaphore,
    sender: trio.MemorySendChannel[tuple[int, R]],
) -> None:
    async def run(index: int, item: Any) -> None:
        await sender.send((index, await endpoint(item)))
        room.release()

    async with trio.open_nursery() as nursery:
        index = 0
        async for item in _each(items):
            await room.acquire()
            nursery.start_soon(run, index, item)
            index += 1
    sender.close()  # not after a failure: the iteration would end as if it had all results


async def _each(items: Items) -> AsyncGenerator[Any, None]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item
