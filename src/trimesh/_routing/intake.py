"""The items of one sending process that wait for one receiver, as credits: the receiver's side of a port.

IN-1 The sender's window is never wider than this one, so a sender that keeps its credits is never refused.
IN-2 A sender that has used up its window is told of every item that is taken, so it never waits while there is room.
"""

from __future__ import annotations

from trimesh import limits
from trimesh._routing.credit import ReceiveCount, SendWindow
from trimesh.errors import ProtocolError


def port_window(capacity: int) -> SendWindow:
    """Return the window of one sending process; a channel without room lets one item wait to be handed over."""
    return SendWindow(max(capacity, 1), limits.MAILBOX_BYTES, limits.MAILBOX_REPORT_BYTES)


class Intake:
    """Counts what one process has sent and what was taken of it."""

    __slots__ = ("_count", "_window")

    def __init__(self, capacity: int) -> None:
        self._window: SendWindow = port_window(capacity)
        self._count = ReceiveCount(max(self._window.messages_max // 2, 1), limits.MAILBOX_REPORT_BYTES)

    def arrived(self, nbytes: int) -> None:
        """Count an item that has come.

        Raises:
            ProtocolError: There was no room for it.
        """
        if not self._window.has_room(nbytes):
            raise ProtocolError(
                f"a port must keep its credits: {self._window.messages_max} items may wait, {self._window.waiting} do, "
                f"got another of {nbytes} bytes"
            )
        self._window.sent(nbytes)

    def take(self, nbytes: int) -> None:
        """Count an item that was taken out."""
        self._count.take(nbytes)

    @property
    def is_due(self) -> bool:
        """Whether the sender should be told now."""
        is_full = self._window.waiting >= self._window.messages_max
        return self._count.is_due or (is_full and self._count.has_news)

    def report(self) -> int:
        """Return the total to tell the sender."""
        total = self._count.report()
        self._window.acknowledged(total)
        return total
