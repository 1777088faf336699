"""The items of a stream on their way to its consumer: from many ranks, in the order in which they came.

MG-1 items of one rank are taken in the order in which they were sent; none is dropped while the stream is open.
MG-2 a rank that sends more than `window` items ahead of what it was told was taken breaks the protocol.
MG-3 a rank does not wait for a consumer that has taken everything: its reports are due before the window is full.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from trimesh import limits
from trimesh._routing.credit import ReceiveCount
from trimesh._wire.memory.regions import Buffer
from trimesh.errors import ProtocolError


class MergedItem(msgspec.Struct, frozen=True):
    """One value that has come; it is decoded by the consumer's own task, and never changed.

    Attributes:
        index: Of the rank, in the view that was called.
        payload, bodies: The value.
        carried: Kept as long as the payload is.
    """

    index: int
    payload: Buffer
    bodies: Sequence[memoryview] = ()
    carried: object = None

    @property
    def nbytes(self) -> int:
        """As the sender's window counts it."""
        return len(self.payload) + (sum(body.nbytes for body in self.bodies) if self.bodies else 0)


class Merge:
    """What has come from the ranks of one stream and has not been taken.

    Attributes:
        size: Ranks addressed.
        window: Items that each may be ahead.
    """

    __slots__ = ("_counts", "_is_closed", "_queue", "_received", "_reported", "size", "window")

    def __init__(self, size: int, window: int) -> None:
        self.size = size
        self.window = window
        self._queue: deque[MergedItem] = deque()
        self._is_closed = False
        self._received: list[int] = [0] * self.size
        self._reported: list[int] = [0] * self.size
        every = max(1, self.window // 4)
        self._counts: list[ReceiveCount] = [ReceiveCount(every, limits.STREAM_REPORT_BYTES) for _ in range(self.size)]

    def __len__(self) -> int:
        """Return the number of items that wait."""
        return len(self._queue)

    def received(self, index: int) -> int:
        """Return how many items of a rank have come."""
        return self._received[index]

    def reported(self, index: int) -> int:
        """Return how many a rank was told were taken."""
        return self._reported[index]

    def put(self, item: MergedItem) -> None:
        """Take in an item; after `close` it is dropped.

        Raises:
            ProtocolError: The rank is further ahead than its window (MG-2).
        """
        ahead = self._received[item.index] - self._reported[item.index]
        if ahead >= self.window:
            raise ProtocolError(f"a stream must be at most {self.window} items ahead, one more came")
        self._received[item.index] += 1
        if not self._is_closed:
            self._queue.append(item)

    def take(self) -> tuple[MergedItem, int | None]:
        """Return the next item, and how many of its rank have been taken when the rank should be told (MG-3)."""
        item = self._queue.popleft()
        count = self._counts[item.index]
        count.take(item.nbytes)
        if not count.is_due:
            return item, None
        self._reported[item.index] = count.report()
        return item, self._reported[item.index]

    def close(self) -> None:
        """Drop what waits and what comes: the consumer has left."""
        self._is_closed = True
        self._queue.clear()
