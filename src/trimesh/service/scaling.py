"""PURE: number of replicas that a pool should have, from its load; latencies.

SZ-1 A size is within its bounds.
SZ-2 Growth needs a load that lasts for `grow_after`, shrinking one for `shrink_after`, both since the last change.
SZ-3 A load that needs what the pool has, within the tolerance, changes nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from trimesh import limits
from trimesh.plain_numbers import plain_real, plain_whole, positive_real

if TYPE_CHECKING:
    from trimesh.service.pool.pool import PoolStatistics

TOLERANCE: Final = 0.1
"""Part by which the load may differ from what a size is for: load that stays at an edge changes nothing."""

REGRETS_MAX: Final = 4
"""Doublings of `shrink_after` by sizes that proved too small: 16 times as long."""


class Requests:
    """Scale by requests that run or wait: `Requests(8)` wants one replica for every 8.

    Args:
        per_replica: Number of requests that one replica should have, above 0; mostly its `concurrency`, or less.

    Raises:
        ValueError: It is not above 0.
    """

    def __init__(self, per_replica: float) -> None:
        found = positive_real(per_replica)
        if found is None:
            raise ValueError(f"Requests needs a number above 0 for one replica, got {per_replica!r}")
        self.per_replica = found

    def demand(self, statistics: PoolStatistics, size: int) -> float:
        """Return the number of replicas that the requests need."""
        del size
        return _outstanding(statistics) / self.per_replica


class LatencyTarget:
    """Scale by latency, time in the queue included: `LatencyTarget(2.0)` keeps the 95th percentile there.

    The pool grows while the percentile exceeds the target. It shrinks by one while the percentile is below the target
    and the requests would take half of the room of one replica fewer, at most.

    Args:
        p95: Seconds in which 95 of 100 requests should end, above 0.

    Raises:
        ValueError: It is not above 0.
    """

    def __init__(self, p95: float) -> None:
        found = positive_real(p95)
        if found is None:
            raise ValueError(f"LatencyTarget needs seconds above 0, got {p95!r}")
        self.p95 = found

    def demand(self, statistics: PoolStatistics, size: int) -> float:
        """Return the number of replicas that the latency calls for."""
        outstanding = _outstanding(statistics)
        if statistics.p95 is None:  # no request has ended lately
            return size if outstanding else 0.0
        if statistics.p95 > self.p95:
            return size * min(2.0, statistics.p95 / self.p95)
        fewer = sorted(one.limit for one in statistics.replicas if one.is_up and not one.is_drained)[:-1]
        if statistics.p95 <= self.p95 * (1 - TOLERANCE) and outstanding <= sum(fewer) / 2:
            return (size - 1) / (1 + TOLERANCE)
        return size


def _outstanding(statistics: PoolStatistics) -> int:
    return statistics.running + statistics.queued + statistics.arriving


ScaleBy = Requests | LatencyTarget | Callable[["PoolStatistics"], float]
"""Rule for the number of replicas that a load needs; a function returns it from the statistics."""


class Scaler:
    """Decides on the size of a pool from samples of its demand.

    Args:
        least: Smallest size, at least 1.
        most: Greatest size.
        grow_after: Seconds for which a load must need more replicas; then the pool grows to the least that it needed.
        shrink_after: Seconds for which it must need fewer; then the pool shrinks to the most that it needed.

    Raises:
        ValueError: A number is out of its bounds.
    """

    def __init__(self, least: int, most: int, *, grow_after: float, shrink_after: float) -> None:
        least, most = plain_whole(least), plain_whole(most)
        grow_after, shrink_after = plain_real(grow_after), plain_real(shrink_after)
        if not (isinstance(least, int) and isinstance(most, int) and 1 <= least <= most):
            raise ValueError(f"autoscale needs 1 <= least <= most replicas, got least={least!r}, most={most!r}")
        if not 0 <= grow_after <= shrink_after < math.inf:
            raise ValueError(
                "autoscale needs 0 <= grow_after <= shrink_after seconds, got "
                f"grow_after={grow_after!r}, shrink_after={shrink_after!r}"
            )
        self.least = least
        self.most = most
        self._grow_after = grow_after
        self._shrink_after = shrink_after
        self._regrets = 0  # growths that soon followed a shrinking
        self._shrunk_at = self._rests_until = -math.inf
        self._samples: deque[tuple[float, int, int]] = deque()  # time, size to grow to, size to shrink to

    def step(self, now: float, size: int, demand: float) -> int:
        """Return the size that the pool should have, from a sample of its demand; `size` itself for no change."""
        if now < self._rests_until:
            return size
        if not self.least <= size <= self.most:
            self._samples.clear()
            return min(max(size, self.least), self.most)
        self._samples.append((now, *self._sizes(size, demand)))
        patience = self._patience
        while self._samples[0][0] < now - patience and self._samples[1][0] <= now - patience:
            self._samples.popleft()
        larger = self._lowest(now)
        if larger > size:
            self._samples.clear()
            is_regretted = now - self._shrunk_at < 2 * patience
            self._regrets = min(self._regrets + 1, REGRETS_MAX) if is_regretted else 0
            return larger
        if self._samples[0][0] <= now - patience:
            smaller = max(sample[2] for sample in self._samples)
            if smaller < size:
                self._samples.clear()
                self._shrunk_at = now
                return smaller
        return size

    def failed(self, now: float) -> None:
        """Note that a change could not be made: the next one is decided after `shrink_after`."""
        self._rests_until = now + self._shrink_after

    def _sizes(self, size: int, demand: float) -> tuple[int, int]:
        """Return the size to grow to, and the one to shrink to, that a demand calls for."""
        wanted = self.most if not demand < self.most else max(0, math.ceil(demand - 1e-9))
        roomy = self.most if not demand < self.most else max(0, math.ceil(demand * (1 + TOLERANCE) - 1e-9))
        larger = wanted if demand > size * (1 + TOLERANCE) else size
        smaller = min(max(roomy, self.least), size)
        return min(max(larger, size), self.most), smaller

    def _lowest(self, now: float) -> int:
        """Return the least size that all samples of the last `grow_after` seconds call for; 0 if there are too few."""
        found = math.inf
        for time, larger, _ in reversed(self._samples):
            found = min(found, larger)
            if time <= now - self._grow_after:
                return int(found)
        return 0

    @property
    def _patience(self) -> float:
        return self._shrink_after * (1 << self._regrets)


class Latencies:
    """Latencies of the last requests, at most `limits.POOL_LATENCIES`, of the last `limits.POOL_LATENCY_SECONDS`."""

    def __init__(self) -> None:
        self._found: deque[tuple[float, float]] = deque(maxlen=limits.POOL_LATENCIES)

    def add(self, now: float, seconds: float) -> None:
        """Add the latency of a request that has ended."""
        self._found.append((now, seconds))

    def clear(self) -> None:
        """Drop all: the pool has changed."""
        self._found.clear()

    def quantiles(self, now: float, *shares: float) -> list[Any]:
        """Return the latencies that these shares of the requests did not exceed; None each without any request."""
        found = sorted(seconds for time, seconds in self._found if now - time <= limits.POOL_LATENCY_SECONDS)
        if not found:
            return [None] * len(shares)
        return [found[min(len(found) - 1, math.ceil(share * len(found)) - 1)] for share in shares]
