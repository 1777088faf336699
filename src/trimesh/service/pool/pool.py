"""`Pool`: the handle on replicas behind one name."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Iterable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Self, TypeVar, cast

import msgspec
import trio

from trimesh._runtime.tasks import in_trio, in_trio_block, in_trio_now
from trimesh.actor.actor_mesh import ActorMesh
from trimesh.context_managers import asynccontextmanager
from trimesh.plain_numbers import plain_real, plain_whole
from trimesh.service.pool.call_options import CallOptions, PauseMode, WhenFull, checked_mode
from trimesh.service.pool.engine import PoolCall, PoolEngine
from trimesh.service.pool.mapping import PoolMap
from trimesh.service.pool.rolling import Rolling
from trimesh.service.pool.statistics import PoolStatistics, ReplicaStatistics

if TYPE_CHECKING:
    from trimesh.blocking import calls as blocking

A = TypeVar("A")
P = ParamSpec("P")
R = TypeVar("R")


class PoolEndpoint(Generic[P, R]):
    """An endpoint of the replicas of a pool: `await pool.generate(prompt)`."""

    def __init__(self, pool: Pool[Any], name: str) -> None:
        self._pool = pool
        self._name = name

    async def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the endpoint on one replica; of a replica of several members, on all, and return what the first has.

        Raises:
            Exception: What the endpoint raised, bare; of a replica of several members a `MeshErrorGroup`.
            ProcDied: The replica has died, and the request may have been run: it is not made again.
            Overloaded: The queue is full, with `options(when_full="refuse")`.
            Paused: The pool was paused by `paused("abort")` while the request ran.
            RemoteCancelled: `cancel` or `cancel_all` has cancelled the request.
            MeshStopped: The block of the pool is being left.

        Blocking: a checkpoint, cancellable. The deadline of the caller counts in the queue, too.
        """
        found: R = await in_trio(self._pool._run)(self._name, args, kwargs)  # noqa: SLF001 - one noun in two classes
        return found

    def __repr__(self) -> str:
        return f"<endpoint {self._name} of {self._pool!r}>"


