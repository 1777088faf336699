"""Values of a replay buffer that are in a file: one without a name, which goes with its process, however that ends."""

from __future__ import annotations

import os
import pickle
import tempfile
import weakref
from collections.abc import Sequence
from typing import Any

import trio

from trimesh import limits
from trimesh.service.accounts.extents import FileExtents, Piece


class SpilledValue:
    """Stands for a value that is in the file."""

    __slots__ = ("pieces", "size")

    def __init__(self, pieces: list[Piece]) -> None:
        self.pieces = pieces
        self.size = sum(length for _, length in pieces)


class SpillFile:
    """A file of at most so many bytes.

    Args:
        folder: Where it is.
        bytes_max: Of it.

    Raises:
        OSError: There can be none.

    Attributes:
        room: What of it is in use.
    """

    def __init__(self, folder: str | os.PathLike[str], bytes_max: int) -> None:
        self.room = FileExtents(bytes_max)
        self._file = tempfile.TemporaryFile(dir=folder, prefix="trimesh-replay-", buffering=0)  # noqa: SIM115 - see close
        self._readers = 0
        self._dropped: list[SpilledValue] = []
        self._end = weakref.finalize(self, self._file.close)

    @staticmethod
    def encoded(value: Any) -> bytes:
        """Return the bytes of a value."""
        return pickle.dumps(value, protocol=5)

    async def write(self, data: bytes) -> SpilledValue:
        """Write bytes for which there is room; many of them in a thread.

        Raises:
            OSError: The disk is full, or fails; the room is free again.
        """
        await trio.lowlevel.checkpoint()
        pieces = self.room.take(len(data))
        try:
            if len(data) < limits.REPLAY_THREAD_BYTES:
                self._write_pieces(data, pieces)
            else:
                await trio.to_thread.run_sync(self._write_pieces, data, pieces)
        except BaseException:
            self.room.give_back(pieces)
            raise
        return SpilledValue(pieces)

    def write_now(self, data: bytes) -> SpilledValue:
        """Write bytes for which there is room; raises as `write`."""
        pieces = self.room.take(len(data))
        self._write_pieces(data, pieces)
        return SpilledValue(pieces)

    def _write_pieces(self, data: bytes, pieces: list[Piece]) -> None:
        at = 0
        for offset, length in pieces:
            self._write_all(memoryview(data)[at : at + length], offset)
            at += length

    def _write_all(self, data: memoryview, offset: int) -> None:
        while data:
            written = os.pwrite(self._file.fileno(), data, offset)
            data, offset = data[written:], offset + written

    def read(self, spilled: SpilledValue) -> Any:
        """Return a value.

        Raises:
            OSError: The disk fails.
        """
        data = bytearray()
        for offset, length in spilled.pieces:
            at, end = offset, offset + length
            while at < end:
                some = os.pread(self._file.fileno(), end - at, at)
                if not some:
                    raise OSError(f"the file of a replay buffer has lost {end - at} bytes of a value")
                data += some
                at += len(some)
        return pickle.loads(data)

    def loaded(self, values: Sequence[Any]) -> list[Any]:
        """Return values, those that are in the file read from there."""
        return [self.read(one) if isinstance(one, SpilledValue) else one for one in values]

    async def read_all(self, values: Sequence[Any]) -> list[Any]:
        """Return values, those that are in the file read from there: many bytes in a thread.

        What is dropped meanwhile is not overwritten.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if sum(one.size for one in values if isinstance(one, SpilledValue)) < limits.REPLAY_THREAD_BYTES:
            return self.loaded(values)
        self._readers += 1
        try:
            return await trio.to_thread.run_sync(self.loaded, values)
        finally:
            self._readers -= 1
            if not self._readers:
                dropped, self._dropped = self._dropped, []
                for value in dropped:
                    self.room.give_back(value.pieces)

    def drop(self, value: Any) -> None:
        """Give the room of a value back that is wanted no more."""
        if isinstance(value, SpilledValue):
            if self._readers:
                self._dropped.append(value)
            else:
                self.room.give_back(value.pieces)

    def close(self) -> None:
        """Let the file go. Idempotent."""
        self._end()
