r"""One call to many ranks, as a table of outcomes.

A nursery that raises in each child reports one error when several fail at once, because the first cancels the others
before they are seen. The collector keeps every terminal frame instead, and says what its owner has to do:

    unsent --sent()--> sent --settle()--> settled
       \------------withdraw()-----------/

CO-1 every rank settles exactly once; later frames for it are refused (`settle` returns False).
CO-2 the call is complete when every rank is settled.
CO-3 with `fail_fast`, the first failure asks for the cancellation of the others, once.
CO-4 a rank that was withdrawn, or cancelled on our request, is no failure.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from trimesh._wire import messages
from trimesh._wire.memory.regions import Buffer


class RankState(enum.IntEnum):
    """How far one rank of a call is."""

    UNSENT = 0
    SENT = 1
    SETTLED = 2


_UNSENT, _SENT, _SETTLED = RankState.UNSENT, RankState.SENT, RankState.SETTLED  # a lookup in the class is slow


class Returned(msgspec.Struct, frozen=True):
    """A value came back; it is decoded by the caller's own task, and never changed.

    Attributes:
        payload, bodies: The value.
        carried: Kept as long as the payload is.
    """

    payload: Buffer
    bodies: Sequence[memoryview] = ()
    carried: object = None


POSTED: Final = Returned(b"")
"""Stands for the value of what has none: a broadcast. What a peer sends is never this, whatever it is."""


class Raised(msgspec.Struct, frozen=True):
    """The endpoint raised; the exception is rebuilt by the caller's own task."""

    payload: Buffer
    bodies: Sequence[memoryview] = ()
    carried: object = None


class LocalFailure(msgspec.Struct, frozen=True):
    """The call failed on this side of the wire: the process died, the link was lost, the mesh has stopped."""

    error: Exception


class Withdrawn(msgspec.Struct, frozen=True):
    """The message was cancelled here before it was sent."""


Outcome = Returned | Raised | LocalFailure | Withdrawn | messages.CancelAck | messages.Refused


def is_failure(outcome: Outcome) -> bool:
    """Return whether `outcome` is an error of its own, not a consequence of our cancel."""
    match outcome:
        case Returned() | Withdrawn():
            return False
        case messages.CancelAck(by=by):
            return by != "caller"
        case _:
            return True


class Collector:
    """The outcomes of one call, by the index of the rank in the view that was called.

    Attributes:
        size: Ranks addressed.
        fail_fast: Whether the first failure cancels the others.
        remaining: Ranks that have not settled.
        outcomes: What each rank came to, None while it runs; to be read only.
        failures: Indices of the failed ranks in the order in which they were seen.
    """

    __slots__ = ("_state", "fail_fast", "failures", "outcomes", "remaining", "size")

    def __init__(self, size: int, fail_fast: bool, state: RankState = _UNSENT) -> None:  # noqa: FBT001 - one a call
        self.size = size
        self.fail_fast = fail_fast
        self.remaining = size
        self.failures: tuple[int, ...] = ()
        self._state: list[RankState] = [state] * size
        self.outcomes: list[Outcome | None] = [None] * size

    @property
    def is_complete(self) -> bool:
        """Whether every rank has settled (CO-2)."""
        return self.remaining == 0

    @property
    def wants_cancel(self) -> bool:
        """Whether the ranks that run should be cancelled because one has failed (CO-3)."""
        return self.fail_fast and bool(self.failures) and self.remaining > 0

    def sent(self, index: int) -> None:
        """Note that the message of rank `index` has been handed to its link."""
        assert self._state[index] is _UNSENT, (index, self._state[index])
        self._state[index] = _SENT

    def settle(self, index: int, outcome: Outcome) -> bool:
        """Note the outcome of rank `index`; return False, and change nothing, when it had one (CO-1)."""
        if self._state[index] is _SETTLED:
            return False
        self._state[index] = _SETTLED
        self.outcomes[index] = outcome
        self.remaining -= 1
        if type(outcome) is not Returned and is_failure(outcome):
            self.failures = (*self.failures, index)
        return True

    def withdraw_unsent(self) -> None:
        """Settle every rank whose message has not been sent; it never will be."""
        for index, state in enumerate(self._state):
            if state is _UNSENT:
                self.settle(index, Withdrawn())

    def states(self) -> Sequence[RankState]:
        """Return how far each rank is."""
        return tuple(self._state)

    def failed(self) -> Iterator[Outcome]:
        """Yield the outcomes of the failed ranks in the order in which they were seen."""
        for index in self.failures:
            outcome = self.outcomes[index]
            assert outcome is not None
            yield outcome

    def is_running(self, index: int) -> bool:
        """Return whether the message of a rank was sent and it has not settled."""
        return self._state[index] is _SENT

    def running(self) -> Iterator[int]:
        """Yield the ranks whose message was sent and that have not settled."""
        for index, state in enumerate(self._state):
            if state is _SENT:
                yield index
