"""One replica of a pool, as routes and the dispatcher see it."""

from __future__ import annotations


class Replica:
    """What is known of one replica.

    Attributes:
        index: Its place along the dimension of the pool.
        limit: Requests that it may run at once.
        running: Requests that it runs.
        cost: Sum of their costs.
        used: When it was given a request last, counted in requests; -1 for never.
        is_up: Whether its processes live and answer.
        is_drained: Whether the pool was resized to fewer replicas than its index.
        is_updating: Whether `rolling` keeps it out.
        is_absent: Whether its processes are not in their mesh now.
        ended: Requests that it has ended, whatever they came to.
    """

    __slots__ = (
        "cost", "ended", "index", "is_absent", "is_drained", "is_up", "is_updating", "limit", "running", "used",
    )  # fmt: skip

    def __init__(self, index: int, limit: int) -> None:
        self.index = index
        self.limit = limit
        self.running = 0
        self.cost = 0.0
        self.used = -1
        self.is_up = True
        self.is_drained = False
        self.is_updating = False
        self.is_absent = False
        self.ended = 0

    @property
    def is_member(self) -> bool:
        """Whether it belongs to the pool as the pool is sized now."""
        return not self.is_drained and not self.is_absent

    @property
    def is_out(self) -> bool:
        """Whether `resize` or `rolling` keeps it out."""
        return self.is_drained or self.is_updating

    @property
    def is_in_service(self) -> bool:
        """Whether requests may go to it, if it lives."""
        return self.is_member and not self.is_updating
