"""PURE: dispatcher of a pool, which queues requests and assigns them to replicas; routes and sessions."""

from __future__ import annotations

import bisect
import hashlib
import heapq
import math
import operator
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import msgspec

from trimesh.plain_numbers import plain_real, plain_whole

# ---- requests and replicas -------------------------------------------------------------------------------------------


class PoolRequest(msgspec.Struct, eq=False):
    """Call that waits for a replica, or runs on one.

    Attributes:
        args: Arguments of the call by position; they and `kwargs` are for routes.
        kwargs: Arguments of the call by keyword.
        priority: Higher ones go first.
        cost: Weight in the load of its replica.
        size: Bytes of the arguments, as estimated.
        group: Name by which it can be cancelled.
        session: Name of its session, or None.
        key: For routes: the session, unless another one was given.
        number: Position in the order of arrival; a retried request keeps it.
        replica: Index of the replica that runs it; while it waits, of the one it is bound to, or None.
        state: "new", "waiting", "running" or "over".
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    priority: int = 0
    cost: float = 1.0
    size: int = 0
    group: object = None
    session: str | None = None
    key: object = None
    number: int = -1
    replica: int | None = None
    state: str = "new"

    def __post_init__(self) -> None:
        if self.key is None:
            self.key = self.session

    @property
    def order(self) -> tuple[int, int]:
        """Place in the queue: by priority, then first come, first served."""
        return -self.priority, self.number


class Replica(msgspec.Struct, eq=False):
    """State of one replica.

    Attributes:
        index: Its index along the dimension of the pool.
        limit: Number of requests that it may run at once.
        running: Number of requests that it runs.
        cost: Sum of their costs.
        used: Number of its last assignment, -1 before the first.
        is_up: True if its processes live and answer.
        is_drained: Whether `resize` keeps it out of service.
        is_updating: Whether `rolling` keeps it out of service.
        is_behind: Whether it waits for an update of `each`.
        is_absent: Whether its processes have left their mesh.
        ended: Requests that have ended here, with any outcome.
    """

    index: int
    limit: int
    running: int = 0
    cost: float = 0.0
    used: int = -1
    is_up: bool = True
    is_drained: bool = False
    is_updating: bool = False
    is_behind: bool = False
    is_absent: bool = False
    ended: int = 0
    _quick: int = 0
    _held: int = 0  # requests that had begun when the limit was lowered: their latency does not measure the new limit

    @property
    def is_member(self) -> bool:
        """True if it belongs to the pool at its present size."""
        return not self.is_drained and not self.is_absent

    @property
    def is_out(self) -> bool:
        """True if `resize`, `rolling` or `each` keeps it out of service."""
        return self.is_drained or self.is_updating or self.is_behind

    @property
    def is_in_service(self) -> bool:
        """True if it accepts requests while it lives."""
        return self.is_member and not self.is_updating and not self.is_behind

    def learn(self, rule: Adaptive, seconds: float) -> None:
        """Adapt the limit to the latency of a request that has ended."""
        if self._held:
            self._held -= 1
        elif seconds > rule.latency:
            self.limit = max(rule.least, int(self.limit * rule.factor))
            self._quick, self._held = 0, self.running
        else:
            self._quick += 1
            if self._quick >= self.limit:
                self._quick, self.limit = 0, min(rule.most, self.limit + 1)


class Adaptive:
    """Adaptive concurrency: grows by one for each round of quick requests, shrinks by a factor after a slow one.

    Additive increase, multiplicative decrease: the limit converges to the load that a replica can serve in `latency`.

    Args:
        latency: Seconds that one request may take; a slower one lowers the limit.
        least: Least limit of a replica, at least 1.
        most: Greatest limit of a replica.
        start: First limit; `least` by default.
        factor: Factor between 0 and 1 by which a slow request multiplies the limit. Requests that were running at a
            decrease do not cause another one.

    Raises:
        ValueError: A number is out of its bounds.
    """

    def __init__(
        self, latency: float, *, least: int = 1, most: int = 256, start: int | None = None, factor: float = 0.7
    ) -> None:
        latency, factor, least, most = plain_real(latency), plain_real(factor), plain_whole(least), plain_whole(most)
        first: int = least if start is None else plain_whole(start)
        if not (latency > 0 and 1 <= least <= first <= most and 0 < factor < 1):
            raise ValueError(
                "Adaptive needs latency > 0, 1 <= least <= start <= most and 0 < factor < 1, got "
                f"latency={latency!r}, least={least!r}, start={first!r}, most={most!r}, factor={factor!r}"
            )
        self.latency = latency
        self.least = least
        self.most = most
        self.start = first
        self.factor = factor


# ---- routes ----------------------------------------------------------------------------------------------------------


@runtime_checkable
class PoolRoute(Protocol):
    """Chooses a replica."""

    def choose(self, request: PoolRequest, candidates: Sequence[Replica], serving: Sequence[Replica]) -> Replica:
        """Return one of the candidates.

        Args:
            request: The request to run.
            candidates: The replicas that serve and have room; at least one.
            serving: All replicas that serve, in order.
        """
        ...


_load_of: Callable[[Replica], tuple[float, int, int]] = operator.attrgetter("cost", "used", "index")


class LeastLoaded:
    """Route to the replica with the smallest sum of costs; among equals, to the one used least recently.

    A fixed order among equals would give every session that begins while all are idle to the first replica.
    """

    def choose(self, request: PoolRequest, candidates: Sequence[Replica], serving: Sequence[Replica]) -> Replica:
        """See `PoolRoute.choose`."""
        return min(candidates, key=_load_of)


class RoundRobin:
    """Route to the replicas in turn, skipping those without room."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, request: PoolRequest, candidates: Sequence[Replica], serving: Sequence[Replica]) -> Replica:
        """See `PoolRoute.choose`."""
        found = next((one for one in candidates if one.index >= self._turn), candidates[0])
        self._turn = found.index + 1
        return found


