"""`ReplayBuffer`, the handle on stored work, and `open_replay`."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable, Hashable
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
from trimesh.plain_numbers import plain_whole
from trimesh.service.accounts.replay import By, ReplayAccount, ReplayItem
from trimesh.service.sizes import estimate_bytes
from trimesh.service.work.certain import certainly
from trimesh.service.work.handover import change, hand_over, take_over
from trimesh.service.work.replay_engine import ReplayEngine
from trimesh.service.work.slots import Slots
from trimesh.service.work.spill import SpillFile

T = TypeVar("T")

Token = tuple[int, int]
"""One `add` of another process: the process, and the place among those that it has made."""

_tokens = count()


class ReplayStatistics(msgspec.Struct, frozen=True):
    """A replay buffer, in numbers of items: `added == stored + held + taken + sum(evicted.values())`.

    Attributes:
        version: The current one.
        added: Ever.
        stored: Still there.
        held: In the hands of `taking`.
        taken: Consumed, by `take` or a `taking` that ended well.
        evicted: Removed unused, by reason: "stale", "full", or what was given to `clear`.
        drawn: Returned by `sample`; an item counts each time.
        bytes: Of what is stored and held, as estimated.
        spilled_bytes: Of that, in the file.
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
    """A replay buffer, for other processes."""

    def __init__(self, number: int) -> None:
        self.engine, self.key = take_over(number).parts
        self.confirmed: dict[int, trio.Event] = {}
        self.adding: dict[Token, trio.CancelScope] = {}
        self.withdrawn: dict[Token, None] = {}

    @endpoint(concurrency=limits.SERVICE_REMOTE_CALLS, group="adds")
    async def add(self, token: Token, value: Any, version: int | None, group: Any, priority: float) -> bool:
        """Store an item; return whether it was, and not withdrawn before."""
        if token in self.withdrawn:
            del self.withdrawn[token]
            return False
        scope = self.adding[token] = trio.CancelScope()
        try:
            with scope:
                await self.engine.add(_item_of(self.key, value, version, group, priority))
                return True
        finally:
            del self.adding[token]
        return False

    @endpoint(group="control")
    def withdraw(self, token: Token) -> None:
        """Let an `add` end that waits, here or in the mailbox; one that has ended already says so itself."""
        if token in self.adding:
            self.adding[token].cancel(reason="its caller was cancelled")
            return
        self.withdrawn[token] = None
        if len(self.withdrawn) > limits.SERVICE_REMOTE_CALLS:
            del self.withdrawn[next(iter(self.withdrawn))]  # it has most likely ended; if not, it waits for room

    @endpoint(concurrency=limits.SERVICE_REMOTE_CALLS, group="takes")
    async def hold(self, count: int, max_age: int | None) -> AsyncGenerator[tuple[int, list[Any]], None]:
        """Give items until `confirm`; they are put back if the consumer leaves before, or dies."""
        hold = await self.engine.hold(count, max_age)
        confirmed = self.confirmed[hold] = trio.Event()
        try:
            yield hold, await self.engine.values_of(hold)
            await confirmed.wait()
        finally:
            if self.confirmed.pop(hold, None) is not None:
                self.engine.put_back(hold)

    @endpoint(group="control")
    def confirm(self, hold: int) -> None:
        """Count the items of a hold as trained."""
        confirmed = self.confirmed.pop(hold)
        self.engine.confirm(hold)
        confirmed.set()

    @endpoint(concurrency=limits.SERVICE_REMOTE_CALLS, group="samples")
    async def sample(self, count: int, max_age: int | None, by: By) -> list[Any]:
        """Draw items."""
        return await self.engine.sample(count, max_age, by)  # type: ignore[no-any-return]

    @endpoint(group="control")
    def advance(self, version: int) -> None:
        """Go on to a version."""
        self.engine.advance(version)


