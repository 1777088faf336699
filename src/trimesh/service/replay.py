"""Replay buffers: `open_replay`, the handle `ReplayBuffer`, its actor, and the spill file."""

from __future__ import annotations

import os
import pickle
import tempfile
import weakref
from collections.abc import AsyncGenerator, Callable, Hashable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from itertools import count
from typing import Any, Generic, Literal, TypeVar

import msgspec
import trio

from trimesh import limits
from trimesh._runtime.life import current_proc
from trimesh._runtime.tasks import in_trio, in_trio_block, in_trio_now
from trimesh.actor.actor import Actor
from trimesh.actor.endpoint import endpoint
from trimesh.actor.host_mesh import this_proc
from trimesh.context_managers import asynccontextmanager
from trimesh.errors import MeshStopped
from trimesh.plain_numbers import plain_whole
from trimesh.service.accounts import By, FileExtents, Piece, ReplayAccount, ReplayItem, estimate_bytes
from trimesh.service.owner_calls import StreamHolds, certainly, change, hand_over, held, take_over
from trimesh.service.slots import Slots

R = TypeVar("R")
T = TypeVar("T")

Token = tuple[int, int]
"""Id of one `add` from another process: the process, and a number that it counts up."""

_tokens = count()


class ReplayStatistics(msgspec.Struct, frozen=True):
    """Statistics of a replay buffer, in items: `added == stored + held + taken + sum(evicted.values())`.

    Attributes:
        version: Current version.
        added: Items ever added.
        stored: Items stored now.
        held: Items held by `taking` blocks.
        taken: Items consumed, by `take` or a `taking` block that ended without error.
        evicted: Items removed unused, by reason: "stale", "full", or the reason passed to `clear`.
        drawn: Items returned by `sample`; an item counts each time.
        bytes: Estimated bytes of stored and held items.
        spilled_bytes: Those of them in the file.
    """

    version: int
    added: int
    stored: int
    held: int
    taken: int
    evicted: dict[str, int]
    drawn: int
    bytes: int
    spilled_bytes: int = 0


class ReplayFront(Actor):
    """Actor by which other processes use a replay buffer."""

    def __init__(self, number: int) -> None:
        self.buffer: ReplayBuffer[Any] = take_over(number)
        self.holds = StreamHolds[int](self.buffer._put_back)
        self.adding: dict[Token, trio.CancelScope] = {}
        self.withdrawn: dict[Token, None] = {}

    @endpoint(concurrency=limits.SERVICE_REMOTE_CALLS, group="adds")
    async def add(self, token: Token, value: Any, version: int | None, group: Any, priority: float) -> bool:
        """Store an item; return False if it was withdrawn before."""
        if token in self.withdrawn:
            del self.withdrawn[token]
            return False
        scope = self.adding[token] = trio.CancelScope()
        try:
            with scope:
                await self.buffer._add(self.buffer._item_of(value, version, group, priority))
                return True
        finally:
            del self.adding[token]
        return False

    @endpoint(group="control")
    def withdraw(self, token: Token) -> None:
        """End an `add` that waits, here or in the mailbox; one that has ended replies itself."""
        if token in self.adding:
            self.adding[token].cancel(reason="its caller was cancelled")
            return
        self.withdrawn[token] = None
        if len(self.withdrawn) > limits.SERVICE_REMOTE_CALLS:
            del self.withdrawn[next(iter(self.withdrawn))]  # most likely it has ended; otherwise it may still store

    @endpoint(concurrency=limits.SERVICE_REMOTE_CALLS, group="takes")
    async def hold(self, count: int, max_age: int | None) -> AsyncGenerator[tuple[int, list[Any]], None]:
        """Send items that the consumer holds until `confirm`; put them back if it leaves before, or dies."""
        hold = await self.buffer._hold(count, max_age)
        async with self.holds.hold(hold) as number:
            yield number, await self.buffer._values_of(hold)

    @endpoint(group="control")
    def confirm(self, number: int) -> None:
        """Count the items of a hold as consumed."""
        self.buffer._confirm(self.holds.confirm(number))

    @endpoint(concurrency=limits.SERVICE_REMOTE_CALLS, group="samples")
    async def sample(self, count: int, max_age: int | None, by: By) -> list[Any]:
        return await self.buffer._sample(count, max_age, by)

    @endpoint(group="control")
    def advance(self, version: int) -> None:
        self.buffer._advance(version)