POINTS = 64
"""Points of one replica on the ring: with 64, the shares of 8 replicas differ by about an eighth."""


class Affinity:
    """Route equal keys to the same replica, unless its load exceeds `bounded_load` times the mean.

    Consistent hashing: a replica that leaves or joins moves only the keys of about its own share. Requests that their
    replica has no room for go to the next one on the ring.

    Args:
        key: Returns the key from the arguments of the call (for a prefix cache, the beginning of a prompt). By default
            the key is the session of the call. A request without a key goes to the least loaded replica.
        bounded_load: Greatest load of a replica, as a multiple of the mean load, at least 1.

    Raises:
        ValueError: `bounded_load` is below 1.
    """

    def __init__(self, key: Callable[..., object] | None = None, *, bounded_load: float = 1.25) -> None:
        if not bounded_load >= 1:
            raise ValueError(f"bounded_load must be at least 1, the mean load, got {bounded_load!r}")
        self._key = key
        self._bound = bounded_load
        self._ring: list[tuple[int, int]] = []
        self._members: tuple[int, ...] = ()
        self._least = LeastLoaded()

    def choose(self, request: PoolRequest, candidates: Sequence[Replica], serving: Sequence[Replica]) -> Replica:
        """See `PoolRoute.choose`."""
        key = request.key if self._key is None else self._key(*request.args, **request.kwargs)
        if key is None:
            return self._least.choose(request, candidates, serving)
        self._place(tuple([one.index for one in serving]))
        most = math.ceil(self._bound * (sum(one.running for one in serving) + 1) / len(serving))
        by_index = {one.index: one for one in candidates}
        start = bisect.bisect_left(self._ring, (_hash(repr(key)), -1))
        for step in range(len(self._ring)):
            found = by_index.get(self._ring[(start + step) % len(self._ring)][1])
            if found is not None and found.running < most:
                return found
        return self._least.choose(request, candidates, serving)

    def _place(self, members: tuple[int, ...]) -> None:
        if members != self._members:
            self._members = members
            self._ring = sorted((_hash(f"{index}/{point}"), index) for index in members for point in range(POINTS))


class ByFunction:
    """Route by a user's function: `function(request, candidates)` returns one of the candidates, or its index."""

    def __init__(self, function: Callable[[PoolRequest, Sequence[Replica]], Any]) -> None:
        self._function = function

    def choose(self, request: PoolRequest, candidates: Sequence[Replica], serving: Sequence[Replica]) -> Replica:
        """See `PoolRoute.choose`; the dispatcher checks the choice."""
        chosen = self._function(request, candidates)
        return next((one for one in candidates if one is chosen or one.index == chosen), chosen)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


# ---- queue and sessions ----------------------------------------------------------------------------------------------


Q = TypeVar("Q", bound=PoolRequest)


