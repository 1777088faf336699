"""Attempts of a request of a pool: retries after errors, a second replica beside a slow one, and the rate.

HY-1 Only endpoints that may run twice are retried or hedged, and no requests of sessions are hedged.
HY-2 A hedged request has one outcome: that of the replica that answers first. The other run is cancelled, and the
     caller does not wait for it; it holds its place until it has unwound, so that a pause or an update waits for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio

from trimesh._runtime.life import current_proc
from trimesh.actor.item_map import with_earlier
from trimesh.actor.options import Retry
from trimesh.errors import Overloaded, add_note, leaves
from trimesh.service.request_policies import AttemptBudget, HedgeDelay, Rate, TokenBucket

if TYPE_CHECKING:
    from trimesh.actor.actor_mesh import ActorMesh
    from trimesh.service.pool.engine import CallOptions, PoolCall, PoolEngine


class Attempts:
    """Policies of a pool for its requests.

    Raises:
        TypeError: A policy has the wrong type, or no endpoint may run twice.
        ValueError: A number is out of its bounds.

    Attributes:
        beside: Number of second runs of requests, counted until both have ended.
        delayed: Number of requests that wait for the rate, or for their next attempt.
        is_hedging: Whether slow requests get a second replica.
        is_needed: Whether there is any policy.
    """

    def __init__(self, mesh: ActorMesh, *, retry: Retry | None, hedge: Any, budget: float, rate: Rate | None) -> None:
        if retry is not None and not isinstance(retry, Retry):
            raise TypeError(f"retry must be a trimesh.Retry, got {retry!r}")
        if rate is not None and not isinstance(rate, Rate):
            raise TypeError(f"rate must be a trimesh.service.Rate, got {rate!r}: write Rate(100)")
        specs = mesh._view.endpoints.values()  # noqa: SLF001 - a method would hide an endpoint of that name
        if (retry is not None or hedge is not None) and not any(spec.idempotent for spec in specs):
            raise TypeError(
                f"retry= and hedge= are for endpoints that may run twice, and {mesh.name} has none: mark those that "
                "may with @endpoint(idempotent=True)"
            )
        self.delayed = 0
        self.beside = 0
        self.is_hedging = hedge is not None
        self.is_needed = retry is not None or hedge is not None or rate is not None
        self._retry = retry
        self._hedge = None if hedge is None else HedgeDelay(hedge)
        self._budget = AttemptBudget(budget)
        self._rate = rate
        self._bucket: TokenBucket | None = None
        self._line = trio.Lock()

    # ---- rate ------------------------------------------------------------------------------------------------

    async def wait_turn(self, engine: PoolEngine, call: PoolCall, options: CallOptions) -> None:
        """Wait until the rate lets a call begin, behind those that wait already; no checkpoint if it does now.

        Raises:
            Overloaded: It does not now, and the call does not wait for it.
        """
        self._budget.note_request()
        if self._rate is None:
            return
        bucket = self._bucket
        if bucket is None:
            bucket = self._bucket = TokenBucket(self._rate, trio.current_time())
        if not self._line.locked() and not bucket.take(trio.current_time(), call.cost):
            return
        if options.when_full == "refuse":
            call.error = Overloaded(
                f"the pool of {engine.mesh.name} refuses {call.name}, as more than its rate of "
                f'{self._rate.per_second:g} a second would begin; try later, or write when_full="wait"'
            )
            raise call.error
        self.delayed += 1
        engine.counts.limited += 1
        try:
            async with self._line:
                while seconds := bucket.take(trio.current_time(), call.cost):  # noqa: ASYNC110 - time alone fills it
                    await trio.sleep(seconds)
        finally:
            self.delayed -= 1

    # ---- retries ---------------------------------------------------------------------------------------------

    async def wait_retry(self, engine: PoolEngine, call: PoolCall, error: Exception) -> bool:
        """Return whether to run a call again that its endpoint has failed, after the backoff; it has no replica then.

        Otherwise the error gets its earlier ones as context.
        """
        retry = self._retry
        if retry is None or not engine.spec_of(call.name).idempotent:
            return False
        attempt = len(call.errors) + 1
        if not all(isinstance(leaf, Exception) and retry.wants(leaf, attempt) for leaf in leaves(error)):
            with_earlier(error, call.errors)
            return False
        if not self._budget.take():
            with_earlier(error, call.errors)
            add_note(error, f"not retried: the pool's budget, {self._budget.share:g} of its requests, is used up")
            return False
        call.errors = [*call.errors, error]
        engine.counts.retried += 1
        engine.dispatcher.give_back(call)
        engine.pump()
        self.delayed += 1
        try:
            await trio.sleep(retry.delay(attempt, current_proc().chance()))
        finally:
            self.delayed -= 1
        engine.dispatcher.put_again(call)
        engine.pump()
        return True

    # ---- hedges ----------------------------------------------------------------------------------------------

    async def run_hedged(self, engine: PoolEngine, index: int, call: PoolCall) -> Any:
        """Run a call on its replica, and after a while also on a second one; return the first value."""
        assert self._hedge is not None
        is_hedged = call.session is None and engine.spec_of(call.name).idempotent
        delay = self._hedge.seconds(call.name) if is_hedged else None
        begun = trio.current_time()
        if delay is None:
            result = await engine.run_on(index, call)
        else:
            result = await _Race(engine, call).run(delay, self._budget)
        if is_hedged:
            now = trio.current_time()
            self._hedge.note(call.name, now, now - begun)
        return result


class _Race:
    """A call that runs on one replica, or two, in tasks of the pool: its caller does not wait for the slower one.

    Each run holds a place at its replica until it has unwound.
    """

    def __init__(self, engine: PoolEngine, call: PoolCall) -> None:
        self._engine = engine
        self._call = call
        self._second: PoolCall | None = None
        self._scopes: dict[int, trio.CancelScope] = {}  # of the runs that have not ended, by replica
        self._outcomes: dict[int, tuple[Any, Exception | None]] = {}  # at most one
        self._deaths: list[Exception] = []
        self._news = trio.Event()

    async def run(self, delay: float, budget: AttemptBudget) -> Any:
        first = self._call.replica
        assert first is not None
        self._start(first)
        try:
            with trio.move_on_after(delay):
                await self._news.wait()
            if not self._news.is_set():
                self._start_second(first, budget)
            await self._news.wait()
            if not self._outcomes and not self._deaths:
                await trio.sleep_forever()  # the deadline of the caller has ended the runs, and ends this
        except BaseException:
            await self._end_runs()
            raise
        for scope in self._scopes.values():
            scope.cancel(reason="another replica has answered")
        for replica, (value, error) in self._outcomes.items():
            if self._second is not None and self._scopes and replica != first:
                # The slower run is the first one: it holds its place by the second call from now on.
                self._call.replica, self._second.replica = self._second.replica, first
            if error is not None:
                raise error
            return value
        raise self._deaths[0]

    def _start_second(self, first: int, budget: AttemptBudget) -> None:
        """Run the call also on another replica with room, if there is one and the budget allows it."""
        engine, second = self._engine, self._call.copy()
        if not engine.dispatcher.grant_beside(second, first):
            return
        assert second.replica is not None
        if not engine.look(second.replica) or not budget.take():
            engine.dispatcher.end(second, None)
            engine.pump()
            return
        engine.counts.hedged += 1
        engine.attempts.beside += 1
        self._second = second
        self._start(second.replica)

    def _start(self, replica: int) -> None:
        self._scopes[replica] = trio.CancelScope(deadline=trio.current_effective_deadline())
        self._engine.nursery.start_soon(self._run_on, replica)

    async def _run_on(self, replica: int) -> None:
        engine, call = self._engine, self._call
        try:
            with self._scopes[replica]:
                try:
                    value = await engine.run_on(replica, call)
                    self._outcomes = self._outcomes or {replica: (value, None)}
                except Exception as error:  # noqa: BLE001 - raised by the caller's task
                    if engine.is_end_of(call, error):
                        engine.see_down(replica)
                        self._deaths.append(error)
                    else:
                        self._outcomes = self._outcomes or {replica: (None, error)}
        finally:
            del self._scopes[replica]
            if self._outcomes or not self._scopes:
                self._news.set()
            if not self._scopes and self._second is not None:
                engine.dispatcher.end(self._second, None)
                engine.attempts.beside -= 1
                engine.pump()

    async def _end_runs(self) -> None:
        """Cancel the runs, and wait until they have unwound, as a call does."""
        for scope in self._scopes.values():
            scope.cancel(reason="the caller of the request has left")
        with trio.CancelScope(shield=True):
            while self._scopes:
                self._news = trio.Event()
                await self._news.wait()
