"""PURE: policies for requests of a pool: a rate, a budget for further attempts, the delay of a second one.

RB-1 Further attempts are at most a share of the requests, and `limits.POOL_BUDGET_START` more.
RB-2 In any period, requests of at most `rate * seconds + burst` begin; one that costs more than `burst` begins alone.
"""

from __future__ import annotations

import math
from typing import Any, Final

from trimesh import limits
from trimesh.plain_numbers import plain_real, real_number
from trimesh.service.scaling import Latencies

HEDGE_MARGIN: Final = 1.1
"""Delay of a hedge in 95th percentiles: where all requests take equally long, a second replica gains nothing."""


class Rate:
    """Greatest rate of a pool: `Rate(100)` lets 100 requests begin in a second, or requests of that `cost=` in all.

    A token bucket. Requests beyond it wait in the order of their arrival, or raise `Overloaded` with
    `pool.options(when_full="refuse")`.

    Args:
        per_second: Sum of the costs that may begin in a second, above 0.
        burst: Sum of the costs that may begin at once after a pause; by default that of a second, at least 1.

    Raises:
        ValueError: A number is not above 0.
    """

    def __init__(self, per_second: float, *, burst: float | None = None) -> None:
        rate = real_number(per_second)
        most = max(1.0, rate) if burst is None and rate is not None else real_number(burst)
        if rate is None or most is None or not (0 < rate < math.inf and 0 < most < math.inf):
            raise ValueError(f"Rate needs numbers above 0, got per_second={per_second!r}, burst={burst!r}")
        self.per_second = rate
        self.burst = most


class TokenBucket:
    """State of a `Rate`."""

    def __init__(self, rate: Rate, now: float) -> None:
        self.rate = rate
        self._tokens = rate.burst
        self._at = now

    def take(self, now: float, cost: float) -> float:
        """Take tokens for a request if there are enough, and return 0; else return the seconds until there are."""
        rate = self.rate
        self._tokens = min(rate.burst, self._tokens + (now - self._at) * rate.per_second)
        self._at = now
        missing = min(cost, rate.burst) - self._tokens
        if missing > 1e-9:
            return missing / rate.per_second
        self._tokens -= cost
        return 0.0


class AttemptBudget:
    """Bound of further attempts as a share of all requests, so that retries do not multiply the load of an outage.

    Args:
        share: Attempts for each request, from 0 to 1.

    Raises:
        ValueError: It is out of its bounds.
    """

    def __init__(self, share: float) -> None:
        share = plain_real(share)
        if not 0 <= share <= 1:
            raise ValueError(f"budget must be a share of the requests from 0 to 1, got {share!r}")
        self.share = share
        self._attempts = limits.POOL_BUDGET_START if share else 0.0

    def note_request(self) -> None:
        """Add the share of a new request."""
        self._attempts = min(self._attempts + self.share, limits.POOL_BUDGET_START)

    def take(self) -> bool:
        """Take an attempt; return False if there is none left."""
        if self._attempts < 1:
            return False
        self._attempts -= 1
        return True


class HedgeDelay:
    """Time after which a request goes to a second replica: seconds, or a tenth above its endpoint's 95th percentile.

    Args:
        after: Seconds above 0, or "p95".

    Raises:
        ValueError: It is neither.
    """

    def __init__(self, after: Any) -> None:
        self._after = None if after == "p95" else real_number(after)
        if after != "p95" and (self._after is None or not 0 < self._after < math.inf):
            raise ValueError(f'hedge must be a number of seconds above 0, or "p95", got {after!r}')
        self._latencies: dict[str, Latencies] = {}
        self._known: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def note(self, name: str, now: float, seconds: float) -> None:
        """Note how long a request of an endpoint took at its replica."""
        if self._after is not None:
            return
        self._latencies.setdefault(name, Latencies()).add(now, seconds)
        count = self._counts[name] = self._counts.get(name, 0) + 1
        if count % limits.POOL_HEDGE_SAMPLES == 0:
            [self._known[name]] = self._latencies[name].quantiles(now, 0.95)

    def seconds(self, name: str) -> float | None:
        """Return the delay of an endpoint; None while too few of its requests have ended."""
        if self._after is not None:
            return self._after
        known = self._known.get(name)
        return None if known is None else known * HEDGE_MARGIN
