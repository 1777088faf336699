"""Outgoing messages of the native transport, and the memory that their senders lend.

A large message is sent in chunks; other messages may be sent between them.

For the link below, a chunk is an ordinary message: its head names the large message, its bodies are the next bytes, in
order. The first chunk has two bodies, the table of sizes and the head of the large message:

    chunk     u32 message | u8 kind: a `Piece`
    table     u64 for each body: its size, bit 63 = a `bytes`

Messages about bodies of a multicast have the same form; see `casts`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Final

import trio

from trimesh import limits
from trimesh._native import lib
from trimesh._native.lib import Library
from trimesh._transport.interface import Buffer, Lane, checked_size
from trimesh.errors import LimitExceeded

_LANE_DATA: Final = int(Lane.DATA)  # reading a member of an enumeration costs a call
_TABLE_BYTES: Final = 16
"""Overhead of one body in a frame: its size, and up to 8 bytes of padding before it."""


class Completion:
    """One event for a message that is sent on one or several links."""

    def __init__(self, chunks: int) -> None:
        self.event = trio.Event()
        self._chunks = chunks

    def chunk_done(self) -> None:
        """Note that it was sent on one link."""
        self._chunks -= 1
        if self._chunks == 0:
            self.event.set()


class Bodies:
    """Bodies in the form of the library. References the caller's buffers while it lives.

    Attributes:
        count, size: Number, and total size in bytes.
        spans: `tm_span[]`, the same for all links that they are sent on.
        links: Number of links on which they were not sent yet.
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
        """Note that they were sent on one link, or never will be; after the last, receivers own the shared copies."""
        self.links -= 1
        if self.links <= 0 and self._may_be_shared:
            self._may_be_shared = False
            code = self._library.lib.tm_bodies_done(self._bus, self.spans, self.count)
            if code != lib.ERR_FORKED:
                lib.check(code, "sending bodies")


class Departure:
    """Fast path for a message with one body that fits one frame and is sent at once: the common case.

    Such a message keeps no state, so all of them share one set of call arguments.
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
        """Send a DATA message; return False, and send nothing, without room, if it is too large, or on an error."""
        lent = self._ffi.from_buffer(self._bytes, body)
        size = len(lent)
        if len(head) + size > limits.FRAME_PAYLOAD_BYTES_MAX - _TABLE_BYTES:
            return False
        self._span.bytes = lent
        self._span.size = size
        self._cursor.started = 0
        code = self._send(self._bus, self._handle, _LANE_DATA, head, len(head), self._spans, 1, self._cursor)
        return bool(code == lib.OK)


class Outgoing:
    """A message, or the rest of one, that waits for room.

    Attributes:
        head, bodies: Contents.
        cursor: Position of the next byte.
        completion: Notified when all of it was sent; None while no sender waits for that.
        is_chunk: True for a chunk of a larger message.
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
        """Return the lent memory."""
        self.bodies.left()
        if self.completion is not None:
            self.completion.chunk_done()

    @property
    def waiting_bytes(self) -> int:
        """Bytes that were not sent yet."""
        head = 0 if self.cursor.started else len(self.head)
        return head + self.bodies.size - int(self.cursor.body_bytes)


# ---- chunked messages: other messages may be sent between the chunks -------------------------------------------------

CHUNK: Final = struct.Struct("<IB")
IMMUTABLE: Final = 1 << 63


class Piece(IntEnum):
    """Kind of a piece.

    REST and FIRST are chunks. OFFER is a whole message whose bodies are already on the receiver's host: table, head,
    location. TAKEN and REFUSED answer the offer of that number; they have one body, which is empty.
    """

    REST = 0
    FIRST = 1
    OFFER = 2
    TAKEN = 3
    REFUSED = 4


class ChunkedMessage:
    """One large message, lent by its sender until `chunk_done` of `completion`.

    Args:
        head, bodies: As given to `Link.send`.
        flow: As given to `Link.send`.
        completion: Notified when all of it was sent, or never will be.

    Attributes:
        number: Its number on the link, assigned when it starts; 0 before.
        waiting_bytes: Bytes that are in no chunk yet.
    """

    def __init__(self, head: bytes, bodies: Sequence[Buffer], flow: int, completion: Completion) -> None:
        size = checked_size(head, bodies)
        self.flow: Final = flow
        self.number = 0
        self._head = head
        self._bodies = [_flat(body) for body in bodies]
        self._table = b"".join(
            struct.pack("<Q", view.nbytes | (IMMUTABLE if is_immutable(body) else 0))
            for view, body in zip(self._bodies, bodies, strict=True)
        )
        self._completion = completion
        self._begun = False
        self._at = (0, 0)
        self._under_way = 0
        self._is_told = False
        self.waiting_bytes = size

    def next_chunk(self, bytes_max: int) -> tuple[bytes, list[Buffer]]:
        """Return head and bodies of the next chunk; call `chunk_done` when it was sent."""
        self._under_way += 1
        if not self._begun:
            self._begun = True
            self.waiting_bytes -= len(self._head)
            return CHUNK.pack(self.number, Piece.FIRST), [self._table, self._head]
        pieces: list[Buffer] = []
        index, offset = self._at
        left = bytes_max
        while left and index < len(self._bodies):
            piece = self._bodies[index][offset : offset + left]
            offset += piece.nbytes
            left -= piece.nbytes
            if piece.nbytes:
                pieces.append(piece)
            if offset == self._bodies[index].nbytes:
                index, offset = index + 1, 0
        self._at = (index, offset)
        self.waiting_bytes -= bytes_max - left
        return CHUNK.pack(self.number, Piece.REST), pieces

    @property
    def is_out(self) -> bool:
        """True if no chunk is left."""
        return self._begun and not self.waiting_bytes

    def chunk_done(self) -> None:
        """Note that a chunk was sent."""
        self._under_way -= 1
        if self.is_out and not self._under_way:
            self.finish()

    def finish(self) -> None:
        """Note that all of it was sent, or the rest never will be. Idempotent."""
        if not self._is_told:
            self._is_told = True
            self._completion.chunk_done()


def is_immutable(body: Buffer) -> bool:
    """Return whether a body is a `bytes` or a view of one, so that the receiver may get a `bytes`."""
    return type(body) is bytes or (type(body) is memoryview and body.readonly and type(body.obj) is bytes)


def goes_in_chunks(bodies: Sequence[Buffer], *, local: bool, shared: bool = False) -> bool:
    """Return whether a message must go in chunks: see `limits.CHUNKED_BYTES_MIN`.

    Args:
        bodies: Bodies of the message.
        local: True if it goes to a process of this host.
        shared: True if it goes to several processes that can share one copy in memory of this host.
    """
    total = owned = pooled = 0
    for body in bodies:
        nbytes = memoryview(body).nbytes
        if nbytes > limits.SEGMENT_BYTES_MAX:
            return True
        total += nbytes
        pooled += 1 << (nbytes - 1).bit_length()  # a segment has a power of two
        if nbytes >= limits.CHUNKED_BYTES_MIN and is_immutable(body):
            owned += nbytes
    if total < limits.CHUNKED_BYTES_MIN:
        return False
    # More than the pool keeps would get new segments in every message: seven times the time a byte.
    return not local or (not shared and (2 * owned >= total or pooled > limits.SEGMENT_IDLE_BYTES_MAX))


def _flat(body: Buffer) -> memoryview:
    view = memoryview(body)
    return view.cast("B") if view.nbytes else memoryview(b"")
