"""What the runtime asks of a transport: links that carry whole messages in order, and one task that drains them.

A *link* joins two processes. A *message* is a head (a small control struct, opaque here) and bodies (buffers of any
size). Two lanes: CONTROL overtakes DATA, each lane is first in, first out, but for what `flow` allows. Sending never
blocks: what does not fit is queued in order; the floors above bound the queue by credits. Whatever a peer does, a
handler sees complete messages, then exactly one `link_down`.

Every transport passes `tests/conformance/test_transport.py`.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import attrs
import msgspec
import trio

from trimesh import limits
from trimesh._transport.interface.mover import Mover
from trimesh.errors import LimitExceeded

Buffer = bytes | bytearray | memoryview
"""A C-contiguous buffer of bytes that the caller lends until the message is sent."""


class Lane(enum.IntEnum):
    """Order of urgency on a link."""

    CONTROL = 0
    DATA = 1


class DownReason(enum.StrEnum):
    """Why a link ended."""

    CLOSED = "closed"
    """The peer, or this side, said goodbye."""
    EOF = "eof"
    """The peer's end vanished; usually its process ended."""
    EXITED = "exited"
    """The watched process ended."""
    LEASE = "lease"
    """The peer was silent for longer than its lease."""
    PROTOCOL = "protocol"
    """The peer sent bytes that break the protocol."""


class LinkDown(msgspec.Struct, frozen=True):
    """The end of a link.

    Attributes:
        reason: Why.
        detail: Text for people: what came, for PROTOCOL; else may be empty.
    """

    reason: DownReason
    detail: str = ""


@attrs.frozen
class LinkStatistics:
    """Counters of one link since it was opened.

    Attributes:
        messages_sent, messages_received: Whole messages.
        bytes_sent, bytes_received: Heads and bodies.
        queued_bytes: Waiting on this side because the peer is slow.
        dropped_frames: Frames of another epoch, and duplicates, dropped.
    """

    messages_sent: int
    messages_received: int
    bytes_sent: int
    bytes_received: int
    queued_bytes: int
    dropped_frames: int


class LinkHandler(Protocol):
    """Receives what comes in. Called by the transport's task; must not block and must not raise."""

    def received(self, link: Link, head: memoryview, bodies: list[memoryview]) -> None:
        """Take one message.

        Args:
            link: Where it came from.
            head: Borrowed: valid only until this function returns.
            bodies: Owned by the receiver: private, in the order sent, writable but for what was sent as a `bytes`,
                which may come as a view of one. Memory that came by a shared segment is given back when the last
                view of it is gone.
        """

    def link_down(self, link: Link, down: LinkDown) -> None:
        """Learn that the link has ended; nothing comes from it after this."""

    def link_stalled(self, link: Link, seconds: float) -> None:
        """Learn that the peer's own Trio loop has not run for `seconds`, as its transport says; 0: it runs again.

        It comes when `limits.STALL_SECONDS` have passed and whenever the time has doubled. The link is up.
        """


class Link(ABC):
    """One end of a connection to one peer."""

    @abstractmethod
    def send(
        self, head: bytes, bodies: Sequence[Buffer] = (), *, lane: Lane = Lane.DATA, flow: int = 0
    ) -> trio.Event | None:
        """Send a message; never blocks. On a link that is down it is dropped.

        Args:
            head: At most `limits.HEAD_BYTES_MAX` bytes.
            bodies: At most `limits.BODIES_MAX` buffers, lent until they have left. CONTROL carries none.
            lane: CONTROL overtakes what waits on DATA.
            flow: What order on DATA this message needs: 0, with all others; else it may pass large ones of other flows
                (but 0) that are under way in chunks, and be passed by messages of other flows while it is.

        Returns:
            None when every byte has been copied out of the caller's buffers; else an event set when that is so
            (or when the link has gone down). The peer is woken by the next `Transport.flush`.

        Raises:
            LimitExceeded: The head, or the number or size of the bodies, is above its limit; nothing was sent.
            ValueError: A CONTROL message has bodies.
        """

    @abstractmethod
    def close(self) -> None:
        """Send what is queued, say goodbye, end. The handler gets `link_down(CLOSED)` when it is done."""

    @abstractmethod
    def abort(self) -> None:
        """End now; what is queued is lost. The handler gets no `link_down`."""

    def hand_over(self, heir: Link | None) -> bool:
        """Let another link to the same process send what this one was given in vain; for use in `link_down` only.

        A peer that has never said hello, for want of a descriptor perhaps, has got nothing by this link.

        Args:
            heir: A link of the same transport, or None when there is no other.

        Returns:
            Whether nothing is lost: the peer never came up, and what it was to get goes by `heir`, or there is nothing.
        """
        del heir
        return False

    @abstractmethod
    def statistics(self) -> LinkStatistics: ...


