"""Routes: which of the replicas that have room gets a request."""

from __future__ import annotations

import bisect
import hashlib
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from trimesh.service.dispatch.replica import Replica
from trimesh.service.dispatch.request import PoolRequest


@runtime_checkable
class PoolRoute(Protocol):
    """Chooses a replica."""

    def choose(self, request: PoolRequest, candidates: Sequence[Replica], serving: Sequence[Replica]) -> Replica:
        """Return one of the candidates.

        Args:
            request: What is to be run.
            candidates: The replicas that serve and have room; at least one.
            serving: All replicas that serve, in order.
        """
        ...


_load_of: Callable[[Replica], tuple[float, int, int]] = operator.attrgetter("cost", "used", "index")


class LeastLoaded:
    """The replica with the smallest sum of costs; among equals, the one that was idle for the longest time.

    A fixed order among equals would give every session that begins while all are idle to the first replica.
    """

    def choose(self, request: PoolRequest, candidates: Sequence[Replica], serving: Sequence[Replica]) -> Replica:
        """See `PoolRoute.choose`."""
        return min(candidates, key=_load_of)


class RoundRobin:
    """The replicas in turn; one without room is passed over."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, request: PoolRequest, candidates: Sequence[Replica], serving: Sequence[Replica]) -> Replica:
        """See `PoolRoute.choose`."""
        found = next((one for one in candidates if one.index >= self._turn), candidates[0])
        self._turn = found.index + 1
        return found


POINTS = 64
"""Places of one replica on the ring: the shares of 8 replicas then differ by about an eighth."""


class Affinity:
    """Equal keys go to the same replica, as long as it is not loaded above `bounded_load` times the mean.

    Consistent hashing: a replica that leaves or comes moves the keys of about its own share only. What its replica has
    no place for goes to the next one on the ring.

    Args:
        key: Gives the key from the arguments of the call (the beginning of a prompt, say, for a prefix cache); without
            it, it is the session of the call. A request without a key goes to the least loaded replica.
        bounded_load: At least 1.

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
    """A route of the user: `function(request, candidates)` gives one of the candidates, or its index."""

    def __init__(self, function: Callable[[PoolRequest, Sequence[Replica]], Any]) -> None:
        self._function = function

    def choose(self, request: PoolRequest, candidates: Sequence[Replica], serving: Sequence[Replica]) -> Replica:
        """See `PoolRoute.choose`; what the function has chosen is checked by the dispatcher."""
        chosen = self._function(request, candidates)
        return next((one for one in candidates if one is chosen or one.index == chosen), chosen)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
