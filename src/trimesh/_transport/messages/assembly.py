"""Puts the bodies of one message together from pieces, each copied once into memory that the receiver owns.

PURE but for memory. What a peer announced is checked here once more: the table lies in memory that it can still change.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

from trimesh import limits
from trimesh._wire.memory import new_pages

_MAPPED_BYTES_MIN: Final = 1 << 20
"""From this size on a body gets pages of its own: they cost nothing before they are written, so a peer that announces
much and sends little takes no memory; and nothing is zeroed twice."""


_WORD: Final = struct.Struct("<Q")
_IN_SEGMENT: Final = 1 << 63
"""A word of the table from here on names a body in shared memory."""


class AssemblyError(Exception):
    """What came does not fit what was announced; the text completes "the peer sent"."""


def allocate(size: int) -> memoryview:
    """Return private, writable memory."""
    if size < _MAPPED_BYTES_MIN:
        return memoryview(bytearray(size))
    try:
        return memoryview(new_pages(size))
    except (OSError, ValueError, OverflowError, MemoryError) as error:
        raise AssemblyError(f"a body of {size} bytes, for which this process has no memory ({error})") from error


def one_body(view: memoryview, at: int, piece: memoryview, take: Callable[[int], memoryview]) -> memoryview:
    """Return the body of a message that has one and has come whole: what an `Assembly` would make of it.

    Args:
        view: Memory that holds the table.
        piece: All body bytes that came with it.
        take: As for an `Assembly`.
    """
    word = _WORD.unpack_from(view, at)[0]
    if word == len(piece):
        return memoryview(bytearray(piece))
    if word >= _IN_SEGMENT and not piece:
        return take(word)
    raise AssemblyError("a body of another size than announced")


class Assembly:
    """One message on its way in.

    Args:
        sizes: Table of the bodies, uint64 little endian each: a size, or a name for `take`.
        piece: The first body bytes; may be all of them.
        take: Returns the body that a word of the table names.

    Attributes:
        head: A copy of the head, kept by whoever waits for more pieces.
        is_chunk: Whether it is a chunk of a larger one.
    """

    __slots__ = ("_announced", "_at", "_bodies", "head", "is_chunk")

    def __init__(self, sizes: memoryview, piece: memoryview, take: Callable[[int], memoryview]) -> None:
        words = struct.unpack(f"<{len(sizes) // 8}Q", sizes)
        total = sum(word for word in words if word < _IN_SEGMENT)
        if total > limits.MESSAGE_BYTES_MAX:
            raise AssemblyError(f"a message of {total} bytes, above MESSAGE_BYTES_MAX")
        self.head = b""
        self.is_chunk = False
        self._announced = [word if word < _IN_SEGMENT else take(word) for word in words]
        self._at = 0
        self._bodies: list[memoryview] = []
        if total == len(piece):  # whole: copy without zeroing first
            at = 0
            for one in self._announced:
                if isinstance(one, int):
                    self._bodies.append(memoryview(bytearray(piece[at : at + one])))
                    at += one
                else:
                    self._bodies.append(one)
            self._at = len(self._bodies[-1]) if self._bodies else 0
        else:
            self.add(piece)

    def add(self, piece: memoryview) -> None:
        """Copy the next body bytes. A body gets memory when its first byte is here, not when it is announced."""
        at = 0
        while at < len(piece):
            body = self._open_body()
            n = min(len(body) - self._at, len(piece) - at)
            body[self._at : self._at + n] = piece[at : at + n]
            self._at += n
            at += n

    def _open_body(self) -> memoryview:
        """Return the body that the next byte belongs to."""
        while not self._bodies or self._at == len(self._bodies[-1]):
            if len(self._bodies) == len(self._announced):
                raise AssemblyError("more body bytes than announced")
            one = self._announced[len(self._bodies)]
            self._bodies.append(allocate(one) if isinstance(one, int) else one)
            self._at = 0 if isinstance(one, int) else len(one)
        return self._bodies[-1]

    def finish(self) -> list[memoryview]:
        """Return the bodies; all bytes must have come."""
        rest = self._announced[len(self._bodies) :]
        missing = any(isinstance(one, int) and one for one in rest)
        if missing or (self._bodies and self._at not in (0, len(self._bodies[-1]))):
            raise AssemblyError("fewer body bytes than announced")
        return self._bodies + [memoryview(bytearray()) if isinstance(one, int) else one for one in rest]
