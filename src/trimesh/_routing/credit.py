"""Credits of one mailbox for one sender: how a full mailbox makes its sender wait.

The sender counts what it sends; the receiver counts what it takes out and reports the total now and then, on every
terminal frame and, when those are rare, by a frame of its own. Totals only grow, so a report can be late, lost or
repeated.

CR-1 a sender does not wait for a receiver that has taken everything: what has not been reported then (fewer than
     `report_every` messages, at most `report_bytes`) never fills the window, however large the next message is.
"""

from __future__ import annotations

from collections import deque

from trimesh.errors import ProtocolError


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