class Pool(Generic[A]):
    """Replicas of an actor behind one name; a handle that any actor may hold.

    `await pool.generate(prompt)` runs the endpoint `generate` on one replica. For type checkers
    `pool[Generator.generate]` is the same endpoint with the types of its arguments and its result.

    In other processes than that of its owner a pool has its endpoints, `options`, `session`, `map` and `paused`.
    """

    def __init__(self, engine: PoolEngine | None, front: Any, name: str, options: CallOptions | None = None) -> None:
        self._engine = engine
        self._front = front
        self._name = name
        self._options = CallOptions() if options is None else options

    def options(
        self,
        *,
        priority: int | None = None,
        cost: float | None = None,
        group: Any = None,
        when_full: WhenFull | None = None,
    ) -> Self:
        """Return a handle on the same pool with options for its calls; those that are None stay as they are.

        Args:
            priority: Requests with a higher one go first; equal ones first come, first served. 0 at first.
            cost: What the request weighs in the load of its replica (tokens, say), above 0. 1 at first.
            group: Name of the requests that `cancel(group=)` cancels together.
            when_full: "wait" until the queue has room (at first), or "refuse": raise `Overloaded`.

        Raises:
            TypeError, ValueError: A value is none of these.
        """
        given = {"priority": plain_whole(priority), "cost": plain_real(cost), "group": group, "when_full": when_full}
        wanted = {name: value for name, value in given.items() if value is not None}
        options = msgspec.structs.replace(self._options, **wanted)
        options.check()
        return self._with(options)

    def session(self, name: str) -> AbstractAsyncContextManager[PoolSession[A]]:
        """Send requests to one replica while it lives: `async with pool.session("conversation-7") as chat:`.

        A session of the same name goes to the same replica later, too, until so many others were used since that it is
        forgotten (`open_pool(sessions=)`).
        """
        return in_trio_block(self._open_session(name))

    @property
    def map(self) -> MapVerbs:
        """Run an endpoint once for each item: `async with pool.map.generate(prompts) as results:`.

        `async for index, value in results` gives results as they come; `index` is the place of the item. At most twice
        as many items as the replicas have room for are under way. The first failure cancels the others and is raised
        by the block, in a group.
        """
        return MapVerbs(self)

    def paused(self, mode: PauseMode) -> AbstractAsyncContextManager[None]:
        """Hold the queue back while the body runs, around an update of weights, say: `async with pool.paused("wait"):`.

        Args:
            mode: What becomes of the requests that run: "keep": they go on; "wait": the body begins when they are over;
                "abort": they raise `Paused` at their callers. Requests that wait are kept, and new ones wait.

        Raises:
            ValueError: It is no such word.
        """
        return in_trio_block(self._open_pause(checked_mode(mode)))

    def rolling(self, at_most: int = 1) -> AbstractAsyncContextManager[Rolling[A]]:
        """Take one replica after the other out of service: `async with pool.rolling() as replicas:`.

        `async for replica in replicas` gives the mesh of each, once it runs no more requests; it serves again when the
        next one is asked for, or the block is left. A `resize` meanwhile counts: replicas that leave the pool are
        passed over, and those that come have their turn.

        Args:
            at_most: Replicas that may be out of service at once: the one in the body's hands, and those that drain.

        Raises:
            ValueError: It is not at least 1, or all replicas would be out.
            RuntimeError: This is not the process that owns the pool.
        """
        return in_trio_block(Rolling[A].open(self._owned(), at_most))

    async def resize(self, replicas: int) -> None:
        """Use the first `replicas` of the mesh only; wait until the others run no more requests.

        A pool that was opened with `procs=` lets its processes grow to that number, or shrink to it once the others
        are drained; see `ProcMesh.resize`.

        Raises:
            ValueError: It is below 1, or more than the mesh has.
            MeshErrorGroup: A new replica could not be started: the pool is as it was.
            RuntimeError: This is not the process that owns the pool.
        """
        engine = self._owned()
        await in_trio(engine.resize)(replicas)

    def cancel(self, *, group: Any, reason: str = "its group was cancelled") -> int:
        """Cancel the requests of a group, those that wait and those that run: they raise `RemoteCancelled`.

        Returns:
            How many.
        """

        def is_wanted(call: PoolCall) -> bool:
            return bool(call.request.group == group)

        return in_trio_now(self._owned().cancel_for)(reason, is_wanted)

    def cancel_all(self, *, reason: str) -> int:
        """Cancel all requests: they raise `RemoteCancelled` with this reason; return how many."""
        return in_trio_now(self._owned().cancel_for)(reason, lambda _: True)

    def statistics(self) -> PoolStatistics:
        """Return the state of the pool, in numbers of requests."""
        engine = self._owned()
        dispatcher, counts = engine.dispatcher, engine.counts
        return PoolStatistics(
            counts.made, counts.succeeded, counts.failed, counts.cancelled, counts.refused, counts.retried,
            dispatcher.running, dispatcher.waiting.count, dispatcher.waiting.bytes, len(engine.arrivals),
            len(dispatcher.sessions), dispatcher.pauses > 0,
            tuple(
                [
                    ReplicaStatistics(one.index, one.running, one.cost, one.limit, one.is_up, one.is_out, one.ended)
                    for one in dispatcher.replicas
                ]
            ),
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
        return _refer, (type(self), self._front, self._name, self._options)

    async def _run(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._engine is not None:
            return await self._engine.run(name, args, kwargs, self._options)
        result, moves = await self._front.run.call_one(name, args, kwargs, self._options)
        self._note_moves(moves)
        return result

    def _note_moves(self, moves: int) -> None:
        """Learn how often the session of this handle has moved."""

    def _with(self, options: CallOptions) -> Self:
        return type(self)(self._engine, self._front, self._name, options)

    def _owned(self) -> PoolEngine:
        if self._engine is None:
            raise RuntimeError(
                f"{self!r} is a handle in another process than its owner's: there it has its endpoints, options, "
                "session, map and paused; resize, rolling, cancel and statistics are for the owner"
            )
        return self._engine

    @asynccontextmanager
    async def _open_session(self, name: str) -> AsyncGenerator[PoolSession[A], None]:
        await trio.lowlevel.checkpoint()
        yield PoolSession(self._engine, self._front, self._name, msgspec.structs.replace(self._options, session=name))

    @asynccontextmanager
    async def _open_pause(self, mode: PauseMode) -> AsyncGenerator[None, None]:
        if self._engine is not None:
            async with self._engine.paused(mode):
                yield
            return
        async with self._front.hold_pause.stream(mode) as held:
            await anext(held)
            yield


class PoolSession(Pool[A]):
    """A pool whose requests go to one replica while it lives.

    Attributes:
        moves: How often the session had to go to another replica.
    """

    moves = 0

    @property
    def moved(self) -> bool:
        """Whether the session had to leave its first replica: what that knew of it is gone."""
        return (self._engine.moves_of(self._options.session) if self._engine is not None else self.moves) > 0

    def _note_moves(self, moves: int) -> None:
        self.moves = moves


class MapVerbs:
    """The endpoints of a pool as maps: `pool.map.generate(prompts)`."""

    def __init__(self, pool: Pool[Any]) -> None:
        self._pool = pool

    def __getitem__(self, endpoint: blocking.Endpoint[P, R]) -> MapVerb[R]:
        """Return an endpoint with the type of its result: `pool.map[Generator.generate](prompts)`."""
        return MapVerb(self._pool[endpoint])

    def __getattr__(self, name: str) -> MapVerb[Any]:
        return MapVerb(getattr(self._pool, name))


class MapVerb(Generic[R]):
    """One endpoint of a pool, to be run for each item."""

    def __init__(self, endpoint: PoolEndpoint[..., R]) -> None:
        self._endpoint = endpoint

    def __call__(
        self, items: Iterable[Any] | AsyncIterable[Any], *, window: int | None = None
    ) -> AbstractAsyncContextManager[PoolMap[R]]:
        """See `Pool.map`.

        Args:
            items: Each is the one argument of one call; taken as they are needed.
            window: Items that may be under way (`limits.MAP_WINDOW`).
        """
        return in_trio_block(PoolMap[R].open(self._endpoint, items, window))


def _refer(cls: type[Pool[Any]], front: ActorMesh, name: str, options: CallOptions) -> Pool[Any]:
    return cls(None, front, name, options)
