"""One request of a pool, as the dispatcher knows it."""

from __future__ import annotations

from typing import Any


class PoolRequest:
    """One call that waits for a replica, or has one.

    Attributes:
        key: What a route may go by: the session, or what `Affinity` was given.
        args: Arguments of the call, by position and by keyword, for routes that look at them.
        kwargs: See `args`.
        priority: Higher ones go first.
        cost: Weight in the load of its replica.
        size: Bytes of the arguments, as estimated.
        group: Name by which it can be cancelled.
        session: Name of its session, or None.
        number: Its place among all requests; a request that is tried again keeps it.
        replica: The one that has it; while it waits, the one that it must go to, or None.
        state: "new", "waiting", "running" or "over".
    """

    __slots__ = (
        "args", "cost", "group", "key", "kwargs", "number", "priority", "replica", "session", "size",
        "state",
    )  # fmt: skip

    def __init__(
        self,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        priority: int = 0,
        cost: float = 1.0,
        size: int = 0,
        group: object = None,
        session: str | None = None,
        key: object = None,
    ) -> None:
        self.args = args
        self.kwargs = kwargs or {}
        self.priority = priority
        self.cost = cost
        self.size = size
        self.group = group
        self.session = session
        self.key = session if key is None else key
        self.number = -1
        self.replica: int | None = None
        self.state = "new"

    @property
    def order(self) -> tuple[int, int]:
        """Its place in the queue: by priority, then first come, first served."""
        return -self.priority, self.number
