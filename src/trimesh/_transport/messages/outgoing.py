"""Messages on their way out of the native transport, and the memory that their senders lend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import trio

from trimesh import limits
from trimesh._native import status
from trimesh._native.lib import Library
from trimesh._transport.interface.base import Buffer, Lane
from trimesh.errors import LimitExceeded

if TYPE_CHECKING:
    from trimesh._transport.messages.chunked import ChunkedMessage

_LANE_DATA: Final = int(Lane.DATA)  # to look at a member of an enumeration is a call
_TABLE_BYTES: Final = 16
"""What goes with one body in a frame: its size, and up to 8 bytes before it."""


class Completion:
    """One event for a message that goes out on one or several links."""

    def __init__(self, chunks: int) -> None:
        self.event = trio.Event()
        self._chunks = chunks

    def chunk_done(self) -> None:
        """Note that it has left on one link."""
        self._chunks -= 1
        if self._chunks == 0:
            self.event.set()


class Bodies:
    """Bodies as the library takes them. Holds the caller's buffers as long as it lives.

    Attributes:
        count, size: Number, and bytes together.
        spans: `tm_span[]`, the same for all links that they go out on.
        links: Links that they have not left on.
    """

    def __init__(self, library: Library, bus: Any, bodies: Sequence[Buffer]) -> None:
        if len(bodies) > limits.BODIES_MAX:
            raise LimitExceeded("BODIES_MAX", len(bodies))
        ffi = library.ffi
        self._library = library
        self._bus = bus
        self.count = len(bodies)
        self.links = 1
        self.held = [ffi.from_buffer("uint8_t[]", body) for body in bodies]
        sizes = [len(held) for held in self.held]
        self.size = sum(sizes)
        self.spans = ffi.new("tm_span[]", list(zip(self.held, sizes, strict=True)))
        if self.size > limits.MESSAGE_BYTES_MAX:
            raise LimitExceeded("MESSAGE_BYTES_MAX", self.size)
        self._may_be_shared = any(size > limits.FRAME_PAYLOAD_BYTES_MAX for size in sizes)

    def left(self) -> None:
        """Note that they have left on one link, or never will; after the last, shared copies are the receivers'."""
        self.links -= 1
        if self.links <= 0 and self._may_be_shared:
            self._may_be_shared = False
            code = self._library.lib.tm_bodies_done(self._bus, self.spans, self.count)
            if code != status.ERR_FORKED:
                status.check(code, "sending bodies")


class Departure:
    """How a message with one body leaves a link if all of it fits one frame and goes at once: the common case.

    Nothing of such a message is kept, so what the library is called with serves them all.
    """

    def __init__(self, library: Library, bus: Any, handle: int) -> None:
        self._ffi = library.ffi
        self._send = library.lib.tm_link_send
        self._bus = bus
        self._handle = handle
        self._bytes = library.ffi.typeof("uint8_t[]")
        self._spans = library.ffi.new("tm_span[]", 1)
        self._span = self._spans[0]
        self._cursor = library.ffi.new("tm_cursor *")

    def leave(self, head: bytes, body: Buffer) -> bool:
        """Send a DATA message, or do nothing: there is no room, it is too large, or the library refuses it."""
        lent = self._ffi.from_buffer(self._bytes, body)
        size = len(lent)
        if len(head) + size > limits.FRAME_PAYLOAD_BYTES_MAX - _TABLE_BYTES:
            return False
        self._span.bytes = lent
        self._span.size = size
        self._cursor.started = 0
        code = self._send(self._bus, self._handle, _LANE_DATA, head, len(head), self._spans, 1, self._cursor)
        return bool(code == status.OK)


class Outgoing:
    """A message, or the rest of one, that waits for room.

    Attributes:
        head, bodies: What is sent.
        cursor: Where it goes on.
        completion: Told when all of it has left; None while nothing can be waiting for that.
        is_chunk: Whether it is a chunk of a larger one.
    """

    __slots__ = ("bodies", "completion", "cursor", "head", "is_chunk")

    def __init__(
        self,
        head: bytes,
        bodies: Bodies,
        cursor: Any,
        completion: Completion | ChunkedMessage | None = None,
        *,
        is_chunk: bool = False,
    ) -> None:
        self.head = head
        self.bodies = bodies
        self.cursor = cursor
        self.completion = completion
        self.is_chunk = is_chunk

    def finish(self) -> None:
        """Give back what was lent."""
        self.bodies.left()
        if self.completion is not None:
            self.completion.chunk_done()

    @property
    def waiting_bytes(self) -> int:
        """Bytes that have not left yet."""
        head = 0 if self.cursor.started else len(self.head)
        return head + self.bodies.size - int(self.cursor.body_bytes)