class ReplayBuffer(Generic[T]):
    """Stored work, each item accounted for once; a handle that any actor may hold.

    In other processes than that of its owner it has `add`, `take`, `taking`, `sample` and `advance`.
    """

    def __init__(self, engine: ReplayEngine | None, front: Any, key: Callable[[T], int] | None = None) -> None:
        self._engine = engine
        self._front = front
        self._key = key

    async def add(self, value: T, *, version: int | None = None, group: Hashable = None, priority: float = 1.0) -> None:
        """Store an item; wait while the buffer is full, unless it evicts.

        Args:
            value: Anything; in the process of the owner it is kept as it is.
            version: What it was made with; `open_replay(key=)` finds it otherwise.
            group: Name of what is drawn together by `sample(by="group")`.
            priority: Weight in `sample(by="priority")`, above 0.

        Raises:
            ValueError: It has no version, is larger than the buffer, or `priority` is not above 0.
            MeshStopped: The block of the buffer is being left.

        Blocking: a checkpoint, cancellable: an `add` that raises `Cancelled` has stored nothing, in other processes
        unless the owner did not answer in time (`abandon_after`). One that has stored its item when the cancel comes
        returns.
        """
        if self._engine is None:
            await in_trio(self._add)(value, version, group, priority)
            return
        await in_trio(self._engine.add)(_item_of(self._key, value, version, group, priority))

    async def take(self, count: int, *, max_age: int | None = None) -> list[T]:
        """Wait for `count` items and consume them, the oldest first.

        Args:
            count: Of items.
            max_age: Versions; older items are passed over.

        Raises:
            ValueError: `count` is below 1 or above the capacity.
            MeshStopped: The block of the buffer is being left.

        Blocking: a checkpoint, cancellable; a `take` that raises `Cancelled` has consumed nothing, as `add`.
        """
        async with self.taking(count, max_age=max_age) as values:
            return values

    def taking(self, count: int, *, max_age: int | None = None) -> AbstractAsyncContextManager[list[T]]:
        """Like `take`, but consumed when the body ends well: `async with buffer.taking(64) as batch:`.

        A body that raises, or is cancelled, puts the items back at their places, as does a consumer that dies.
        """
        return in_trio_block(self._taking(count, max_age))

    async def sample(self, count: int, *, max_age: int | None = None, by: By = "uniform") -> list[T]:
        """Wait until `count` items are there and draw them; they stay.

        Args:
            count: Of items, or of groups.
            max_age: Versions; older items are passed over.
            by: "uniform"; "priority": by weight; "group": all items of `count` groups. No item twice in one draw.

        Raises:
            ValueError: `by` is none of these, or `count` is below 1 or above the capacity.
            MeshStopped: The block of the buffer is being left.

        Blocking: a checkpoint, cancellable. O(n log n) of the stored items: 10,000 take some milliseconds.
        """
        if by not in ("uniform", "priority", "group"):
            raise ValueError(f'by is "uniform", "priority" or "group", got {by!r}')
        if self._engine is None:
            found: list[T] = await in_trio(self._front.sample.call_one)(count, max_age, by)
            return found
        return await in_trio(self._engine.sample)(count, max_age, by)

    async def advance(self, *, version: int) -> None:
        """Go on to a version, from which ages are counted; linked slots do so by themselves.

        Raises:
            ValueError: It is below the current one.

        Blocking: a checkpoint.
        """
        await change(None if self._engine is None else self._engine.advance, self._front.advance.call_one, version)

    def clear(self, *, reason: str) -> int:
        """Evict all stored items for this reason; return how many."""
        engine = self._owned()
        count = engine.account.clear(reason)
        in_trio_now(engine.changed)()
        return count

    def statistics(self) -> ReplayStatistics:
        """Return the state, in numbers of items.

        Raises:
            RuntimeError: This is not the process that owns the buffer.
        """
        one = self._owned().account
        return ReplayStatistics(
            one.version, one.added, len(one.items), one.held, one.taken, dict(one.evicted), one.drawn, one.bytes,
            0 if (spill := self._owned().spill) is None else spill.room.used,
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes, with all values; what is held counts as stored."""
        return self._owned().state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state, before the first item: the same items, counts and draws.

        Raises:
            ValueError: Items were added already.
        """
        in_trio_now(self._owned().load)(state)

    def __repr__(self) -> str:
        return "<replay buffer>" if self._engine is None else f"<replay buffer of {len(self._engine.account.items)}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return ReplayBuffer, (None, self._front)

    def _owned(self) -> ReplayEngine:
        if self._engine is None:
            raise RuntimeError(
                "this replay buffer is a handle in another process than its owner's: there it has add, take, taking, "
                "sample and advance; clear, statistics, state_dict and load_state_dict are for the owner"
            )
        return self._engine

    async def _add(self, *item: Any) -> None:
        token = current_proc().proc_id, next(_tokens)
        add, withdraw = self._front.add.call_one, self._front.withdraw.call_one
        if not await certainly(partial(add, token, *item), partial(withdraw, token)):
            await trio.lowlevel.checkpoint()  # raises the cancel for which it was withdrawn

    @asynccontextmanager
    async def _taking(self, count: int, max_age: int | None) -> AsyncGenerator[list[T], None]:
        engine = self._engine
        if engine is None:
            with trio.CancelScope() as leaving:
                async with self._front.hold.stream(count, max_age) as replies:
                    _, (number, values) = await anext(replies)
                    yield values
                    await certainly(partial(self._front.confirm.call_one, number))
                    leaving.shield = True  # the items are consumed, whatever is cancelled from here on
            return
        hold = await engine.hold(count, max_age)
        try:
            yield await engine.values_of(hold)
        except BaseException:
            engine.put_back(hold)
            raise
        engine.confirm(hold)


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
    """Store work between those that make it and those that train: `async with service.open_replay(capacity=10_000)`.

    Args:
        capacity: Items.
        capacity_bytes: Bytes of the items, as estimated.
        key: Gives the version of an item that is added without one.
        seed: What `sample` draws follows from it, and from the order of what was added.
        max_age: Versions; older items are evicted when the version advances. With `slots`, their staleness.
        when_full: "wait": `add` waits for room; "evict": the oldest item goes, and is counted.
        slots: Slots of the same process that the items use: freed as they are taken or evicted, without `release`.
        spill: A folder: what `capacity_bytes` has no room for is kept in a file there, and is read as it is taken or
            drawn. The file has no name, so it is gone with this process, however that ends.
        spill_bytes: Bytes of the file, at most.

    Raises:
        ValueError: A number is out of its bounds, or the slots have a buffer.
        OSError: There can be no file in `spill`.
    """
    capacity, capacity_bytes, spill_bytes = map(plain_whole, (capacity, capacity_bytes, spill_bytes))
    seed, max_age = plain_whole(seed), plain_whole(max_age)
    for name, number in (("capacity", capacity), ("capacity_bytes", capacity_bytes), ("spill_bytes", spill_bytes)):
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number!r}")
    if when_full not in ("wait", "evict"):
        raise ValueError(f'when_full is "wait" or "evict", got {when_full!r}')
    linked = None if slots is None else slots.engine
    if linked is not None and linked.buffer is not None:
        raise ValueError("these slots are linked to a replay buffer already: open others for this one")
    if linked is not None and max_age is None:
        max_age = linked.account.staleness
    account = ReplayAccount(capacity, capacity_bytes, seed, max_age)
    file = None if spill is None else SpillFile(spill, spill_bytes)
    return in_trio_block(_open(ReplayEngine(account, linked, file, evicts=when_full == "evict"), key))