class RequestQueue(Generic[Q]):
    """Bounded queue by priority, then first come, first served, with one heap for each replica and one for the rest.

    A request of more bytes than `bytes_max` is admitted if no other request waits.
    """

    def __init__(self, count_max: int, bytes_max: int) -> None:
        self.count_max = count_max
        self.bytes_max = bytes_max
        self.count = 0
        self.bytes = 0
        self._heaps: dict[int | None, list[tuple[tuple[int, int], Q]]] = {}

    def has_room(self, size: int) -> bool:
        """Return whether there is room for a request of `size` bytes."""
        return self.count < self.count_max and (self.count == 0 or self.bytes + size <= self.bytes_max)

    def put(self, request: Q) -> None:
        """Add a request, bound to its `replica` unless that is None."""
        request.state = "waiting"
        self.count += 1
        self.bytes += request.size
        heapq.heappush(self._heaps.setdefault(request.replica, []), (request.order, request))

    def remove(self, request: Q) -> None:
        """Remove a request, wherever it is in the queue."""
        assert request.state == "waiting"
        request.state = "new"
        self.count -= 1
        self.bytes -= request.size
        heap = self._heaps[request.replica]
        if heap[0][1] is request:
            heapq.heappop(heap)
        else:
            heap[:] = [one for one in heap if one[1] is not request]
            heapq.heapify(heap)
        if not heap:
            del self._heaps[request.replica]

    def first(self, pinned_to: int | None) -> Q | None:
        """Return the first request that is bound to a replica; with None, the first unbound request."""
        heap = self._heaps.get(pinned_to)
        return heap[0][1] if heap else None

    @property
    def has_pinned(self) -> bool:
        """True if requests are bound to replicas."""
        return len(self._heaps) > (None in self._heaps)

    def pinned(self) -> list[int]:
        """Return the replicas that requests are bound to."""
        return [replica for replica in self._heaps if replica is not None]

    def release(self, replica: int) -> None:
        """Unbind the requests of a replica."""
        for _, request in self._heaps.pop(replica, []):
            request.replica = None
            heapq.heappush(self._heaps.setdefault(None, []), (request.order, request))


class SessionPlace(msgspec.Struct):
    """Replica of a session, None before its first request, and the number of its moves to another one."""

    replica: int | None = None
    moves: int = 0


