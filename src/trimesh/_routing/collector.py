r"""Collector of the outcomes of one call to many ranks, merge of a stream's items, credits of mailboxes.

With one nursery task for each rank, the first error would cancel the others before their errors are seen. The collector
keeps every terminal frame instead, and decides the next step:

    unsent --sent()--> sent --settle()--> settled
       \------------withdraw()-----------/

CO-1 every rank settles exactly once; later frames for it are refused (`settle` returns False).
CO-2 the call is complete when every rank is settled.
CO-3 with `fail_fast`, the first failure requests the cancellation of the others, once.
CO-4 a rank that was withdrawn, or cancelled on our request, does not count as failed.

MG-1 items of one rank are taken in the order in which they were sent; none is dropped while the stream is open.
MG-2 a rank that sends more than `window` items ahead of the taken items reported to it breaks the protocol.
MG-3 a rank does not wait for a consumer that has taken everything: its reports are due before the window is full.

CR-1 a sender does not wait for a receiver that has taken everything: the unreported rest (fewer than `report_every`
     messages, at most `report_bytes`) never fills the window, however large the next message is.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from trimesh import limits
from trimesh._wire import messages
from trimesh._wire.memory import Buffer
from trimesh.errors import ProtocolError


class RankState(enum.IntEnum):
    """State of one rank of a call."""

    UNSENT = 0
    SENT = 1
    SETTLED = 2


class Returned(msgspec.Struct, frozen=True):
    """A rank returned a value; immutable, decoded by the caller's own task.

    Attributes:
        payload, bodies: The value.
        carried: Kept as long as the payload is.
    """

    payload: Buffer
    bodies: Sequence[memoryview] = ()
    carried: object = None


POSTED: Final = Returned(b"")
"""Outcome of a broadcast, which has no value. A value from a peer is never this object."""


class Raised(msgspec.Struct, frozen=True):
    """The endpoint raised; the exception is rebuilt by the caller's own task."""

    payload: Buffer
    bodies: Sequence[memoryview] = ()
    carried: object = None


class LocalFailure(msgspec.Struct, frozen=True):
    """The call failed locally: the process died, the link was lost, or the mesh has stopped."""

    error: Exception


class Withdrawn(msgspec.Struct, frozen=True):
    """The message was cancelled here before it was sent."""


Outcome = Returned | Raised | LocalFailure | Withdrawn | messages.CancelAck | messages.Refused


def is_failure(outcome: Outcome) -> bool:
    """Return whether `outcome` is a failure, not a result of our cancel."""
    match outcome:
        case Returned() | Withdrawn():
            return False
        case messages.CancelAck(by=by):
            return by != "caller"
        case _:
            return True


class Collector:
    """Outcomes of one call, by the index of the rank in the called view.

    Attributes:
        size: Number of target ranks.
        fail_fast: Whether the first failure cancels the others.
        remaining: Ranks that have not settled.
        outcomes: Outcome of each rank, None while it runs; read-only.
        positions: Position of each rank's message on its link, from 1; 0 before it is sent.
        failures: Indices of the failed ranks in the order in which they were seen.
    """

    __slots__ = ("fail_fast", "failures", "outcomes", "positions", "remaining", "size")

    def __init__(self, size: int, fail_fast: bool) -> None:  # noqa: FBT001 - one a call
        self.size = size
        self.fail_fast = fail_fast
        self.remaining = size
        self.failures: tuple[int, ...] = ()
        self.positions: list[int] = [0] * size
        self.outcomes: list[Outcome | None] = [None] * size

    @property
    def is_complete(self) -> bool:
        """True once every rank has settled (CO-2)."""
        return self.remaining == 0

    @property
    def wants_cancel(self) -> bool:
        """True if the running ranks should be cancelled because one has failed (CO-3)."""
        return self.fail_fast and bool(self.failures) and self.remaining > 0

    def sent(self, index: int, position: int = 1) -> None:
        """Record that the message of rank `index` was handed to its link."""
        assert not self.positions[index], index
        assert self.outcomes[index] is None, (index, self.outcomes[index])
        self.positions[index] = position

    def settle(self, index: int, outcome: Outcome) -> bool:
        """Record the outcome of rank `index`; return False, without effect, if it has one (CO-1)."""
        if self.outcomes[index] is not None:
            return False
        self.outcomes[index] = outcome
        self.remaining -= 1
        if type(outcome) is not Returned and is_failure(outcome):
            self.failures = (*self.failures, index)
        return True

    def withdraw_unsent(self) -> None:
        """Settle every rank whose message has not been sent; it never will be."""
        for index, position in enumerate(self.positions):
            if not position:
                self.settle(index, Withdrawn())

    def states(self) -> Sequence[RankState]:
        """Return the state of each rank."""
        return tuple(
            RankState.SETTLED if outcome is not None else RankState.SENT if position else RankState.UNSENT
            for position, outcome in zip(self.positions, self.outcomes, strict=True)
        )

    def failed(self) -> Iterator[Outcome]:
        """Yield the outcomes of the failed ranks in the order in which they were seen."""
        for index in self.failures:
            outcome = self.outcomes[index]
            assert outcome is not None
            yield outcome

    def is_running(self, index: int) -> bool:
        """Return whether the message of a rank was sent and it has not settled."""
        return self.positions[index] > 0 and self.outcomes[index] is None

    def running(self) -> Iterator[int]:
        """Yield the ranks whose message was sent and that have not settled."""
        for index, outcome in enumerate(self.outcomes):
            if outcome is None and self.positions[index]:
                yield index


