"""Pool engine, in the process that opened the pool, and the actor by which others use it.

A request runs in the task of its caller as soon as the dispatcher assigns it a replica.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Literal, get_args

import msgspec
import trio

from trimesh import limits
from trimesh._runtime.values import EndpointKind, EndpointSpec
from trimesh.actor.actor import Actor
from trimesh.actor.actor_mesh import ActorMesh, is_whole
from trimesh.actor.endpoint import Endpoint, endpoint
from trimesh.errors import (
    ConnectionLost,
    HostLost,
    LinkLost,
    MembershipChanged,
    MeshStopped,
    Overloaded,
    ProcDied,
    RemoteCancelled,
    leaves,
    origin,
)
from trimesh.service.accounts import estimate_bytes
from trimesh.service.dispatch import Dispatcher, PoolRequest
from trimesh.service.errors import Paused
from trimesh.service.owner_calls import take_over
from trimesh.service.pool import streams
from trimesh.service.pool.attempts import Attempts
from trimesh.service.pool.updates import Updates
from trimesh.service.scaling import Latencies

_ENDS = (ProcDied, HostLost, LinkLost, ConnectionLost, MeshStopped)
"""Errors of a call that mean the end of its replica, if their origin is there."""

_MAYBE = (ProcDied, MembershipChanged)
"""Errors that state whether the endpoint may have run (`maybe_executed`)."""

WhenFull = Literal["wait", "refuse"]
PauseMode = Literal["keep", "wait", "abort"]


class CallOptions(msgspec.Struct, frozen=True):
    """Options of a call; see `Pool.options`.

    Attributes:
        priority: Calls of higher priority go first.
        cost: Weight in the load of the replica.
        group: Name by which it can be cancelled.
        when_full: "wait" for room in a full queue, or "refuse".
        session: Name of the session.
    """

    priority: int = 0
    cost: float = 1.0
    group: Any = None
    when_full: WhenFull = "wait"
    session: str | None = None

    def check(self) -> None:
        """Raise `TypeError` or `ValueError` for an option that is out of bounds."""
        if not isinstance(self.priority, int):
            raise TypeError(f"priority must be a whole number, got {self.priority!r}")
        if not 0 < self.cost < math.inf:
            raise ValueError(f"cost must be a positive number, got {self.cost!r}")
        if self.when_full not in get_args(WhenFull):
            raise ValueError(f'when_full must be "wait" or "refuse", got {self.when_full!r}')


class PoolCall(PoolRequest, eq=False, kw_only=True):
    """Call of a pool in progress.

    Attributes:
        name: Name of the endpoint.
        scope: Cancel scope of the whole call.
        news: Set when it is admitted to the queue, then when it has a replica; None unless its task waits for that.
        error: Error to raise in place of the cancel.
        is_unrouted: True if `error` is that of its route.
        errors: Errors of attempts that were retried.
        tries: Number of replicas that died while they ran it, or before they began it.
        end: Ends an open stream, which runs outside of `scope`, for a reason; None for other calls.
    """

    name: str
    scope: trio.CancelScope = msgspec.field(default_factory=trio.CancelScope)
    news: trio.Event | None = None
    error: Exception | None = None
    is_unrouted: bool = False
    tries: int = 0
    errors: Sequence[Exception] = ()
    end: Callable[[str], None] | None = None

    def copy(self) -> PoolCall:
        """Return a new call with the same arguments and cost, to run beside this one."""
        return PoolCall(self.args, self.kwargs, cost=self.cost, size=self.size, name=self.name)

    def cancel(self, error: Exception) -> None:
        """Cancel it; its caller gets this error."""
        self.error = error
        self.scope.cancel(reason=str(error))
        if self.end is not None:
            self.end(str(error))


class Counts:
    """Outcomes of calls; each call is counted once."""

    def __init__(self) -> None:
        self.made = self.succeeded = self.failed = self.cancelled = self.refused = self.retried = 0
        self.hedged = self.limited = 0


class PoolEngine:
    """Engine of a pool, in the process that opened it.

    Attributes:
        views: The replicas.
        dispatcher: Assigns calls to replicas.
        counts: Outcomes of calls.
        attempts: Policies for its requests.
        arrivals: Calls that wait for room in the queue.
        calls: All calls that are not over, in the order of arrival.
        closing: Set when its block is being left.
        sick: Indices of replicas that fail their health check.
        change_size: Resizes the mesh, if the pool was opened with `procs=`.
        check_size: Raises if the mesh could not have a size; None as above.
        latencies: Latencies of the last requests that returned, with their time in the queue.
        on_new: Called with the index of each new replica.
        reading: Number of streams whose generation has ended while their consumer reads on.
        nursery: Nursery of the pool's block.
        updates: Updates that replicas need before they serve.
    """

    nursery: trio.Nursery
    updates: Updates

    def __init__(
        self, mesh: ActorMesh, views: list[ActorMesh], dispatcher: Dispatcher[PoolCall], attempts: Attempts
    ) -> None:
        self.mesh = mesh
        self.attempts = attempts
        self.views = views
        self._sizes = [len(view) for view in views]
        self.dispatcher = dispatcher
        self.counts = Counts()
        self.arrivals: deque[PoolCall] = deque()
        self.calls: dict[PoolCall, None] = {}
        self.closing = trio.Event()
        self.change_size: Callable[[int], Awaitable[None]] | None = None
        self.check_size: Callable[[int], None] | None = None
        self.latencies = Latencies()
        self.on_new: Callable[[int], object] = lambda _: None
        self.sick: set[int] = set()
        self.reading = 0
        self._dead: set[int] = set()
        self._down = trio.Event()
        self._changed: trio.Event | None = None  # made by the task that waits for it
        self._streams: dict[str, bool] = {}  # whether an endpoint is a generator, of those that were called

    # ---- one call --------------------------------------------------------------------------------------------

    async def run(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions) -> Any:
        """Run an endpoint on one replica; see `Pool`."""
        call = self.begin(name, args, kwargs, options)
        made = trio.current_time()
        try:
            with call.scope:
                if self.attempts.is_needed:
                    await self.attempts.wait_turn(self, call, options)
                admitted = self.admit(call, options)
                if admitted is not None:
                    await admitted.wait()
                result = await self._run_somewhere(call)
                self.counts.succeeded += 1
                now = trio.current_time()
                self.latencies.add(now, now - made)
                return result
            assert call.error is not None
            raise call.error
        except BaseException as error:
            self.count_failed(call, error)
            raise
        finally:
            self.let_go(call)

    def begin(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions, *, streams: bool = False
    ) -> PoolCall:
        """Return a new call, which is counted."""
        if self._streams.get(name) is not streams:
            self.check_kind(name, streams=streams)
        if self.is_closed:
            raise self.stopped()
        size = estimate_bytes((args, kwargs)) if args or kwargs else 0
        call = PoolCall(
            args, kwargs, priority=options.priority, cost=options.cost, size=size,
            group=options.group, session=options.session, name=name,
        )  # fmt: skip
        self.counts.made += 1
        self.calls[call] = None
        return call

    def check_kind(self, name: str, *, streams: bool) -> None:
        """Check that an endpoint is a generator if it is called by `stream`, and only then.

        Args:
            name: Name of the endpoint.
            streams: Whether it is called by `stream`.

        Raises:
            AttributeError: There is no such endpoint.
            TypeError: It is of the other kind.
        """
        is_stream = self.spec_of(name).kind is EndpointKind.GENERATOR
        if is_stream and not streams:
            raise TypeError(
                f"{self.mesh.name}.{name} is an async generator, which only stream can call: "
                f"write `async with pool.stream.{name}(...) as items`"
            )
        if streams and not is_stream:
            raise TypeError(
                f"pool.stream calls async generators, and {self.mesh.name}.{name} returns one value: "
                f"write `await pool.{name}(...)`"
            )
        self._streams[name] = is_stream

    def admit(self, call: PoolCall, options: CallOptions) -> trio.Event | None:
        """Assign a replica or a place in the queue; if there is none, return the event of a place."""
        if (not self.arrivals and self.dispatcher.grant(call)) or self._let_in(call, options):
            return None
        admitted = call.news = trio.Event()
        self.arrivals.append(call)
        self.pump()
        return admitted

    def count_failed(self, call: PoolCall, error: BaseException) -> None:
        """Count a call that did not succeed."""
        if not isinstance(error, Exception):
            self.counts.cancelled += 1
        elif isinstance(error, Overloaded) and error is call.error:
            self.counts.refused += 1
        elif call.scope.cancelled_caught and not call.is_unrouted:
            self.counts.cancelled += 1
        else:
            self.counts.failed += 1

    def _let_in(self, call: PoolCall, options: CallOptions) -> bool:
        """Queue a call if there is room; otherwise return False.

        Raises:
            Overloaded: There is no room, and the call does not wait for it.
        """
        if not self.arrivals and self.dispatcher.waiting.has_room(call.size):
            self.dispatcher.submit(call)
            self.pump()
            return True
        if options.when_full != "refuse":
            return False
        waiting = self.dispatcher.waiting
        call.error = Overloaded(
            f"the pool of {self.mesh.name} refuses {call.name}, as its queue is full: {waiting.count} requests of "
            f"{waiting.bytes} bytes wait, at most queue={waiting.count_max} and queue_bytes={waiting.bytes_max}; try "
            'later, or write when_full="wait"'
        )
        raise call.error

    async def _run_somewhere(self, call: PoolCall) -> Any:
        while True:
            index = await self.assigned(call)
            dispatcher = self.dispatcher
            begun = trio.current_time() if dispatcher.measures else 0.0
            try:
                run = self.attempts.run_hedged if self.attempts.is_hedging else None
                result = await (self.run_on(index, call) if run is None else run(self, index, call))
            except Exception as error:
                if not self.is_end_of(call, error):
                    if await self.attempts.wait_retry(self, call, error):
                        continue
                    dispatcher.end(call, trio.current_time() - begun if dispatcher.measures else None)
                    raise
                self.see_down(index)
                if not self.may_try_again(call, error):
                    raise
                self.send_elsewhere(call)
                continue
            dispatcher.end(call, trio.current_time() - begun if dispatcher.measures else None)
            return result

    async def assigned(self, call: PoolCall) -> int:
        """Wait until a queued call has a replica; return its index."""
        while True:
            while call.state != "running":
                call.news = trio.Event()
                await call.news.wait()
            assert call.replica is not None
            if self.look(call.replica):
                return call.replica
            self.send_elsewhere(call)

    def run_on(self, index: int, call: PoolCall) -> Awaitable[Any]:
        """Run a call on a replica."""
        endpoint: Endpoint[..., Any] = getattr(self.views[index], call.name)
        if self._sizes[index] == 1:
            return endpoint.call_one(*call.args, **call.kwargs)
        return _first_of(endpoint, call)

    def send_elsewhere(self, call: PoolCall) -> None:
        """Queue a call again, whose replica has died."""
        call.tries += 1
        self.counts.retried += 1
        self.dispatcher.retry(call)
        self.pump()

    def is_end_of(self, call: PoolCall, error: Exception) -> bool:
        """Return whether an error means the end of the replica, not an outcome of the endpoint."""
        ends = [origin(leaf) for leaf in leaves(error) if isinstance(leaf, _ENDS)]
        return any(where.mesh == self.mesh.name and where.endpoint == call.name for where in ends)

    def may_try_again(self, call: PoolCall, error: Exception) -> bool:
        """Return whether a call whose replica has died with this error may run on another one."""
        if call.tries + 1 >= limits.POOL_TRIES:
            return False
        if all(isinstance(leaf, _MAYBE) and not leaf.maybe_executed for leaf in leaves(error)):
            return True
        return self.spec_of(call.name).idempotent

    def spec_of(self, name: str) -> EndpointSpec:
        """Return an endpoint of the replicas; raise `AttributeError` that names all if there is no such one."""
        getattr(self.mesh, name)
        return self.mesh._view.endpoints[name]  # noqa: SLF001 - a method would hide an endpoint of that name

    def release(self, call: PoolCall, seconds: float | None) -> None:
        """Free the place of a stream at its replica, which has ended it; its consumer may still read items."""
        self.dispatcher.end(call, seconds)
        self.reading += 1
        self.let_go(call)

    def resume(self, call: PoolCall) -> None:
        """Queue a released stream again, whose replica has died."""
        self.reading -= 1
        self.calls[call] = None
        self.send_elsewhere(call)

    def let_go(self, call: PoolCall) -> None:
        """Remove a call that is over from the queue or its replica."""
        del self.calls[call]
        if call.state == "waiting":
            self.dispatcher.withdraw(call)
        elif call.state == "running":
            self.dispatcher.end(call, None)
        elif call in self.arrivals:
            self.arrivals.remove(call)
        if self.dispatcher.waiting.count or self.arrivals or self._changed is not None:
            self.pump()

    # ---- assignment ------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Assign queued calls to replicas with room, and admit waiting calls to the queue."""
        while True:
            for call, _ in self.dispatcher.take():
                self._tell(call)
            for call, error in self.dispatcher.unrouted:
                call.error, call.is_unrouted = error, True
                call.scope.cancel(reason="its route has raised")
            self.dispatcher.unrouted.clear()
            if not self.arrivals or not self.dispatcher.waiting.has_room(self.arrivals[0].size):
                break
            call = self.arrivals.popleft()
            self.dispatcher.submit(call)
            self._tell(call)
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    def _tell(self, call: PoolCall) -> None:
        if call.news is not None:
            call.news.set()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition that changes only when requests start or end."""
        await trio.lowlevel.checkpoint()
        while not condition():
            await self._wait_for_change()

    async def _wait_for_change(self) -> None:
        if self._changed is None:
            self._changed = trio.Event()
        await self._changed.wait()

    # ---- replicas --------------------------------------------------------------------------------------------

    def look(self, index: int) -> bool:
        """Return whether to send to a replica: False if it has died while another one lives, or needs an update."""
        if self.updates.standing and self.updates.holds_back(index):
            return False
        if is_whole(self.views[index]):
            return True
        self.see_down(index)
        return not any(replica.is_up for replica in self.dispatcher.serving())

    def add(self, view: ActorMesh) -> None:
        """Add a replica."""
        self.views.append(view)
        self._sizes.append(len(view))
        self.dispatcher.add()
        self.on_new(len(self.views) - 1)

    def set_absent(self, index: int, *, is_absent: bool) -> None:
        """Set whether a replica's processes are in their mesh; one that comes back counts as new."""
        if is_absent != self.dispatcher.replicas[index].is_absent:
            self.dispatcher.set_absent(index, is_absent=is_absent)
            self._dead.discard(index)
            self.judge(index)

    def see_down(self, index: int) -> None:
        """Take a replica out of service until it is back."""
        if self.dispatcher.replicas[index].is_absent:
            return
        self._dead.add(index)
        self.judge(index)
        self._down.set()

    def judge(self, index: int) -> None:
        """Update the dispatcher on whether a replica serves."""
        self.dispatcher.set_up(index, is_up=index not in self._dead and index not in self.sick)

    async def watch(self) -> None:
        """Poll replicas that are down until they come back."""
        while True:
            await self._down.wait()
            await trio.sleep(limits.POOL_LOOK_SECONDS)
            for index in sorted(self._dead):
                if len(self.views[index].alive()) == self._sizes[index]:
                    self._dead.discard(index)
                    self.judge(index)
            if not self._dead:
                self._down = trio.Event()
            self.pump()

    def moves_of(self, session: str | None) -> int:
        """Return how often a session had to go to another replica."""
        return 0 if session is None else self.dispatcher.sessions.find(session).moves

    async def resize(self, replicas: int) -> None:
        if self.change_size is not None:
            await self.change_size(replicas)
            return
        if not 1 <= replicas <= len(self.views):
            raise ValueError(
                f"a pool of {self.mesh.name} can have 1 to {len(self.views)} replicas, which its mesh has, "
                f"got {replicas!r}: for more, open it with procs=, the processes that the actors live in"
            )
        for index in range(len(self.views)):
            self.dispatcher.set_drained(index, is_drained=index >= replicas)
        self.pump()
        await self.wait_until(lambda: not any(one.running for one in self.dispatcher.replicas[replicas:]))

    # ---- pauses and cancels ----------------------------------------------------------------------------------

    @asynccontextmanager
    async def paused(self, mode: PauseMode) -> AsyncGenerator[None, None]:
        self.dispatcher.pauses += 1
        try:
            if mode == "abort":
                await self._abort_running()
            if mode != "keep":
                await self.wait_until(lambda: not self.dispatcher.running)
            yield
        finally:
            self.dispatcher.pauses -= 1
            self.pump()

    async def _abort_running(self) -> None:
        """Cancel running calls, one replica per turn of the event loop.

        Messages are sent at the end of a turn: so one replica unwinds its calls while this process cancels those of the
        next. All in one turn, replicas would wait for the last cancel, and then this process for the replicas.
        """
        running: dict[int | None, list[PoolCall]] = {}
        for call in self.calls:
            if call.state == "running":
                running.setdefault(call.replica, []).append(call)
        for calls in running.values():
            self.cancel(lambda call: call.state == "running", partial(Paused, self._paused_text), calls)
            await trio.lowlevel.cancel_shielded_checkpoint()

    def cancel(
        self,
        wanted: Callable[[PoolCall], bool],
        error: Callable[[], Exception],
        calls: Iterable[PoolCall] | None = None,
    ) -> int:
        """Cancel the matching calls, each with a new error; return how many."""
        found = [call for call in (self.calls if calls is None else calls) if call.error is None and wanted(call)]
        for call in found:
            call.cancel(error())
        return len(found)

    def cancel_for(self, reason: str, wanted: Callable[[PoolCall], bool]) -> int:
        return self.cancel(wanted, lambda: RemoteCancelled(reason=reason, canceller=f"the pool of {self.mesh.name}"))

    async def close(self) -> None:
        """Refuse new calls, cancel those in progress, and wait until they have unwound."""
        self.closing.set()
        self.cancel(lambda _: True, self.stopped)
        with trio.CancelScope(shield=True):
            while self.calls:
                await self._wait_for_change()

    @property
    def is_closed(self) -> bool:
        """Whether its block is being left."""
        return self.closing.is_set()

    def stopped(self) -> MeshStopped:
        """Return the error of those who use the pool while its block is being left."""
        return MeshStopped(f"the pool of {self.mesh.name} accepts no requests: its block is being left")

    @property
    def _paused_text(self) -> str:
        return f'the pool of {self.mesh.name} was paused by paused("abort") while this request ran: send it again'


