"""What one side of a session between hosts knows of one channel; PURE."""

from __future__ import annotations

from collections import deque

from trimesh import limits


class SessionChannel:
    """Both directions of one channel.

    Attributes:
        queue, queued: What was given and is not sent, and its bytes.
        granted, sent: By the peer, and to it, in bytes since it began.
        received, consumed, allowed: From the peer; taken by the reader; granted to the peer.
        is_finished, has_closed: No more is given; CLOSE was sent.
        peer_closed: CLOSE has come.
    """

    __slots__ = (
        "allowed", "consumed", "granted", "has_closed", "is_finished", "peer_closed", "queue", "queued", "received",
        "sent",
    )  # fmt: skip

    def __init__(self) -> None:
        self.queue = deque[bytes]()
        self.queued = 0
        self.granted = self.allowed = limits.HOST_WINDOW_BYTES
        self.sent = self.received = self.consumed = 0
        self.is_finished = self.has_closed = self.peer_closed = False

    @property
    def wants_to_send(self) -> bool:
        """Whether it is to have its turn."""
        if self.queue:
            return self.sent < self.granted
        return self.is_finished and not self.has_closed
