"""Memory of large `bytes` that have arrived, kept so that the next ones need no new pages.

A `bytes` owns its memory, so each that arrives would take new pages, which the system clears first: that takes longer
than the copy into them. One that the program has let go of is as good as a new one, and its pages are there.

    KB-1 Only what nothing else refers to is written to again (`ReusableBytes`).
    KB-2 The first of a size is not kept: it may be the only one.
    KB-3 What is kept is at most `limits.KEPT_BYTES_MAX`, whether or not the program still refers to it; the oldest one
         makes room.
    KB-4 What was not used again for `limits.KEPT_BYTES_SECONDS` is let go of; whoever has the clock asks for it.

PURE but for memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from trimesh import limits
from trimesh._wire.memory import ReusableBytes, can_be_reused, new_bytes

Copy = Callable[[memoryview, memoryview], None]
"""Copies the second into the first, of the same size."""


def copy_plainly(into: memoryview, data: memoryview) -> None:
    """Copy by way of the caches, as is best for new pages: clearing them has just brought them there."""
    into[:] = data


class KeptBytes:
    """Makes `bytes` for what arrives.

    Args:
        tell: Called when it begins to keep any; without it, none are kept.
        copy: Into memory whose pages are there and that is larger than the caches.
    """

    def __init__(self, tell: Callable[[], None] | None = None, copy: Copy = copy_plainly) -> None:
        self._tell: Final = tell
        self._copy: Final = copy
        self._sizes: Final[deque[int]] = deque(maxlen=limits.KEPT_SIZES_MAX)
        self._kept: dict[ReusableBytes, bool] = {}  # oldest first; whether it was used since the last `expire`

    @property
    def is_empty(self) -> bool:
        return not self._kept

    def new(self, size: int) -> tuple[bytes, memoryview, Copy]:
        """Return a `bytes` of any contents, the memory to write them to before it is used elsewhere, and how to.

        Raises:
            MemoryError: There is not enough.
        """
        if self._tell is None or not limits.KEPT_BYTES_MIN <= size <= limits.KEPT_BYTES_MAX:
            return *new_bytes(size), copy_plainly
        found = next((one for one in self._kept if one.size == size and one.is_free), None)
        if found is not None:
            del self._kept[found]
            self._kept[found] = True
            return *found.take(), self._copy
        whole, memory = new_bytes(size)
        if size not in self._sizes:  # KB-2
            self._sizes.append(size)
        elif can_be_reused():
            self._keep(ReusableBytes(whole), self._tell)
        return whole, memory, copy_plainly

    def _keep(self, one: ReusableBytes, tell: Callable[[], None]) -> None:
        total = one.size + sum(other.size for other in self._kept)
        while total > limits.KEPT_BYTES_MAX:  # KB-3
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            total -= oldest.size
        was_empty = not self._kept
        self._kept[one] = True
        if was_empty:
            tell()

    def expire(self) -> None:
        """Let go of what was not used since this was called last (KB-4)."""
        self._kept = {one: False for one, is_used in self._kept.items() if is_used}

    def clear(self) -> None:
        """Let go of all."""
        self._kept.clear()
