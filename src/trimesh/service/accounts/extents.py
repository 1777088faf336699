"""Which parts of a file are free: a value is written where there is room, in several pieces if need be.

FE-1 pieces in use never overlap, and lie within the bound.
FE-2 what is free is known in pieces that do not touch each other: as many bytes as are free can be taken.
"""

from __future__ import annotations

import bisect

Piece = tuple[int, int]
"""Offset and length."""


class FileExtents:
    """The room of a file.

    Attributes:
        bytes_max: Of the file.
        used: Bytes that are taken.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.used = 0
        self._free: list[Piece] = [(0, bytes_max)]

    def fits(self, size: int) -> bool:
        """Whether so many bytes are free."""
        return self.used + size <= self.bytes_max

    def take(self, size: int) -> list[Piece]:
        """Take bytes that are free, the first ones."""
        assert self.fits(size), "whoever takes has asked whether it fits"
        self.used += size
        taken: list[Piece] = []
        while size:
            offset, length = self._free[0]
            some = min(size, length)
            taken.append((offset, some))
            size -= some
            if some == length:
                del self._free[0]
            else:
                self._free[0] = offset + some, length - some
        return taken

    def give_back(self, pieces: list[Piece]) -> None:
        """Note that pieces are free again."""
        for offset, length in pieces:
            self.used -= length
            begin, end = offset, offset + length
            at = bisect.bisect_left(self._free, (offset, 0))
            if at < len(self._free) and end == self._free[at][0]:
                end += self._free.pop(at)[1]
            if at and sum(self._free[at - 1]) == begin:
                at -= 1
                begin = self._free.pop(at)[0]
            self._free.insert(at, (begin, end - begin))
