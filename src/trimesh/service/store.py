"""Key-value store: `open_store`, the handle, and the actor that keeps the keys of one shard.

Small values are sent in messages. For large ones only a description is sent: a writer copies the bytes into the
shard's memory, a reader copies them from there, and the shard's Python takes no part.

KS-1 Memory is written by one `admit`, before its version is put; from then on no process writes it.
KS-2 Memory that an `admit` or a `hold` has taken is released when its stream ends, however that ends: a writer or
     reader that is cancelled or dies leaves nothing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from hashlib import blake2b
from typing import Any

import msgspec
import trio

from trimesh import limits
from trimesh._runtime.tasks import in_trio, in_trio_block
from trimesh.actor.actor import Actor
from trimesh.actor.endpoint import endpoint
from trimesh.actor.host_mesh import this_proc
from trimesh.actor.proc_mesh import ProcMesh
from trimesh.errors import LimitExceeded, MeshErrorGroup, leaves
from trimesh.plain_numbers import plain_real, plain_whole
from trimesh.rdma.buffers.buffer import RDMABuffer
from trimesh.rdma.memory.local import allocate, memory_of
from trimesh.rdma.publications.board import layout_of, read_layout
from trimesh.rdma.publications.reading import Snapshot
from trimesh.service.accounts import KEY_OVERHEAD_BYTES, StoreAccount, StoredVersion, estimate_bytes
from trimesh.service.owner_calls import StreamHolds, certainly, held

_ALONE = ""
"""Name of the only part of a value that is not a mapping."""


class StoreStatistics(msgspec.Struct, frozen=True):
    """Statistics of a store, over all shards.

    Attributes:
        shards: Processes that hold it.
        keys: Number of keys.
        versions: Number of versions that can be read.
        bytes: Bytes of these, of versions being written, and of removed ones that are still read.
        puts: Number of versions ever put.
        expired: Number of these that ended by their time to live.
    """

    shards: int
    keys: int
    versions: int
    bytes: int
    puts: int
    expired: int


class Store:
    """Values by key, each on one shard; a handle that any actor may hold.

    Tensors, arrays and bytes of `limits.STORE_INLINE_BYTES` and more, alone or in a mapping by name (a state dict), are
    copied straight into memory of the shard and out of it. Other values are sent as arguments of endpoints are.
    """

    def __init__(self, shards: Any) -> None:
        self._shards = shards

    async def put(self, key: str, value: Any, *, ttl: float | None = None) -> int:
        """Store a value as the newest version of a key, and return the version. Readers see all of it or none.

        Args:
            key: Any string.
            value: A value that endpoints take. Large parts must be contiguous, in host memory, and must not change
                meanwhile.
            ttl: Seconds until the version expires; None: never.

        Raises:
            TypeError, ValueError: The key is no string, `ttl` is not above 0, or a large part is not contiguous or not
                in host memory.
            LimitExceeded: The shard has no room for it.
            ProcDied, MeshStopped: The shard has ended, or the store is closed.

        Blocking: a checkpoint, cancellable; a `put` that raises `Cancelled` has stored nothing, unless the shard did
        not answer in time (`abandon_after`). The versions of one key grow with each put; numbers may be skipped.
        """
        ttl = plain_real(ttl)
        if ttl is not None and not ttl > 0:
            raise ValueError(f"ttl must be a number of seconds above 0, or None, got {ttl!r}")
        return await in_trio(self._put)(key, value, ttl)

    async def get(self, key: str, *, version: int | None = None) -> Any:
        """Return the value of a key: its newest version, or `version` if that still exists.

        Large tensors and arrays are returned in new memory, large bytes-like values as bytes.

        Raises:
            KeyError: There is no such key or version.
            ProcDied, MeshStopped: The shard has ended, or the store is closed.

        Blocking: a checkpoint, cancellable. Cost: a call; for a large value also a stream and one copy.
        """
        return (await in_trio(self._get)(key, version, None))[1]

    async def get_into(self, key: str, destination: Any, *, version: int | None = None) -> int:
        """Copy a large value into existing memory; return the version.

        Args:
            key: Key of a tensor, an array, bytes, or a mapping of these that was large when it was put.
            destination: Memory of the same dtype and shape; for a mapping, a mapping of some or all names to memory.
            version: Number of a version; None takes the newest.

        Raises:
            KeyError: There is no such key or version, or the value has no part of that name.
            TypeError, ValueError: The destination does not fit, or the value was not large; nothing was copied.
            ProcDied, MeshStopped: As `get`; the contents of `destination` are undefined.

        Blocking: a checkpoint, cancellable; after a cancel the contents of `destination` are undefined.
        """
        return (await in_trio(self._get)(key, version, destination))[0]

    async def wait_newer(self, key: str, version: int = 0) -> int:
        """Wait until a key has a version above `version`, and return the newest.

        Raises:
            ProcDied, MeshStopped: As `get`.

        Blocking: until then, cancellable.
        """
        found: int = await in_trio(self._shard(key).wait_newer.call_one)(key, version)
        return found

    async def version(self, key: str) -> int:
        """Return the newest version of a key, 0 if there is none. Blocking: a call, cancellable."""
        found: int = await in_trio(self._shard(key).version.call_one)(key)
        return found

    async def keys(self, prefix: str = "") -> list[str]:
        """Return the keys that begin with `prefix`, sorted. Blocking: a call over all shards, cancellable."""
        found = await in_trio(self._shards.keys.call)(prefix)
        return sorted(key for keys in found.values() for key in keys)

    async def delete(self, key: str) -> bool:
        """Remove all versions of a key; return whether there were any. Readers that hold one finish reading it.

        Blocking: a call; a `delete` that raises `Cancelled` has removed nothing (exception: see `put`).
        """
        shard = self._shard(key)
        return await in_trio(certainly)(partial(shard.delete.call_one, key))

    async def statistics(self) -> StoreStatistics:
        """Return statistics over all shards. Blocking: a call over all shards, cancellable."""
        found = (await in_trio(self._shards.numbers.call)()).values()
        return StoreStatistics(len(found), *map(sum, zip(*found, strict=True)))

    def __repr__(self) -> str:
        return f"<store on {self._shards.size()} shards>"

    def __reduce__(self) -> tuple[Any, ...]:
        return Store, (self._shards,)

    # ---- internals -------------------------------------------------------------------------------------------

    def _shard(self, key: object) -> Any:
        if not isinstance(key, str):
            raise TypeError(f"a key of a store must be a string, got {key!r:.100}")
        digest = blake2b(key.encode(errors="surrogatepass"), digest_size=8).digest()
        return self._shards.slice(shard=int.from_bytes(digest) % self._shards.size())

    async def _put(self, key: str, value: Any, ttl: float | None) -> int:
        shard = self._shard(key)
        parts = _large_parts_of(value)
        if parts is None:
            return await certainly(partial(shard.put.call_one, key, value, ttl))
        layout = layout_of(parts)
        version = 0

        async def commit(number: int) -> None:
            nonlocal version
            version = await shard.commit.call_one(number, key, ttl)

        writing = shard.admit.stream(key, layout.head, layout.nbytes, is_mapping=isinstance(value, Mapping))
        async with _one_error(), held(writing, commit) as buffer:
            for name, entry in layout.entries.items():
                await buffer[entry.offset : entry.offset + entry.nbytes].write_from(parts[name])
        return version

    async def _get(self, key: str, version: int | None, destination: Any) -> tuple[int, Any]:
        shard = self._shard(key)
        while True:
            number, is_large, value = await shard.get.call_one(key, version)
            if number == 0:
                raise KeyError(f"the store has no {key!r}" + ("" if version is None else f" of version {version}"))
            if not is_large:
                if destination is not None:
                    raise ValueError(
                        f"get_into copies tensors, arrays and bytes of {limits.STORE_INLINE_BYTES} bytes and more, "
                        f"got {key!r}, whose value is smaller or of another type: write `await store.get({key!r})`"
                    )
                return number, value
            async with _one_error(), shard.hold.stream(key, number) as replies:
                _, held = await anext(replies)
                if held is not None:
                    head, is_mapping, buffer = held
                    entries = read_layout(head, buffer.nbytes)
                    snapshot = Snapshot(number, entries, buffer.handle, trio.lowlevel.checkpoint)
                    return number, await _read(snapshot, destination, is_mapping=is_mapping)
            # It was removed between the two calls: try again; for a requested version the next `get` raises.


def open_store(
    procs: ProcMesh | None = None, *, capacity_bytes: int = limits.STORE_BYTES, retain: int = 1
) -> AbstractAsyncContextManager[Store]:
    """Open a store of values by key: `async with service.open_store(procs) as store:`.

    Args:
        procs: Processes that hold the values, each one shard of the keys; None: this one. Values are not replicated:
            those of a process that dies are lost.
        capacity_bytes: Greatest size of each shard.
        retain: Number of the newest versions of a key that can be read.

    Raises:
        ValueError: A number is out of its bounds.
    """
    capacity_bytes, retain = plain_whole(capacity_bytes), plain_whole(retain)
    for name, number in (("capacity_bytes", capacity_bytes), ("retain", retain)):
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number!r}")
    return in_trio_block(_open(procs, capacity_bytes, retain))


@asynccontextmanager
async def _open(procs: ProcMesh | None, capacity_bytes: int, retain: int) -> AsyncGenerator[Store, None]:
    owner = this_proc() if procs is None else procs
    async with owner.spawn("store", StoreShard, capacity_bytes, retain) as shards:
        yield Store(shards.flatten("shard"))


@asynccontextmanager
async def _one_error() -> AsyncGenerator[None, None]:
    """Unwrap the error of a stream of one shard from its group, as calls do."""
    try:
        yield
    except MeshErrorGroup as group:
        found = list(leaves(group))
        if len(found) != 1:
            raise
        raise found[0] from None


async def _read(snapshot: Snapshot, destination: Any, *, is_mapping: bool) -> Any:
    if destination is not None:
        if is_mapping != isinstance(destination, Mapping):
            held = "a mapping of parts" if is_mapping else "one tensor, array or bytes"
            raise TypeError(f"the destination must be {held}, as the stored value is, got {type(destination).__name__}")
        await snapshot.read_into(destination if is_mapping else {_ALONE: destination})
        return None
    made = await snapshot.read()
    for name, entry in snapshot.entries.items():
        if entry.kind == "bytes":
            made[name] = bytes(made[name])
    return made if is_mapping else made[_ALONE]


def _large_parts_of(value: Any) -> dict[str, Any] | None:
    """Return the parts of a value that is copied straight into memory of its shard; None if it is sent instead."""
    if isinstance(value, Mapping):
        named: dict[Any, Any] = dict(value)  # pyright: ignore[reportUnknownArgumentType]
    else:
        named = {_ALONE: value}
    if len(named) > limits.PUBLISHED_TENSORS_MAX or not all(isinstance(name, str) for name in named):
        return None
    sizes = [_nbytes_of(part) for part in named.values()]
    if 0 in sizes or sum(sizes) < limits.STORE_INLINE_BYTES:
        return None
    parts = {name: memoryview(part) if isinstance(part, bytes) else part for name, part in named.items()}
    for name, part in parts.items():
        memory = memory_of(part, f"the stored value {name!r}" if name else "a stored value")
        if memory.tensor is not None:
            raise ValueError(f"a store takes tensors in host memory, got {memory.text}: write put(key, tensor.cpu())")
    return parts


def _nbytes_of(part: Any) -> int:
    """Return the bytes of a tensor, an array or bytes; 0 for anything else."""
    if isinstance(part, bytes | bytearray):
        return len(part)
    if type(part) is memoryview:
        return part.nbytes
    module = type(part).__module__.partition(".")[0]
    if hasattr(part, "untyped_storage") or (module == "numpy" and getattr(part, "dtype", None) is not None):
        size = getattr(part, "nbytes", 0)
        return size if isinstance(size, int) and not getattr(part.dtype, "hasobject", False) else 0
    return 0


# ---- one shard -------------------------------------------------------------------------------------------------------


class BulkValue(msgspec.Struct, frozen=True, eq=False):
    """A large value in `buffer`; `head` describes the layout of its parts (see `read_layout`)."""

    head: bytes
    is_mapping: bool
    buffer: RDMABuffer


class StoreShard(Actor):
    """One shard of a store."""

    def __init__(self, capacity_bytes: int, retain: int) -> None:
        self.account = StoreAccount(capacity_bytes, retain)
        self.admitted = StreamHolds[tuple[BulkValue, int]](self._withdraw)
        self.waiting: dict[str, set[trio.Event]] = {}
        self.rearmed = trio.Event()
        self.nursery: trio.Nursery

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        """Remove expired versions and release their memory while the actor lives."""
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
        """Yield memory for a value, to be written until `commit`; release it if the writer leaves before, or dies."""
        size = self._reserved(key, nbytes)
        try:
            bulk = BulkValue(head, is_mapping, RDMABuffer(_take_memory(nbytes)))
        except BaseException:
            self.account.give_back(size)
            raise
        async with self.admitted.hold((bulk, size)) as number:
            yield number, bulk.buffer

    @endpoint(group="control")
    def commit(self, number: int, key: str, ttl: float | None) -> int:
        """Publish the bytes in admitted memory as the newest version of a key (KS-1)."""
        bulk, size = self.admitted.confirm(number)
        return self._put(key, bulk, size, ttl)

    @endpoint(group="control")
    def get(self, key: str, version: int | None) -> tuple[int, bool, Any]:
        """Return the version (0: none), whether its value is large (then `hold` returns it), and a small value."""
        found = self._find(key, version)
        if found is None:
            return 0, False, None
        is_bulk = isinstance(found.value, BulkValue)
        return found.number, is_bulk, None if is_bulk else found.value

    @endpoint(concurrency=limits.SERVICE_REMOTE_CALLS, group="holds")
    async def hold(self, key: str, version: int) -> AsyncGenerator[tuple[bytes, bool, RDMABuffer] | None, None]:
        """Keep the memory of a large value while the consumer reads it; yield None if the version is gone."""
        found = self._find(key, version)
        if found is None:
            yield None
            return
        bulk: BulkValue = found.value
        self.account.pin(found)
        try:
            yield bulk.head, bulk.is_mapping, bulk.buffer.readonly()
            await trio.sleep_forever()  # until the consumer leaves: a stream runs ahead of its consumer
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
        self._sweep()
        return list(self.account.keys(prefix))

    @endpoint(group="control")
    def delete(self, key: str) -> bool:
        """Remove all versions of a key; return whether there were any."""
        self._sweep()
        was_there = self.account.delete(key)
        self._give_back()
        return was_there

    @endpoint(group="control")
    def numbers(self) -> tuple[int, ...]:
        """Return the numbers of `StoreStatistics` for this shard."""
        self._sweep()
        one = self.account
        return one.key_count, one.version_count, one.bytes, one.puts, one.expired

    # ---- inside -------------------------------------------------------------------------------------------------

    def _reserved(self, key: str, nbytes: int) -> int:
        size = nbytes + len(key) + KEY_OVERHEAD_BYTES
        self._sweep()
        if not self.account.reserve(size):
            raise LimitExceeded(
                "capacity_bytes",
                self.account.bytes + size,
                f"a shard of this store holds at most {self.account.capacity_bytes} bytes, {self.account.bytes} are in "
                f"use, got {size} more for {key!r}: delete keys, give them a ttl=, or open the store with a larger "
                "capacity_bytes= or over more processes (the old version of a key counts until the new one is stored)",
            )
        return size

    def _withdraw(self, admitted: tuple[BulkValue, int]) -> None:
        bulk, size = admitted
        self.account.give_back(size)
        self.nursery.start_soon(bulk.buffer.aclose)

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
    """Return memory for a value: mappable by other processes if it is large and mappable memory is left."""
    if nbytes < limits.STORE_MAPPED_BYTES:
        return bytearray(nbytes)
    try:
        return allocate(nbytes)
    except LimitExceeded:
        return bytearray(nbytes)