# ---- the items of a stream on their way to its consumer: from many ranks, in the order in which they came ------------


class MergedItem(msgspec.Struct, frozen=True):
    """One received item; immutable, decoded by the consumer's own task.

    Attributes:
        index: Index of the rank in the called view.
        payload, bodies: The value.
        carried: Kept as long as the payload is.
    """

    index: int
    payload: Buffer
    bodies: Sequence[memoryview] = ()
    carried: object = None

    @property
    def nbytes(self) -> int:
        """Size as counted by the sender's window."""
        return len(self.payload) + (sum(body.nbytes for body in self.bodies) if self.bodies else 0)


class Merge:
    """Received items of one stream that the consumer has not taken.

    Attributes:
        size: Number of target ranks.
        window: Items that each rank may be ahead.
    """

    __slots__ = ("_counts", "_is_closed", "_queue", "_received", "_reported", "size", "window")

    def __init__(self, size: int, window: int) -> None:
        self.size = size
        self.window = window
        self._queue: deque[MergedItem] = deque()
        self._is_closed = False
        self._received: list[int] = [0] * self.size
        self._reported: list[int] = [0] * self.size
        every = max(1, self.window // 4)
        self._counts: list[ReceiveCount] = [ReceiveCount(every, limits.STREAM_REPORT_BYTES) for _ in range(self.size)]

    def __len__(self) -> int:
        """Return the number of waiting items."""
        return len(self._queue)

    def received(self, index: int) -> int:
        """Return how many items of a rank have arrived."""
        return self._received[index]

    def reported(self, index: int) -> int:
        """Return how many taken items were reported to a rank."""
        return self._reported[index]

    def put(self, item: MergedItem) -> None:
        """Add an item; after `close` it is dropped.

        Raises:
            ProtocolError: The rank is further ahead than its window (MG-2).
        """
        ahead = self._received[item.index] - self._reported[item.index]
        if ahead >= self.window:
            raise ProtocolError(f"a stream must be at most {self.window} items ahead, one more came")
        self._received[item.index] += 1
        if not self._is_closed:
            self._queue.append(item)

    def take(self) -> tuple[MergedItem, int | None]:
        """Return the next item, and the rank's count of taken items if a report is due (MG-3), else None."""
        item = self._queue.popleft()
        count = self._counts[item.index]
        count.take(item.nbytes)
        if not count.is_due:
            return item, None
        self._reported[item.index] = count.report()
        return item, self._reported[item.index]

    def close(self) -> None:
        """Drop waiting and later items: the consumer has left."""
        self._is_closed = True
        self._queue.clear()


# ---- credits of one mailbox for one sender: how a full mailbox makes its sender wait ---------------------------------

# The sender counts messages that it sends. The receiver counts those that it takes out and reports the total on every
# terminal frame and, when those are rare, by a separate frame. Totals only grow, so a report can be late, lost or
# repeated.


class SendWindow:
    """Sender's side of the credits.

    Attributes:
        messages_max: Messages that may wait at the receiver.
        bytes_max: Bytes that may wait; a single message may exceed them when little else waits.
        report_bytes: Bytes that the receiver may have taken without a report.
    """

    __slots__ = ("_acknowledged", "_sizes", "_waiting_bytes", "bytes_max", "messages_max", "report_bytes")

    def __init__(self, messages_max: int, bytes_max: int, report_bytes: int = 0) -> None:
        self.messages_max = messages_max
        self.bytes_max = bytes_max
        self.report_bytes = report_bytes
        self._acknowledged = 0
        self._waiting_bytes = 0
        self._sizes: deque[int] = deque()

    @property
    def waiting(self) -> int:
        """Messages sent and not reported as taken out."""
        return len(self._sizes)

    @property
    def sent_total(self) -> int:
        """Messages sent so far."""
        return self._acknowledged + len(self._sizes)

    @property
    def acknowledged_total(self) -> int:
        """Messages that the receiver has reported as taken out."""
        return self._acknowledged

    def has_room(self, nbytes: int) -> bool:
        """Return whether a message of `nbytes` may be sent now."""
        if len(self._sizes) >= self.messages_max:
            return False
        return self._waiting_bytes <= self.report_bytes or self._waiting_bytes + nbytes <= self.bytes_max

    def try_sent(self, nbytes: int) -> bool:
        """Count a message to send if there is room for it; else return False."""
        sizes, waiting_bytes = self._sizes, self._waiting_bytes
        if len(sizes) >= self.messages_max:
            return False
        if waiting_bytes > self.report_bytes and waiting_bytes + nbytes > self.bytes_max:
            return False
        sizes.append(nbytes)
        self._waiting_bytes = waiting_bytes + nbytes
        return True

    def sent(self, nbytes: int) -> None:
        """Count a sent message."""
        self._sizes.append(nbytes)
        self._waiting_bytes += nbytes

    def acknowledged(self, total: int) -> bool:
        """Update the receiver's total; return whether it has made room.

        Raises:
            ProtocolError: The receiver claims more than was sent.
        """
        news = total - self._acknowledged
        if news <= 0:
            return False
        if news > len(self._sizes):
            raise ProtocolError(
                f"credit must not exceed what was sent: {len(self._sizes)} messages wait, {news} were reported"
            )
        self._acknowledged = total
        if news == 1:
            self._waiting_bytes -= self._sizes.popleft()
            return True
        for _ in range(news):
            self._waiting_bytes -= self._sizes.popleft()
        return True


class ReceiveCount:
    """Receiver's side of the credits.

    Attributes:
        report_every: Unreported messages at which a separate report is due.
        report_bytes: Unreported bytes above which one is due.
        dequeued: Messages taken out so far.
        is_due: Whether a separate report to the sender is due.
    """

    __slots__ = ("_due_at", "_reported", "_unreported_bytes", "dequeued", "is_due", "report_bytes", "report_every")

    def __init__(self, report_every: int, report_bytes: int) -> None:
        self.report_every = report_every
        self.report_bytes = report_bytes
        self.dequeued = 0
        self.is_due = False
        self._reported = 0
        self._due_at = report_every
        self._unreported_bytes = 0

    @property
    def reported(self) -> int:
        """Total of the last report to the sender."""
        return self._reported

    @property
    def has_news(self) -> bool:
        """True if the total has grown since the last report."""
        return self.dequeued > self._reported

    def take(self, nbytes: int) -> None:
        """Count one message of `nbytes` that left the mailbox."""
        self.dequeued += 1
        self._unreported_bytes += nbytes
        if self.dequeued >= self._due_at or self._unreported_bytes > self.report_bytes:
            self.is_due = True

    def report(self) -> int:
        """Return the total to put into a frame, and record it as reported."""
        self._reported = self.dequeued
        self._due_at = self.dequeued + self.report_every
        self._unreported_bytes = 0
        self.is_due = False
        return self.dequeued