class LinkGroup(ABC):
    """A fixed set of links of one transport that often receive the same message."""

    @abstractmethod
    def cast(self, head: bytes, bodies: Sequence[Buffer] = (), *, flow: int = 0) -> trio.Event | None:
        """Send one message on the DATA lane of every link that is up, in order with what each was sent before.

        `flow` says with what of it, as for `Link.send`. The bytes are copied once, where the transport can. Returns and
        raises as `Link.send` does.
        """

    @abstractmethod
    def close(self) -> None:
        """Forget the group; its links stay."""


class Transport(ABC):
    """All links of one process, and the task that serves them.

    Attributes:
        waits_left: How many waits `wait_here` would do before this turn of Trio's loop is over; mostly none.
    """

    waits_left = 0

    @abstractmethod
    def define_group(self, links: Sequence[Link]) -> LinkGroup:
        """Make a group of `links`, which must be links of this transport."""

    @abstractmethod
    def flush(self) -> None:
        """Wake the peers of everything sent since the last flush.

        `run` arranges for it once a scheduler tick; call it only outside of Trio's loop.
        """

    @property
    @abstractmethod
    def mover(self) -> Mover:
        """The mover of this process, made when it is first asked for, closed with the transport.

        Raises:
            trio.ClosedResourceError: The transport is closed.
            OSError: The system refuses what it needs.
        """

    @abstractmethod
    async def run(self, handler: LinkHandler) -> None:
        """Serve until cancelled: receive, hand over, wake senders. One task, started once."""

    def pump(self, handler: LinkHandler, seconds: float) -> None:
        """Hand over what has come, and wait for something at most `seconds`: for functions that are not async.

        Blocks the thread, with the GIL released while it waits; signals are served. Call it in the thread of `run`,
        not from a handler. No task runs meanwhile.

        Raises:
            RuntimeError: The peers are tasks of this very thread, so that waiting for them would never end.
        """
        raise RuntimeError("a simulated process cannot wait without `await`, since the others run in the same thread")

    def wait_here(self) -> bool:
        """Wait for messages in the running task, if they are expected soon and no other task can run meanwhile.

        Blocks the thread, with the GIL released, for at most `limits.WAIT_HERE_SECONDS`. What comes is handed over; it
        may let other tasks run.

        Returns:
            Whether anything was handed over. If not, the task has to wait by Trio's loop.
        """
        return False

    @abstractmethod
    def close(self) -> None:
        """End all links at once and give back every resource. Idempotent; called after `run` has ended."""


def checked_size(head: bytes, bodies: Sequence[Buffer]) -> int:
    """Return the bytes of a message.

    Raises:
        LimitExceeded: The head, or the number or size of the bodies, is above its limit.
    """
    if len(head) > limits.HEAD_BYTES_MAX:
        raise LimitExceeded("HEAD_BYTES_MAX", len(head))
    if len(bodies) > limits.BODIES_MAX:
        raise LimitExceeded("BODIES_MAX", len(bodies))
    size = sum(memoryview(body).nbytes for body in bodies)
    if size > limits.MESSAGE_BYTES_MAX:
        raise LimitExceeded("MESSAGE_BYTES_MAX", size)
    return len(head) + size
