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
        is_drained: Whether it is kept out: by `rolling`, or by `resize`.
        is_absent: Whether its processes are not in their mesh now.
        ended: Requests that it has ended, whatever they came to.
    """

    __slots__ = ("cost", "ended", "index", "is_absent", "is_drained", "is_up", "limit", "running", "used")

    def __init__(self, index: int, limit: int) -> None:
        self.index = index
        self.limit = limit
        self.running = 0
        self.cost = 0.0
        self.used = -1
        self.is_up = True
        self.is_drained = False
        self.is_absent = False
        self.ended = 0
