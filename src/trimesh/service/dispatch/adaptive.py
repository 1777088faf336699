"""How many requests a replica may run at once: a number, or one that follows the latency (AIMD)."""

from __future__ import annotations

from trimesh.plain_numbers import plain_real, plain_whole
from trimesh.service.dispatch.replica import Replica


class Adaptive:
    """Concurrency that grows by one for each round of quick requests, and shrinks by a factor after a slow one.

    Additive increase, multiplicative decrease: what a replica is given comes to what it can do within `latency`.

    Args:
        latency: Seconds that one request may take.
        least: Requests that a replica may always run, at least 1.
        most: Requests that it may run at most.
        start: Those at first; `least` if it is left out.
        factor: What a slow request leaves of the limit, between 0 and 1. A replica is slowed down once for the
            requests that it had when it was, not once for each.

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


class ReplicaLimit:
    """The limit of one replica.

    Args:
        replica: Whose `limit` it moves.
        rule: How; None for a fixed number.
    """

    def __init__(self, replica: Replica, rule: Adaptive | None) -> None:
        self._replica = replica
        self._rule = rule
        self._quick = 0
        self._holds = (
            0  # requests that had begun when the limit was lowered: what they take says nothing of the new one
        )

    def learn(self, seconds: float) -> None:
        """Learn how long a request has taken that has come to its end."""
        rule, replica = self._rule, self._replica
        if rule is None:
            return
        if self._holds:
            self._holds -= 1
        elif seconds > rule.latency:
            replica.limit = max(rule.least, int(replica.limit * rule.factor))
            self._quick, self._holds = 0, replica.running
        else:
            self._quick += 1
            if self._quick >= replica.limit:
                self._quick, replica.limit = 0, min(rule.most, replica.limit + 1)