async def _first_of(endpoint: Endpoint[..., Any], call: PoolCall) -> Any:
    """Call all members of a replica; return the result of the first member."""
    results = await endpoint.call(*call.args, **call.kwargs)
    return next(iter(results.values()))


class PoolFront(Actor):
    """Actor by which other processes use a pool."""

    def __init__(self, number: int) -> None:
        self.engine: PoolEngine = take_over(number)

    @endpoint(concurrency=limits.SERVICE_REMOTE_CALLS, group="calls")
    async def run(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions
    ) -> tuple[Any, int]:
        """Run an endpoint on one replica; return its result and the session's number of moves."""
        result = await self.engine.run(name, args, kwargs, options)
        return result, self.engine.moves_of(options.session)

    @endpoint(concurrency=limits.SERVICE_REMOTE_CALLS, group="streams")
    async def stream(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], options: CallOptions
    ) -> AsyncGenerator[tuple[Any, ...], None]:
        """Yield the items of a stream, each behind the session's number of moves; first that number alone."""
        items = streams.PoolItems[Any](self.engine, name, args, kwargs, options)
        async with streams.PoolStream(items) as stream:
            yield (self.engine.moves_of(options.session),)
            async for item in stream:
                yield self.engine.moves_of(options.session), item

    @endpoint(concurrency=limits.SERVICE_REMOTE_CALLS, group="pauses")
    async def hold_pause(self, mode: PauseMode) -> AsyncGenerator[None, None]:
        """Pause the pool until the consumer leaves or dies.

        Raises:
            MeshStopped: The pool ends first.
        """
        async with self.engine.paused(mode):
            yield
            await self.engine.closing.wait()
        raise self.engine.stopped()