class ReplayBuffer(Generic[T]):
    """Stored work, each item accounted for once; a handle that any actor may hold.

    Outside the process that opened it, it has only `add`, `take`, `taking`, `sample` and `advance`.
    """

    def __init__(
        self,
        front: Any,
        own: ReplayAccount | None = None,
        *,
        key: Callable[[T], int] | None = None,
        slots: Slots | None = None,
        spill: SpillFile | None = None,
        evicts: bool = False,
    ) -> None:
        self._front = front
        self._own = own  # this and the following only in the owner's process
        self._key = key
        self._slots = slots
        self._spill = spill
        self._evicts = evicts
        self._memory_max = 0 if own is None else own.bytes_max
        if own is not None and spill is not None:
            own.bytes_max += spill.room.bytes_max
            own.on_drop = spill.drop
        self._changed = trio.Event()
        self._add_lock = trio.Lock()
        self._take_lock = trio.Lock()
        self._is_closed = False

    async def add(self, value: T, *, version: int | None = None, group: Hashable = None, priority: float = 1.0) -> None:
        """Store an item; wait while the buffer is full, unless it evicts.

        Args:
            value: Any value; in the process that opened the buffer it is stored without a copy.
            version: Version that it was made with; without it, `open_replay(key=)` returns it.
            group: Name of the items that `sample(by="group")` draws together.
            priority: Weight in `sample(by="priority")`, above 0.

        Raises:
            ValueError: It has no version, is larger than the buffer, or `priority` is not above 0.
            MeshStopped: The block of the buffer is being left.

        Blocking: a checkpoint, cancellable. An `add` that raises `Cancelled` has stored nothing, except from another
        process if the owner did not answer in time (`abandon_after`). One that has stored its item before the cancel
        returns.
        """
        if self._own is None:
            await in_trio(self._add_there)(value, version, group, priority)
        else:
            await in_trio(self._add)(self._item_of(value, version, group, priority))

    async def take(self, count: int, *, max_age: int | None = None) -> list[T]:
        """Wait for `count` items and consume them, the oldest first.

        Args:
            count: Number of items.
            max_age: Greatest age in versions; older items are skipped.

        Raises:
            ValueError: `count` is below 1 or above the capacity.
            MeshStopped: The block of the buffer is being left.

        Blocking: a checkpoint, cancellable; a `take` that raises `Cancelled` consumed nothing (exception: see `add`).
        """
        async with self.taking(count, max_age=max_age) as values:
            return values

    def taking(self, count: int, *, max_age: int | None = None) -> AbstractAsyncContextManager[list[T]]:
        """Hold items as `take`, and consume them when the body ends well: `async with buffer.taking(64) as batch:`.

        If the body raises or is cancelled, or its process dies, the items return to their old places.
        """
        return in_trio_block(self._taking(count, max_age))

    async def sample(self, count: int, *, max_age: int | None = None, by: By = "uniform") -> list[T]:
        """Wait for `count` items and draw them without removing them.

        Args:
            count: Number of items, or of groups.
            max_age: Greatest age in versions; older items are skipped.
            by: "uniform"; "priority": by weight; "group": all items of `count` groups. No item occurs twice in a draw.

        Raises:
            ValueError: `by` is none of these, or `count` is below 1 or above the capacity.
            MeshStopped: The block of the buffer is being left.

        Blocking: a checkpoint, cancellable. O(n log n) of the stored items: 10,000 take some milliseconds.
        """
        if by not in ("uniform", "priority", "group"):
            raise ValueError(f'by must be "uniform", "priority" or "group", got {by!r}')
        sample = self._front.sample.call_one if self._own is None else self._sample
        found: list[T] = await in_trio(sample)(count, max_age, by)
        return found

    async def advance(self, *, version: int) -> None:
        """Advance to a version, from which ages are counted; linked slots do so themselves.

        Raises:
            ValueError: It is below the current one.

        Blocking: a checkpoint.
        """
        await change(None if self._own is None else self._advance, self._front.advance.call_one, version)

    def clear(self, *, reason: str) -> int:
        """Evict all stored items for this reason; return how many."""
        count = self._account.clear(reason)
        in_trio_now(self._wake)()
        return count

    def statistics(self) -> ReplayStatistics:
        """Return the state, in numbers of items.

        Raises:
            RuntimeError: This is not the process that owns the buffer.
        """
        one = self._account
        return ReplayStatistics(
            one.version, one.added, len(one.items), one.held, one.taken, dict(one.evicted), one.drawn, one.bytes,
            0 if self._spill is None else self._spill.room.used,
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Return the state with all values, for `load_state_dict`; held items count as stored."""
        state = self._account.state()
        values = [item[1] for item in state["items"]]
        if self._spill is not None:
            values = self._spill.loaded(values)
        items = [(one[0], value, *one[2:]) for one, value in zip(state["items"], values, strict=True)]
        return {**state, "items": items}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state, before the first item: the same items, counts and draws.

        Raises:
            ValueError: Items were added already.
        """
        in_trio_now(self._load)(state)

    def __repr__(self) -> str:
        return "<replay buffer>" if self._own is None else f"<replay buffer of {len(self._own.items)}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return ReplayBuffer, (self._front,)

    async def _add_there(self, *item: Any) -> None:
        token = current_proc().proc_id, next(_tokens)
        add, withdraw = self._front.add.call_one, self._front.withdraw.call_one
        if not await certainly(partial(add, token, *item), partial(withdraw, token)):
            await trio.lowlevel.checkpoint()  # raises the cancel for which it was withdrawn

    @asynccontextmanager
    async def _taking(self, count: int, max_age: int | None) -> AsyncGenerator[list[T], None]:
        if self._own is None:
            async with held(self._front.hold.stream(count, max_age), self._front.confirm.call_one) as values:
                yield values
            return
        hold = await self._hold(count, max_age)
        try:
            yield await self._values_of(hold)
        except BaseException:
            self._put_back(hold)
            raise
        self._confirm(hold)

    # ---- in the process of the owner -------------------------------------------------------------------------

    @property
    def _account(self) -> ReplayAccount:
        if self._own is None:
            raise RuntimeError(
                "clear, statistics, state_dict and load_state_dict can only be called in the process that opened the "
                "replay buffer; in this process the handle has add, take, taking, sample and advance"
            )
        return self._own

    def _item_of(self, value: T, version: int | None, group: Hashable, priority: float) -> ReplayItem:
        if version is None:
            if self._key is None:
                raise ValueError(
                    "an item needs a version: `add(sample, version=lease.version)`, or `open_replay(key=)`"
                )
            version = self._key(value)
        if not priority > 0:
            raise ValueError(f"priority must be a weight above 0, got {priority!r}")
        return ReplayItem(value, version=version, group=group, priority=priority, size=estimate_bytes(value))

    async def _add(self, item: ReplayItem) -> None:
        """Store an item, once there is room; first come, first served."""
        most = self._memory_max if self._spill is None else max(self._memory_max, self._spill.room.bytes_max)
        if item.size > most:
            raise ValueError(
                f"an item of {item.size} bytes does not fit into a buffer of {most} bytes: raise capacity_bytes="
            )
        async with self._add_lock:
            if self._spill is None:
                await self._soon(partial(self._make_room, item.size))
            else:
                await self._place(self._spill, item)
            try:
                self._see_version_of(item)
            except BaseException:
                self._account.on_drop(item.value)
                raise
            self._account.add(item)
        self._wake()

    def _make_room(self, size: int) -> bool:
        return self._account.has_room(size) or (self._evicts and self._account.make_room(size))

    def _see_version_of(self, item: ReplayItem) -> None:
        if item.version <= self._account.version:
            return
        if self._slots is not None:
            raise ValueError(
                f"the version of an item must be that of its lease, at most that of the slots, "
                f"{self._account.version}, got {item.version}"
            )
        self._account.advance(item.version)

    async def _place(self, spill: SpillFile, item: ReplayItem) -> None:
        """Wait for room in memory, or else in the file, and put the value there.

        The newest values go to the file, so those that `take` returns next stay in memory.
        """
        await trio.lowlevel.checkpoint()
        await self._soon(partial(self._has_place, spill, item.size, None))
        if self._fits_memory(item.size):
            return
        data = spill.encoded(item.value)
        if len(data) > spill.room.bytes_max:
            raise ValueError(
                f"an item of {len(data)} bytes does not fit into a file of {spill.room.bytes_max} bytes: raise "
                "spill_bytes="
            )
        await trio.lowlevel.checkpoint()
        await self._soon(partial(self._has_place, spill, item.size, len(data)))
        if not self._fits_memory(item.size):
            item.value, item.size = await spill.write(data), len(data)

    def _has_place(self, spill: SpillFile, size: int, encoded: int | None) -> bool:
        """Return whether there is room for an item, evicting if allowed; `encoded`: its bytes in the file, if known."""
        while True:
            if len(self._account.items) + self._account.held < self._account.capacity and (
                self._fits_memory(size) or encoded is None or spill.room.fits(encoded)
            ):
                return True
            if not self._evicts or not self._account.evict_oldest():
                return False

    def _fits_memory(self, size: int) -> bool:
        return self._account.bytes - (self._spill.room.used if self._spill else 0) + size <= self._memory_max

    async def _hold(self, count: int, max_age: int | None) -> int:
        """Wait for `count` items and hold them for a consumer, first come, first served."""
        self._check(count)
        async with self._take_lock:
            hold = await self._soon(partial(self._account.hold, count, max_age))
        self._wake()
        return hold

    async def _values_of(self, hold: int) -> list[Any]:
        return await self._values(self._account.holds[hold][1])

    async def _values(self, items: Sequence[ReplayItem]) -> list[Any]:
        values = [item.value for item in items]
        if self._spill is None or not any(isinstance(one, SpilledValue) for one in values):
            return values
        found = await self._spill.read_all(values)
        self._wake()
        return found

    def _confirm(self, hold: int) -> None:
        self._account.confirm(hold)
        self._wake()

    def _put_back(self, hold: int) -> None:
        self._account.put_back(hold)
        self._wake()

    async def _sample(self, count: int, max_age: int | None, by: By) -> list[Any]:
        """Wait until a draw is possible, and make it."""
        self._check(count)
        await trio.lowlevel.checkpoint()
        return await self._values(await self._soon(partial(self._account.sample, count, max_age, by)))

    def _check(self, count: int) -> None:
        if not 1 <= count <= self._account.capacity:
            raise ValueError(f"count must be 1 to {self._account.capacity}, the capacity of the buffer, got {count}")

    def _advance(self, version: int) -> None:
        self._account.advance(version)
        self._wake()

    def _load(self, state: dict[str, Any]) -> None:
        """Load a state; move values to the file, the newest first, until the rest fits into memory."""
        account, spill = self._account, self._spill
        account.load(state)
        for item in reversed(list(account.items.values()) if spill else ()):
            if spill is None or self._fits_memory(0):
                break
            data = spill.encoded(item.value)
            if not spill.room.fits(len(data)):
                account.evict_oldest()
                continue
            account.bytes += len(data) - item.size
            item.value, item.size = spill.write_now(data), len(data)
        self._wake()

    async def _soon(self, attempt: Callable[[], R | None]) -> R:
        """Retry an attempt at each change until it succeeds; no checkpoint if it succeeds at once."""
        while True:
            if self._is_closed:
                raise MeshStopped(
                    "the block of this replay buffer is being left or has ended: use it only inside `async with "
                    "open_replay(...)`"
                )
            if found := attempt():
                return found
            await self._changed.wait()

    def _wake(self) -> None:
        """Wake all waiting calls, to retry."""
        self._changed.set()
        self._changed = trio.Event()
        if self._slots is not None:
            self._slots._pump()

    def _close(self) -> None:
        """Refuse new and waiting calls."""
        self._is_closed = True
        self._changed.set()
        if self._spill is not None:
            self._spill.close()


def open_replay(
    *,
    capacity: int,
    capacity_bytes: int = limits.REPLAY_BYTES,
    key: Callable[[Any], int] | None = None,
    seed: int = 0,
    max_age: int | None = None,
    when_full: Literal["wait", "evict"] = "wait",
    slots: Slots | None = None,
    spill: str | os.PathLike[str] | None = None,
    spill_bytes: int = limits.REPLAY_SPILL_BYTES,
) -> AbstractAsyncContextManager[ReplayBuffer[Any]]:
    """Open a buffer of work between generators and trainers: `async with service.open_replay(capacity=10_000)`.

    Args:
        capacity: Greatest number of items.
        capacity_bytes: Greatest estimated bytes of the items in memory.
        key: Returns the version of an item that is added without one.
        seed: Seed of `sample`, whose draws depend on it and on the order of added items.
        max_age: Greatest age in versions; older items are evicted when the version advances. By default the staleness
            of `slots`, or none.
        when_full: "wait": `add` waits for room; "evict": the oldest item is evicted, and counted.
        slots: Slots of the same process that the items use. Taking or evicting an item frees its slots, without
            `release`.
        spill: A folder: items beyond `capacity_bytes` are kept in a file there, and read when they are taken or drawn.
            The file has no name, so it disappears with this process, however that ends.
        spill_bytes: Greatest size of the file.

    Raises:
        ValueError: A number is out of its bounds, or the slots have a buffer.
        OSError: No file can be made in `spill`.
    """
    capacity, capacity_bytes, spill_bytes = map(plain_whole, (capacity, capacity_bytes, spill_bytes))
    seed, max_age = plain_whole(seed), plain_whole(max_age)
    for name, number in (("capacity", capacity), ("capacity_bytes", capacity_bytes), ("spill_bytes", spill_bytes)):
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number!r}")
    if when_full not in ("wait", "evict"):
        raise ValueError(f'when_full must be "wait" or "evict", got {when_full!r}')
    if slots is not None:
        staleness = slots._account.staleness  # raises `RuntimeError` for a handle of another process
        if slots._count_stored is not None:
            raise ValueError("slots can be linked to one replay buffer, and these are linked: open others for this one")
        max_age = staleness if max_age is None else max_age
    account = ReplayAccount(capacity, capacity_bytes, seed, max_age)
    file = None if spill is None else SpillFile(spill, spill_bytes)
    evicts = when_full == "evict"
    return in_trio_block(_open(ReplayBuffer(None, account, key=key, slots=slots, spill=file, evicts=evicts), slots))


