"""The state of a pool: requests come, wait, are given to replicas, and end; replicas come and go."""

from __future__ import annotations

from collections.abc import Sequence

from trimesh.service.dispatch.adaptive import Adaptive, ReplicaLimit
from trimesh.service.dispatch.replica import Replica
from trimesh.service.dispatch.request import PoolRequest
from trimesh.service.dispatch.routes import PoolRoute
from trimesh.service.dispatch.sessions import Sessions
from trimesh.service.dispatch.waiting import RequestQueue


class Dispatcher:
    """Which request goes where, and when.

    Every request that `submit` has taken ends by exactly one `end`, or one `withdraw` while it waits, or is in
    `unrouted` once.

    Attributes:
        replicas: All of them, those that are down or drained, too.
        waiting: The queue.
        sessions: Where sessions are.
        pauses: How many blocks hold the queue back.
        submitted: Requests that were taken in.
        ended: Those that are over.
        measures: Whether it matters how long replicas have requests.
        unrouted: Requests for which the route has raised, or has chosen no candidate, each with that error; whoever
            calls `take` takes them out.
    """

    def __init__(
        self,
        replicas: int,
        *,
        route: PoolRoute,
        concurrency: int | Adaptive,
        queue: int,
        queue_bytes: int,
        sessions: int,
    ) -> None:
        rule = concurrency if isinstance(concurrency, Adaptive) else None
        start = concurrency.start if isinstance(concurrency, Adaptive) else concurrency
        self._start = start
        self.replicas = [Replica(index, start) for index in range(replicas)]
        self.waiting = RequestQueue(queue, queue_bytes)
        self.sessions = Sessions(sessions)
        self.pauses = 0
        self.submitted = 0
        self.ended = 0
        self.unrouted: list[tuple[PoolRequest, Exception]] = []
        self._route = route
        self._given = 0
        self._rule = rule
        self.measures = rule is not None
        self._limits = [ReplicaLimit(replica, rule) for replica in self.replicas]
        self._serving: Sequence[Replica] | None = None  # until one comes or goes

    @property
    def running(self) -> int:
        """Requests that replicas run."""
        return sum(replica.running for replica in self.replicas)

    def has_room(self, size: int) -> bool:
        """Whether the queue can take a request of so many bytes."""
        return self.waiting.has_room(size)

    def submit(self, request: PoolRequest) -> None:
        """Take a request in."""
        request.number = self.submitted
        self.submitted += 1
        self._put(request)

    def grant(self, request: PoolRequest) -> bool:
        """Take a request in and give it to a replica at once, as `submit` and `take` would; return whether it has one.

        False: something waits before it, or no replica has room. Then nothing was changed.

        Raises:
            Exception: What the route has raised. Nothing was changed.
        """
        if self.pauses or self.waiting.count or request.session is not None:
            return False
        serving = self.serving()
        candidates = [one for one in serving if one.running < one.limit]
        if not candidates:
            return False
        replica = self._choose(request, candidates, serving)
        request.number = self.submitted
        self.submitted += 1
        self._give(request, replica)
        return True

    def withdraw(self, request: PoolRequest) -> None:
        """Let a request go that waits: its caller has left, or it was cancelled."""
        self.waiting.remove(request)
        request.state = "over"
        self.ended += 1

    def end(self, request: PoolRequest, seconds: float | None) -> None:
        """Note that a replica is done with a request.

        Args:
            request: The request.
            seconds: How long the replica had it; None if that says nothing of the replica.
        """
        self._give_up(request)
        request.state = "over"
        self.ended += 1
        if seconds is not None and request.replica is not None:
            self._limits[request.replica].learn(seconds)

    def retry(self, request: PoolRequest) -> None:
        """Let a request wait again, at its old place: its replica has not run it, or it may run twice."""
        self._give_up(request)
        self._put(request)

    def take(self) -> list[tuple[PoolRequest, Replica]]:
        """Return the requests that replicas may run now, each with its replica; they count as running."""
        taken: list[tuple[PoolRequest, Replica]] = []
        while not self.pauses and self.waiting.count:
            serving = self.serving()
            candidates = [one for one in serving if one.running < one.limit]
            request = self._next(candidates)
            if request is None:
                break
            if request.replica is None and self._pin(request, serving):
                continue
            if request.replica is not None:
                replica = self.replicas[request.replica]
            else:
                try:
                    replica = self._choose(request, candidates, serving)
                except Exception as error:  # noqa: BLE001 - a function of the user: it fails this request alone
                    self.withdraw(request)
                    self.unrouted.append((request, error))
                    continue
            self.waiting.remove(request)
            self._give(request, replica)
            taken.append((request, replica))
        return taken

    def serving(self) -> Sequence[Replica]:
        """Return the replicas that requests may go to: those that are up, or if none is, those that may come back."""
        if self._serving is None:
            inside = [one for one in self.replicas if one.is_in_service]
            self._serving = [one for one in inside if one.is_up] or inside
        return self._serving

    def set_up(self, index: int, *, is_up: bool) -> None:
        """Note whether a replica lives and answers."""
        if self.replicas[index].is_up != is_up:
            self.replicas[index].is_up = is_up
            self._serving = None
            self._release()

    def set_drained(self, index: int, *, is_drained: bool) -> None:
        """Keep a replica out, or let it in again."""
        self.replicas[index].is_drained = is_drained
        self._serving = None
        self._release()

    def set_updating(self, index: int, *, is_updating: bool) -> None:
        """Keep a replica out while it is updated, whatever its size of the pool says of it."""
        self.replicas[index].is_updating = is_updating
        self._serving = None
        self._release()

    def add(self) -> None:
        """Take one more replica, with the next index."""
        replica = Replica(len(self.replicas), self._start)
        self.replicas.append(replica)
        self._serving = None
        self._limits.append(ReplicaLimit(replica, self._rule))

    def set_absent(self, index: int, *, is_absent: bool) -> None:
        """Keep a replica out for as long as its processes are not there."""
        self.replicas[index].is_absent = is_absent
        self._serving = None
        self._release()

    def _choose(self, request: PoolRequest, candidates: Sequence[Replica], serving: Sequence[Replica]) -> Replica:
        """Ask the route.

        Raises:
            ValueError: It has chosen none of the candidates.
        """
        chosen: object = self._route.choose(request, candidates, serving)
        if type(chosen) is not Replica or not any(chosen is one for one in candidates):
            indices = [one.index for one in candidates]
            raise ValueError(
                f"a route must return one of the candidates, {indices}, or as a function its index; got {chosen!r}"
            )
        return chosen

    def _next(self, candidates: Sequence[Replica]) -> PoolRequest | None:
        if not candidates:
            return None
        if not self.waiting.has_pinned:
            return self.waiting.first(None)
        heads = [self.waiting.first(one.index) for one in candidates]
        found = [one for one in (*heads, self.waiting.first(None)) if one is not None]
        return min(found, key=lambda one: one.order, default=None)

    def _pin(self, request: PoolRequest, serving: Sequence[Replica]) -> bool:
        """Let a request wait for the replica that its session has got meanwhile; return whether it does."""
        if request.session is None:
            return False
        place = self.sessions.find(request.session)
        if place.replica not in {one.index for one in serving}:
            return False
        self.waiting.remove(request)
        request.replica = place.replica
        self.waiting.put(request)
        return True

    def _put(self, request: PoolRequest) -> None:
        place = None if request.session is None else self.sessions.find(request.session)
        request.replica = None if place is None else place.replica
        self.waiting.put(request)
        self._release()

    def _release(self) -> None:
        """Let requests of sessions go elsewhere whose replica does not serve."""
        pinned = self.waiting.pinned()
        if not pinned:
            return
        indices = {one.index for one in self.serving()}
        for index in pinned:
            if index not in indices:
                self.waiting.release(index)

    def _give(self, request: PoolRequest, replica: Replica) -> None:
        request.state, request.replica = "running", replica.index
        replica.running += 1
        replica.cost += request.cost
        self._given += 1
        replica.used = self._given
        if request.session is not None:
            self.sessions.settle(request.session, replica.index)

    def _give_up(self, request: PoolRequest) -> None:
        assert request.state == "running"
        assert request.replica is not None
        replica = self.replicas[request.replica]
        replica.running -= 1
        replica.cost = replica.cost - request.cost if replica.running else 0.0
        replica.ended += 1