class _Parts:
    """An engine and its key, on their way to the actor beside them."""

    def __init__(self, engine: ReplayEngine, key: Callable[[Any], int] | None) -> None:
        self.parts = engine, key


@asynccontextmanager
async def _open(engine: ReplayEngine, key: Callable[[Any], int] | None) -> AsyncGenerator[ReplayBuffer[Any], None]:
    parts = _Parts(engine, key)
    async with this_proc().spawn("replay", ReplayFront, hand_over(parts)) as front:
        slots = engine.slots
        if slots is not None:
            engine.advance(slots.account.version)
            slots.buffer = lambda: engine.account.slots
            slots.on_version = engine.advance
        try:
            yield ReplayBuffer(engine, front, key)
        finally:
            engine.close()
            if slots is not None:
                slots.on_version = None


def _item_of(
    key: Callable[[Any], int] | None, value: Any, version: int | None, group: Hashable, priority: float
) -> ReplayItem:
    if version is None:
        if key is None:
            raise ValueError("an item needs a version: `add(sample, version=lease.version)`, or `open_replay(key=)`")
        version = key(value)
    if not priority > 0:
        raise ValueError(f"priority is a weight above 0, got {priority!r}")
    return ReplayItem(value, version=version, group=group, priority=priority, size=estimate_bytes(value))