@asynccontextmanager
async def _open(buffer: ReplayBuffer[Any], slots: Slots | None) -> AsyncGenerator[ReplayBuffer[Any], None]:
    async with this_proc().spawn("replay", ReplayFront, hand_over(buffer)) as front:
        buffer._front = front
        if slots is not None:
            buffer._advance(slots._account.version)
            slots._count_stored = lambda: buffer._account.slots
            slots._on_version = buffer._advance
        try:
            yield buffer
        finally:
            buffer._close()
            if slots is not None:
                slots._on_version = None


# ---- the spill file --------------------------------------------------------------------------------------------------


class SpilledValue:
    """Pieces of the file that hold a value."""

    __slots__ = ("pieces", "size")

    def __init__(self, pieces: list[Piece]) -> None:
        self.pieces = pieces
        self.size = sum(length for _, length in pieces)


class SpillFile:
    """A file without a name in a folder, of at most `bytes_max`: it disappears with its process, however that ends."""

    def __init__(self, folder: str | os.PathLike[str], bytes_max: int) -> None:
        self.room = FileExtents(bytes_max)
        self._file = tempfile.TemporaryFile(dir=folder, prefix="trimesh-replay-", buffering=0)  # noqa: SIM115 - see close
        self._readers = 0
        self._dropped: list[SpilledValue] = []
        self._end = weakref.finalize(self, self._file.close)

    @staticmethod
    def encoded(value: Any) -> bytes:
        return pickle.dumps(value, protocol=5)

    async def write(self, data: bytes) -> SpilledValue:
        """Write bytes for which there is room, in a thread if they are many; after an error the room is free again."""
        await trio.lowlevel.checkpoint()
        pieces = self.room.take(len(data))
        try:
            if len(data) < limits.REPLAY_THREAD_BYTES:
                self._write(data, pieces)
            else:
                await trio.to_thread.run_sync(self._write, data, pieces)
        except BaseException:
            self.room.give_back(pieces)
            raise
        return SpilledValue(pieces)

    def write_now(self, data: bytes) -> SpilledValue:
        """Write bytes for which there is room."""
        pieces = self.room.take(len(data))
        self._write(data, pieces)
        return SpilledValue(pieces)

    def _write(self, data: bytes, pieces: list[Piece]) -> None:
        rest = memoryview(data)
        for offset, length in pieces:
            at, end = offset, offset + length
            while at < end:
                written = os.pwrite(self._file.fileno(), rest[: end - at], at)
                at, rest = at + written, rest[written:]

    def read(self, spilled: SpilledValue) -> Any:
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
        """Return the values; read those that are in the file."""
        return [self.read(one) if isinstance(one, SpilledValue) else one for one in values]

    async def read_all(self, values: Sequence[Any]) -> list[Any]:
        """Return the values; read many bytes in a thread. Values dropped meanwhile are not overwritten."""
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
        """Free the room of a value that is no longer needed."""
        if isinstance(value, SpilledValue):
            if self._readers:
                self._dropped.append(value)
            else:
                self.room.give_back(value.pieces)

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._end()
