r"""One call to many ranks, as a table of outcomes.

A nursery that raises in each child reports one error when several fail at once, because the first cancels the others
before they are seen. The collector keeps every terminal frame instead, and says what its owner has to do:

    unsent --sent()--> sent --settle()--> settled
       \------------withdraw()-----------/

CO-1 every rank settles exactly once; later frames for it are refused (`settle` returns False).
CO-2 the call is complete when every rank is settled.
CO-3 with `fail_fast`, the first failure asks for the cancellation of the others, once.
CO-4 a rank that was withdrawn, or cancelled on our request, is no failure.

MG-1 items of one rank are taken in the order in which they were sent; none is dropped while the stream is open.
MG-2 a rank that sends more than `window` items ahead of what it was told was taken breaks the protocol.
MG-3 a rank does not wait for a consumer that has taken everything: its reports are due before the window is full.

CR-1 a sender does not wait for a receiver that has taken everything: what has not been reported then (fewer than
     `report_every` messages, at most `report_bytes`) never fills the window, however large the next message is.
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
    """How far one rank of a call is."""

    UNSENT = 0
    SENT = 1
    SETTLED = 2


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
        positions: Place of the message of each rank among those on its link, from 1; 0 before it is sent.
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
        """Whether every rank has settled (CO-2)."""
        return self.remaining == 0

    @property
    def wants_cancel(self) -> bool:
        """Whether the ranks that run should be cancelled because one has failed (CO-3)."""
        return self.fail_fast and bool(self.failures) and self.remaining > 0

    def sent(self, index: int, position: int = 1) -> None:
        """Note that the message of rank `index` has been handed to its link."""
        assert not self.positions[index], index
        assert self.outcomes[index] is None, (index, self.outcomes[index])
        self.positions[index] = position

    def settle(self, index: int, outcome: Outcome) -> bool:
        """Note the outcome of rank `index`; return False, and change nothing, when it had one (CO-1)."""
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
        """Return how far each rank is."""
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
    """One value that has come; it is decoded by the consumer's own task, and never changed.

    Attributes:
        index: Of the rank, in the view that was called.
        payload, bodies: The value.
        carried: Kept as long as the payload is.
    """

    index: int
    payload: Buffer
    bodies: Sequence[memoryview] = ()
    carried: object = None

    @property
    def nbytes(self) -> int:
        """As the sender's window counts it."""
        return len(self.payload) + (sum(body.nbytes for body in self.bodies) if self.bodies else 0)


class Merge:
    """What has come from the ranks of one stream and has not been taken.

    Attributes:
        size: Ranks addressed.
        window: Items that each may be ahead.
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
        """Return the number of items that wait."""
        return len(self._queue)

    def received(self, index: int) -> int:
        """Return how many items of a rank have come."""
        return self._received[index]

    def reported(self, index: int) -> int:
        """Return how many a rank was told were taken."""
        return self._reported[index]

    def put(self, item: MergedItem) -> None:
        """Take in an item; after `close` it is dropped.

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
        """Return the next item, and how many of its rank have been taken when the rank should be told (MG-3)."""
        item = self._queue.popleft()
        count = self._counts[item.index]
        count.take(item.nbytes)
        if not count.is_due:
            return item, None
        self._reported[item.index] = count.report()
        return item, self._reported[item.index]

    def close(self) -> None:
        """Drop what waits and what comes: the consumer has left."""
        self._is_closed = True
        self._queue.clear()


# ---- credits of one mailbox for one sender: how a full mailbox makes its sender wait ---------------------------------

# The sender counts what it sends; the receiver counts what it takes out and reports the total now and then, on every
# terminal frame and, when those are rare, by a frame of its own. Totals only grow, so a report can be late, lost or
# repeated.


class SendWindow:
    """The sender's side.

    Attributes:
        messages_max: Messages that may wait at the receiver.
        bytes_max: Bytes that may; a single message may exceed them when little else waits.
        report_bytes: How much the receiver may have taken without having reported it.
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
        """Messages that have been sent and not been taken out, as far as is known here."""
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
        """Count a message that goes out if there is room for it; else return False."""
        sizes, waiting_bytes = self._sizes, self._waiting_bytes
        if len(sizes) >= self.messages_max:
            return False
        if waiting_bytes > self.report_bytes and waiting_bytes + nbytes > self.bytes_max:
            return False
        sizes.append(nbytes)
        self._waiting_bytes = waiting_bytes + nbytes
        return True

    def sent(self, nbytes: int) -> None:
        """Count a message that goes out."""
        self._sizes.append(nbytes)
        self._waiting_bytes += nbytes

    def acknowledged(self, total: int) -> bool:
        """Take the receiver's total; return whether it has made room.

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
    """The receiver's side.

    Attributes:
        report_every: Unreported messages from which a frame of its own is due.
        report_bytes: Unreported bytes above which it is.
        dequeued: Messages taken out so far.
        is_due: Whether the sender should be told by a frame of its own.
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
        """The total that the sender was told last."""
        return self._reported

    @property
    def has_news(self) -> bool:
        """Whether the sender has not been told of the last one."""
        return self.dequeued > self._reported

    def take(self, nbytes: int) -> None:
        """Count one message of `nbytes` that left the mailbox."""
        self.dequeued += 1
        self._unreported_bytes += nbytes
        if self.dequeued >= self._due_at or self._unreported_bytes > self.report_bytes:
            self.is_due = True

    def report(self) -> int:
        """Return the total to put into a frame, and remember that it was told."""
        self._reported = self.dequeued
        self._due_at = self.dequeued + self.report_every
        self._unreported_bytes = 0
        self.is_due = False
        return self.dequeued
