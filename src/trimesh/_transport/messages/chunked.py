"""A large message on its way in chunks, which other messages may pass between.

A chunk is a message of its own for the link below: its head says which message it belongs to, its bodies are the next
bytes, in order. The first one has two bodies, the table of sizes and the head of the whole:

    chunk     u32 message | u8 what it is: a `Piece`
    table     u64 for each body: its size, bit 63 = a `bytes`

What is said of bodies that enter a host by themselves looks the same; see `casting`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Final

from trimesh import limits
from trimesh._transport.interface.base import Buffer, checked_size

if TYPE_CHECKING:
    from trimesh._transport.messages.outgoing import Completion

CHUNK: Final = struct.Struct("<IB")
IMMUTABLE: Final = 1 << 63


class Piece(IntEnum):
    """What a message of this lane is.

    REST and FIRST are chunks. OFFER is a whole message whose bodies are on the host of the receiver already: table,
    head, where. TAKEN and REFUSED go back, and answer an offer of that number; they have one body, which is empty.
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
        completion: Told when all of it has left, or never will.

    Attributes:
        number: Its number on the link; given when it starts.
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
        """Return head and bodies of the next chunk; call `chunk_done` when it has left."""
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
        """Whether there is no further chunk."""
        return self._begun and not self.waiting_bytes

    def chunk_done(self) -> None:
        """Note that a chunk has left."""
        self._under_way -= 1
        if self.is_out and not self._under_way:
            self.finish()

    def finish(self) -> None:
        """Note that all of it has left, or the rest never will. Idempotent."""
        if not self._is_told:
            self._is_told = True
            self._completion.chunk_done()


def is_immutable(body: Buffer) -> bool:
    """Whether a body is a `bytes`, or shows one, so that the receiver may be given one, too."""
    return type(body) is bytes or (type(body) is memoryview and body.readonly and type(body.obj) is bytes)


def goes_in_chunks(bodies: Sequence[Buffer], *, local: bool, shared: bool = False) -> bool:
    """Whether a message is to go in chunks: see `limits.CHUNKED_BYTES_MIN`.

    Args:
        bodies: What it has beside its head.
        local: Whether it goes to a process of this host.
        shared: Whether it goes to several, who can share what is copied into memory of this host.
    """
    total = owned = 0
    for body in bodies:
        nbytes = memoryview(body).nbytes
        if nbytes > limits.SEGMENT_BYTES_MAX:
            return True
        total += nbytes
        if nbytes >= limits.CHUNKED_BYTES_MIN and is_immutable(body):
            owned += nbytes
    return total >= limits.CHUNKED_BYTES_MIN and (not local or (2 * owned >= total and not shared))


def _flat(body: Buffer) -> memoryview:
    view = memoryview(body)
    return view.cast("B") if view.nbytes else memoryview(b"")
