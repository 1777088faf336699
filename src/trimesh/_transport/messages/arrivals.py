"""Large messages on their way in, whose chunks are copied into the memory of the receiver as they come.

PURE but for memory. Nothing that a peer says is believed; see `chunked` for what a chunk is.
"""

from __future__ import annotations

import struct
from typing import Final

from trimesh import limits
from trimesh._transport.messages.assembly import AssemblyError, allocate
from trimesh._transport.messages.chunked import CHUNK, IMMUTABLE, Piece
from trimesh._transport.messages.kept_bytes import Copy, KeptBytes, copy_plainly


def read_piece(head: memoryview) -> tuple[int, Piece]:
    """Return the number of the message that a piece belongs to, and what it is.

    Raises:
        AssemblyError: It is none.
    """
    if len(head) != CHUNK.size:
        raise AssemblyError("a chunk of a message with a head that cannot be")
    number, kind = CHUNK.unpack(head)
    if kind > max(Piece):
        raise AssemblyError(f"a chunk of a kind that is not known, {kind}")
    return number, Piece(kind)


def read_table(table: memoryview) -> tuple[int, ...]:
    """Return the words of a table.

    Raises:
        AssemblyError: It is none.
    """
    if table.nbytes % 8 or table.nbytes > 8 * limits.BODIES_MAX:
        raise AssemblyError("a large message without its table")
    return struct.unpack(f"<{table.nbytes // 8}Q", table)


def read_head(head: memoryview) -> bytes:
    """Return the head of a large message.

    Raises:
        AssemblyError: It is too long.
    """
    if head.nbytes > limits.HEAD_BYTES_MAX:
        raise AssemblyError("a large message whose head is above HEAD_BYTES_MAX")
    return bytes(head)


class Arrival:
    """One message.

    Args:
        head: Of the whole message.
        kept: Makes `bytes`.
    """

    def __init__(self, head: bytes, words: tuple[int, ...], kept: KeptBytes) -> None:
        self.head: Final = head
        self._words: Final = words
        self._kept: Final = kept
        self._copy: Copy = copy_plainly
        self._missing = sum(word & ~IMMUTABLE for word in words)
        if self._missing > limits.MESSAGE_BYTES_MAX:
            raise AssemblyError(f"a message of {self._missing} bytes, above MESSAGE_BYTES_MAX")
        self._bodies: list[memoryview] = []
        self._open = memoryview(b"")
        self._at = 0

    def add(self, piece: memoryview) -> None:
        """Copy the next bytes. A body gets memory when its first byte is here."""
        if piece.nbytes > self._missing:
            raise AssemblyError("more body bytes than announced")
        self._missing -= piece.nbytes
        at = 0
        while at < piece.nbytes:
            while self._at == self._open.nbytes:
                self._begin()
            n = min(self._open.nbytes - self._at, piece.nbytes - at)
            self._copy(self._open[self._at : self._at + n], piece[at : at + n])
            self._at += n
            at += n

    def _begin(self) -> None:
        """Make the next body."""
        word = self._words[len(self._bodies)]
        size = word & ~IMMUTABLE
        self._at = 0
        if not word & IMMUTABLE:
            self._open, self._copy = allocate(size), copy_plainly
            self._bodies.append(self._open)
            return
        try:
            whole, self._open, self._copy = self._kept.new(size)
        except MemoryError as error:
            raise AssemblyError(f"a body of {size} bytes, for which this process has no memory") from error
        self._bodies.append(memoryview(whole))

    @property
    def is_whole(self) -> bool:
        """Whether all bytes have come."""
        return not self._missing

    def bodies(self) -> list[memoryview]:
        """Return the bodies of a whole message: those that were sent as `bytes` are views of new ones."""
        while len(self._bodies) < len(self._words):
            self._begin()  # of size 0
        self._open = memoryview(b"")
        return self._bodies


class Arrivals:
    """All messages of one link of which some has come.

    Args:
        kept: Makes `bytes`; new ones where there is none.
    """

    def __init__(self, kept: KeptBytes | None = None) -> None:
        self._by_number: Final[dict[int, Arrival]] = {}
        self._kept: Final = kept or KeptBytes()

    def take(self, head: memoryview, bodies: list[memoryview]) -> Arrival | None:
        """Take a chunk; return its message if that is whole now.

        Raises:
            AssemblyError: The chunks do not fit each other.
        """
        number, piece = read_piece(head)
        if piece is Piece.FIRST:
            arrival = self._open(number, bodies)
        else:
            found = self._by_number.get(number)
            if found is None:
                raise AssemblyError("a chunk of no message")
            arrival = found
            for body in bodies:
                arrival.add(body)
        if not arrival.is_whole:
            return None
        del self._by_number[number]
        return arrival

    def _open(self, number: int, bodies: list[memoryview]) -> Arrival:
        if number in self._by_number or len(self._by_number) == limits.CHUNKED_MAX:
            raise AssemblyError("the first chunk of a message that has begun, or of too many at one time")
        if len(bodies) != 2:
            raise AssemblyError("the first chunk of a message without its table and its head")
        arrival = self._by_number[number] = Arrival(read_head(bodies[1]), read_table(bodies[0]), self._kept)
        return arrival