class Sessions:
    """Replicas of at most `capacity` sessions; the least recently used ones are dropped."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._places: OrderedDict[str, SessionPlace] = OrderedDict()

    def __len__(self) -> int:
        return len(self._places)

    def find(self, name: str) -> SessionPlace:
        """Return the place of a session, which becomes the most recently used one."""
        place = self._places.get(name)
        if place is None:
            place = self._places[name] = SessionPlace()
            if len(self._places) > self._capacity:
                self._places.popitem(last=False)
        self._places.move_to_end(name)
        return place

    def settle(self, name: str, replica: int) -> None:
        """Set the replica of a session."""
        place = self.find(name)
        if place.replica != replica:
            place.moves += place.replica is not None
            place.replica = replica

    def end(self, name: str) -> None:
        self._places.pop(name, None)


# ---- the dispatcher --------------------------------------------------------------------------------------------------


class Dispatcher(Generic[Q]):
    """Assigns requests to replicas.

    Every request passed to `submit` ends by exactly one `end`, by one `withdraw` while it waits, or in `unrouted`.

    Attributes:
        replicas: All replicas, with those that are down or drained.
        waiting: The queue.
        sessions: Replicas of sessions.
        pauses: Number of blocks that pause the queue.
        submitted: Number of requests ever.
        measures: True if `end` needs the seconds of requests.
        unrouted: Requests for which the route raised, or chose none of the candidates, each with that error; the
            caller of `take` removes them.
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
        self.waiting = RequestQueue[Q](queue, queue_bytes)
        self.sessions = Sessions(sessions)
        self.pauses = 0
        self.submitted = 0
        self.unrouted: list[tuple[Q, Exception]] = []
        self._route = route
        self._given = 0
        self._rule = rule
        self.measures = rule is not None
        self._serving: Sequence[Replica] | None = None  # cached until a replica comes or goes

    @property
    def running(self) -> int:
        """Number of requests that replicas run."""
        return sum(replica.running for replica in self.replicas)

    def submit(self, request: Q) -> None:
        """Queue a request."""
        request.number = self.submitted
        self.submitted += 1
        self._put(request)

    def grant(self, request: Q) -> bool:
        """Assign a request to a replica at once, as `submit` and `take` would; return whether it has one.

        Changes nothing if other requests wait, no replica has room, or the route raises.
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

    def withdraw(self, request: Q) -> None:
        """Remove a waiting request: its caller has left, or it was cancelled."""
        self.waiting.remove(request)
        request.state = "over"

    def end(self, request: Q, seconds: float | None) -> None:
        """End a running request; `seconds` is its latency, or None if the replica did not determine it."""
        self._give_up(request)
        request.state = "over"
        if self._rule is not None and seconds is not None and request.replica is not None:
            self.replicas[request.replica].learn(self._rule, seconds)

    def retry(self, request: Q) -> None:
        """Queue a request again at its old place: its replica has not run it, or it may run twice."""
        if request.state == "running":
            self._give_up(request)
        self._put(request)

    def grant_beside(self, request: Q, index: int) -> bool:
        """Assign a copy of a request to another replica than `index` at once; return whether one has room."""
        serving = self.serving()
        candidates = [one for one in serving if one.running < one.limit and one.index != index and one.is_up]
        if self.pauses or not candidates:
            return False
        self._give(request, min(candidates, key=_load_of))
        return True

    def give_back(self, request: Q) -> None:
        """Free the replica of a running request, which will be queued again."""
        self._give_up(request)
        request.state, request.replica = "new", None

    def put_again(self, request: Q) -> None:
        """Queue a request again at its old place."""
        self._put(request)

    def take(self) -> list[tuple[Q, Replica]]:
        """Assign requests to replicas with room; return each with its replica."""
        taken: list[tuple[Q, Replica]] = []
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
        """Return the replicas for requests: those that are up, or if none is, those that may come back."""
        if self._serving is None:
            inside = [one for one in self.replicas if one.is_in_service]
            self._serving = [one for one in inside if one.is_up] or inside
        return self._serving

    def set_up(self, index: int, *, is_up: bool) -> None:
        """Set whether a replica lives and answers."""
        if self.replicas[index].is_up != is_up:
            self.replicas[index].is_up = is_up
            self._see_change()

    def set_drained(self, index: int, *, is_drained: bool) -> None:
        """Set whether `resize` keeps a replica out."""
        self.replicas[index].is_drained = is_drained
        self._see_change()

    def set_updating(self, index: int, *, is_updating: bool) -> None:
        """Set whether `rolling` keeps a replica out."""
        self.replicas[index].is_updating = is_updating
        self._see_change()

    def set_behind(self, index: int, *, is_behind: bool) -> None:
        """Set whether `each` keeps a replica out."""
        self.replicas[index].is_behind = is_behind
        self._see_change()

    def add(self) -> None:
        """Add a replica, with the next index."""
        self.replicas.append(Replica(len(self.replicas), self._start))
        self._see_change()

    def set_absent(self, index: int, *, is_absent: bool) -> None:
        """Set whether the processes of a replica have left their mesh."""
        self.replicas[index].is_absent = is_absent
        self._see_change()

    def _choose(self, request: Q, candidates: Sequence[Replica], serving: Sequence[Replica]) -> Replica:
        """Return the route's choice; raise `ValueError` if it is not one of the candidates."""
        chosen: object = self._route.choose(request, candidates, serving)
        if type(chosen) is not Replica or not any(chosen is one for one in candidates):
            indices = [one.index for one in candidates]
            raise ValueError(
                f"a route must return one of the candidates, {indices}, or as a function its index; got {chosen!r}"
            )
        return chosen

    def _next(self, candidates: Sequence[Replica]) -> Q | None:
        if not candidates:
            return None
        if not self.waiting.has_pinned:
            return self.waiting.first(None)
        heads = [self.waiting.first(one.index) for one in candidates]
        found = [one for one in (*heads, self.waiting.first(None)) if one is not None]
        return min(found, key=lambda one: one.order, default=None)

    def _pin(self, request: Q, serving: Sequence[Replica]) -> bool:
        """Bind a request to its session's replica if that serves; return whether it does."""
        if request.session is None:
            return False
        place = self.sessions.find(request.session)
        if place.replica not in {one.index for one in serving}:
            return False
        self.waiting.remove(request)
        request.replica = place.replica
        self.waiting.put(request)
        return True

    def _put(self, request: Q) -> None:
        place = None if request.session is None else self.sessions.find(request.session)
        request.replica = None if place is None else place.replica
        self.waiting.put(request)
        self._release()

    def _see_change(self) -> None:
        self._serving = None
        self._release()

    def _release(self) -> None:
        """Unbind the requests of sessions whose replica does not serve."""
        pinned = self.waiting.pinned()
        if not pinned:
            return
        indices = {one.index for one in self.serving()}
        for index in pinned:
            if index not in indices:
                self.waiting.release(index)

    def _give(self, request: Q, replica: Replica) -> None:
        request.state, request.replica = "running", replica.index
        replica.running += 1
        replica.cost += request.cost
        self._given += 1
        replica.used = self._given
        if request.session is not None:
            self.sessions.settle(request.session, replica.index)

    def _give_up(self, request: Q) -> None:
        assert request.state == "running"
        assert request.replica is not None
        replica = self.replicas[request.replica]
        replica.running -= 1
        replica.cost = replica.cost - request.cost if replica.running else 0.0
        replica.ended += 1
