"""What a pool knows of itself, as frozen records."""

from __future__ import annotations

import attrs


@attrs.frozen
class ReplicaStatistics:
    """One replica.

    Attributes:
        index: Its place along the dimension of the pool.
        running: Requests that it runs.
        cost: Sum of their costs.
        limit: Requests that it may run at once.
        is_up: Whether its processes live and answer.
        is_drained: Whether it is kept out by `rolling` or `resize`.
        ended: Requests that it has ended, whatever they came to.
    """

    index: int
    running: int
    cost: float
    limit: int
    is_up: bool
    is_drained: bool
    ended: int


@attrs.frozen
class PoolStatistics:
    """A pool, in numbers of requests since it was opened.

    `made == succeeded + failed + cancelled + refused + running + queued + arriving` at every moment in which no request
    is on its way from one state to the next.

    Attributes:
        made: All.
        succeeded: Those that gave a value.
        failed: Those that raised what the endpoint raised, or the death of their replica.
        cancelled: Those whose caller has left, or that were cancelled by the pool.
        refused: Those that met a full queue with `when_full="refuse"`.
        retried: How often one was given to another replica.
        running: Those that replicas have now.
        queued: Those that wait in the queue.
        queued_bytes: Bytes of their arguments, as estimated.
        arriving: Those whose callers wait to be let into the queue.
        sessions: Sessions that are remembered.
        is_paused: Whether the queue is held back.
        replicas: All replicas.
    """

    made: int
    succeeded: int
    failed: int
    cancelled: int
    refused: int
    retried: int
    running: int
    queued: int
    queued_bytes: int
    arriving: int
    sessions: int
    is_paused: bool
    replicas: tuple[ReplicaStatistics, ...]
