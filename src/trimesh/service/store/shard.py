"""The actor that keeps the keys of one shard.

Small values come and go in messages. Of large ones only the description does: who puts writes the bytes into memory of
this process, who gets reads them there, and the Python of this process takes no part in that.

KS-1 Memory is written by one `admit`, before its version is put; from then on no process writes it.
KS-2 What an `admit` or a `hold` has taken is given back when its stream ends, however that ends: a writer or a reader
     that is cancelled or dies leaves nothing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import msgspec
import trio

from trimesh import limits
from trimesh.actor.actor import Actor
from trimesh.actor.endpoint import endpoint
from trimesh.errors import LimitExceeded
from trimesh.rdma.buffers.buffer import RDMABuffer
from trimesh.rdma.memory.allocation import allocate
from trimesh.service.accounts.store import KEY_OVERHEAD_BYTES, StoreAccount, StoredVersion
from trimesh.service.sizes import estimate_bytes


@attrs.frozen(eq=False)
class BulkValue:
    """A large value, where it lies.

    Attributes:
        head: How its parts lie in the buffer; see `rdma.publications.layout`.
        is_mapping: Whether it is a mapping of parts, or one part.
        buffer: The memory.
    """

    head: bytes
    is_mapping: bool
    buffer: RDMABuffer


class ShardStatistics(msgspec.Struct, frozen=True):
    """One shard, in numbers; see `StoreStatistics`."""

    keys: int
    versions: int
    bytes: int
    puts: int
    expired: int


class StoreShard(Actor):
    """One shard of a store."""

    def __init__(self, capacity_bytes: int, retain: int) -> None:
        self.account = StoreAccount(capacity_bytes, retain)
        self.admitted: dict[int, tuple[BulkValue, int, trio.Event]] = {}
        self.admissions = 0
        self.waiting: dict[str, set[trio.Event]] = {}
        self.rearmed = trio.Event()
        self.nursery: trio.Nursery

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        """Remove what has ended, and give memory back, as long as the actor lives."""
        async with trio.open_nursery() as self.nursery:
            self.nursery.start_soon(self._expire)
            yield
            self.nursery.cancel_scope.cancel(reason="the store is closed")

    # ---- values ----------------------------------------------------------------------------------------------

    @endpoint(group="control")
    def put(self, key: str, value: Any, ttl: float | None) -> int:
        """Store a value that came with the call; return its version."""
        size = self._reserved(key, estimate_bytes(value))
        return self._put(key, value, size, ttl)

    @endpoint(concurrency=limits.SERVICE_REMOTE_CALLS, group="admissions")
    async def admit(
        self, key: str, head: bytes, nbytes: int, *, is_mapping: bool
    ) -> AsyncGenerator[tuple[int, RDMABuffer], None]:
        """Give memory to write a value to, until `commit`; it goes back if the writer leaves before, or dies."""
        size = self._reserved(key, nbytes)
        try:
            bulk = BulkValue(head, is_mapping, RDMABuffer(_take_memory(nbytes)))
        except BaseException:
            self.account.give_back(size)
            raise
        self.admissions += 1
        number, committed = self.admissions, trio.Event()
        self.admitted[number] = bulk, size, committed
        try:
            yield number, bulk.buffer
            await committed.wait()
        finally:
            if self.admitted.pop(number, None) is not None:
                self.account.give_back(size)
                self.nursery.start_soon(bulk.buffer.aclose)

    @endpoint(group="control")
    def commit(self, number: int, key: str, ttl: float | None) -> int:
        """Make what was written to admitted memory the newest version of a key (KS-1)."""
        bulk, size, committed = self.admitted.pop(number)
        committed.set()
        return self._put(key, bulk, size, ttl)

    @endpoint(group="control")
    def get(self, key: str, version: int | None) -> tuple[int, bool, Any]:
        """Return the version, whether it is a large value, which `hold` gives, and a small value; version 0: none."""
        found = self._find(key, version)
        if found is None:
            return 0, False, None
        is_bulk = isinstance(found.value, BulkValue)
        return found.number, is_bulk, None if is_bulk else found.value

    @endpoint(concurrency=limits.SERVICE_REMOTE_CALLS, group="holds")
    async def hold(self, key: str, version: int) -> AsyncGenerator[tuple[bytes, bool, RDMABuffer] | None, None]:
        """Keep the memory of a large value while the consumer reads it; None if it is not there any more."""
        found = self._find(key, version)
        if found is None:
            yield None
            return
        bulk: BulkValue = found.value
        self.account.pin(found)
        try:
            yield bulk.head, bulk.is_mapping, bulk.buffer.readonly()
            await trio.sleep_forever()  # until the consumer leaves: items are made before they are asked for
        finally:
            self.account.unpin(found)
            self._give_back()

    # ---- keys ------------------------------------------------------------------------------------------------

    @endpoint(concurrency=limits.SERVICE_REMOTE_CALLS, group="waits")
    async def wait_newer(self, key: str, version: int) -> int:
        """Wait until the newest version of a key is above `version`, and return it."""
        while True:
            found = self._find(key, None)
            if found is not None and found.number > version:
                return found.number
            event = trio.Event()
            events = self.waiting.setdefault(key, set())
            events.add(event)
            try:
                await event.wait()
            finally:
                events.discard(event)
                if not events and self.waiting.get(key) is events:
                    del self.waiting[key]

    @endpoint(group="control")
    def version(self, key: str) -> int:
        """Return the newest version of a key, or 0."""
        found = self._find(key, None)
        return 0 if found is None else found.number

    @endpoint(group="control")
    def keys(self, prefix: str) -> list[str]:
        """Return the keys that begin so."""
        self._sweep()
        return list(self.account.keys(prefix))

    @endpoint(group="control")
    def delete(self, key: str) -> bool:
        """Remove all versions of a key; whether there were any."""
        self._sweep()
        was_there = self.account.delete(key)
        self._give_back()
        return was_there

    @endpoint(group="control")
    def numbers(self) -> ShardStatistics:
        """Return the state in numbers."""
        self._sweep()
        one = self.account
        return ShardStatistics(one.key_count, one.version_count, one.bytes, one.puts, one.expired)

    # ---- how -------------------------------------------------------------------------------------------------

    def _reserved(self, key: str, nbytes: int) -> int:
        size = nbytes + len(key) + KEY_OVERHEAD_BYTES
        self._sweep()
        if not self.account.reserve(size):
            raise LimitExceeded(
                "capacity_bytes",
                self.account.bytes + size,
                f"a shard of this store holds {self.account.capacity_bytes} bytes, {self.account.bytes} of them are in "
                f"use, got {size} more for {key!r}: delete keys, give them a ttl=, or open the store with a larger "
                "capacity_bytes= or over more processes (the old version of a key counts until the new one is there)",
            )
        return size

    def _put(self, key: str, value: Any, size: int, ttl: float | None) -> int:
        expires = float("inf") if ttl is None else trio.current_time() + ttl
        number = self.account.put(key, value, size, expires)
        self._give_back()
        for event in self.waiting.pop(key, ()):
            event.set()
        if self.account.next_end == expires:
            self.rearmed.set()
        return number

    def _find(self, key: str, version: int | None) -> StoredVersion | None:
        self._sweep()
        return self.account.find(key, version)

    def _sweep(self) -> None:
        self.account.expire(trio.current_time())
        self._give_back()

    def _give_back(self) -> None:
        while self.account.freed:
            value = self.account.freed.pop().value
            if isinstance(value, BulkValue):
                self.nursery.start_soon(value.buffer.aclose)

    async def _expire(self) -> None:
        while True:
            self.rearmed = trio.Event()
            with trio.move_on_at(self.account.next_end):
                await self.rearmed.wait()
            self._sweep()


def _take_memory(nbytes: int) -> Any:
    """Return memory for a value: what other processes can map, as long as there are blocks for that."""
    if nbytes < limits.STORE_MAPPED_BYTES:
        return bytearray(nbytes)
    try:
        return allocate(nbytes)
    except LimitExceeded:
        return bytearray(nbytes)
