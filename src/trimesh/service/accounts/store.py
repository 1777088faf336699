"""What one shard of a store holds: versions by key, their bytes, pins and ends.

KV-1 A version is there as a whole or not at all: `put` is one step, made when its bytes are complete.
KV-2 Numbers only grow, over all keys of a shard: a key that is deleted and put again has a larger version.
KV-3 The bytes of a version count until it is out and no reader has it pinned; then it is handed back once, by `freed`.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

import attrs

KEY_OVERHEAD_BYTES: Final = 512
"""What a version costs beside its value and its key: this entry and its places in the tables."""


@attrs.define(eq=False)
class StoredVersion:
    """One version of one key.

    Attributes:
        key: Its key.
        number: Its version.
        value: What the shard keeps of it.
        nbytes: That count for it.
        expires: When it ends, on the clock of the shard; infinity if never.
        pins: Readers that read it.
        is_out: Whether it cannot be found any more.
    """

    key: str
    number: int
    value: Any
    nbytes: int
    expires: float
    pins: int = 0
    is_out: bool = False


class StoreAccount:
    """Versions by key.

    Attributes:
        capacity_bytes: At most.
        bytes: That count now, those reserved with them.
        puts: Versions that were ever put.
        expired: Of those, ended by their time to live.
        freed: Versions whose memory can go; whoever sees them takes them from here.
    """

    def __init__(self, capacity_bytes: int, retain: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.bytes = 0
        self.puts = 0
        self.expired = 0
        self.freed: list[StoredVersion] = []
        self._retain = retain
        self._keys: dict[str, deque[StoredVersion]] = {}
        self._ends: list[tuple[float, int, StoredVersion]] = []

    def reserve(self, nbytes: int) -> bool:
        """Count bytes of a version that is being written; False if there is no room for them."""
        if self.bytes + nbytes > self.capacity_bytes:
            return False
        self.bytes += nbytes
        return True

    def give_back(self, nbytes: int) -> None:
        """Count reserved bytes no more: there will be no version of them."""
        self.bytes -= nbytes

    def put(self, key: str, value: Any, nbytes: int, expires: float) -> int:
        """Make a version of bytes that are reserved the newest of a key; return its number (KV-1, KV-2)."""
        self.puts += 1
        one = StoredVersion(key, self.puts, value, nbytes, expires)
        versions = self._keys.setdefault(key, deque())
        versions.append(one)
        if expires != float("inf"):
            heapq.heappush(self._ends, (expires, one.number, one))
        while len(versions) > self._retain:
            self._drop(versions.popleft())
        return one.number

    def find(self, key: str, number: int | None = None) -> StoredVersion | None:
        """Return the newest version of a key, or one by its number; None if it is not there."""
        versions = self._keys.get(key)
        if not versions:
            return None
        if number is None:
            return versions[-1]
        return next((one for one in versions if one.number == number), None)

    def pin(self, one: StoredVersion) -> None:
        """Keep the memory of a version while a reader has it."""
        one.pins += 1

    def unpin(self, one: StoredVersion) -> None:
        """Undo a `pin`."""
        one.pins -= 1
        self._free_if_unused(one)

    def delete(self, key: str) -> bool:
        """Remove all versions of a key; whether there were any."""
        versions = self._keys.pop(key, None)
        for one in versions or ():
            self._drop(one)
        return versions is not None

    def expire(self, now: float) -> None:
        """Remove what has ended until `now`."""
        while self._ends and (self._ends[0][0] <= now or self._ends[0][2].is_out):
            one = heapq.heappop(self._ends)[2]
            if not one.is_out:
                self.expired += 1
                versions = self._keys[one.key]
                versions.remove(one)
                if not versions:
                    del self._keys[one.key]
                self._drop(one)

    @property
    def next_end(self) -> float:
        """When the next version ends; infinity if none does."""
        return self._ends[0][0] if self._ends else float("inf")

    def keys(self, prefix: str) -> Iterator[str]:
        """Return the keys that begin so."""
        return (key for key in self._keys if key.startswith(prefix))

    @property
    def key_count(self) -> int:
        """How many keys there are."""
        return len(self._keys)

    @property
    def version_count(self) -> int:
        """How many versions can be found."""
        return sum(map(len, self._keys.values()))

    def _drop(self, one: StoredVersion) -> None:
        one.is_out = True
        self._free_if_unused(one)

    def _free_if_unused(self, one: StoredVersion) -> None:
        if one.is_out and not one.pins:
            self.bytes -= one.nbytes
            self.freed.append(one)
