"""The owner's side of a replay buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import trio

from trimesh.errors import MeshStopped
from trimesh.service.accounts.replay import By, ReplayAccount, ReplayItem
from trimesh.service.work.slots_engine import SlotsEngine
from trimesh.service.work.spill import SpilledValue, SpillFile


class ReplayEngine:
    """A replay buffer in the process that has opened it.

    Attributes:
        account: What is stored.
        slots: Linked slots, which the items use; None without.
        spill: Where values are for which memory has no room; None without.
    """

    def __init__(
        self, account: ReplayAccount, slots: SlotsEngine | None, spill: SpillFile | None, *, evicts: bool
    ) -> None:
        self.account = account
        self.spill = spill
        self._memory_max = account.bytes_max
        if spill is not None:
            account.bytes_max += spill.room.bytes_max
            account.on_drop = spill.drop
        self.slots = slots
        self._evicts = evicts
        self._changed = trio.Event()
        self._adding = trio.Lock()
        self._taking = trio.Lock()
        self._is_closed = False

    async def add(self, item: ReplayItem) -> None:
        """Store an item, once there is room; first come, first served."""
        if item.size > (most := self._memory_max if self.spill is None else max(self._memory_max, self._spill_max)):
            raise ValueError(f"an item of {item.size} bytes does not fit into a buffer of {most} bytes")
        async with self._adding:
            if self.spill is None:
                await self._soon(lambda: self._make_room(item.size))
            else:
                await self._place(self.spill, item)
            try:
                self._see_version_of(item)
            except BaseException:
                self.account.on_drop(item.value)
                raise
            self.account.add(item)
        self.changed()

    async def _place(self, spill: SpillFile, item: ReplayItem) -> None:
        """Wait for room in memory, or else in the file, and put the value there.

        What has come last goes to the file: what `take` gives next stays in memory.
        """
        await self._until(lambda: self._has_place(spill, item.size, None))
        if self._fits_memory(item.size):
            return
        data = spill.encoded(item.value)
        if len(data) > spill.room.bytes_max:
            raise ValueError(f"an item of {len(data)} bytes does not fit into a file of {spill.room.bytes_max} bytes")
        await self._until(lambda: self._has_place(spill, item.size, len(data)))
        if self._fits_memory(item.size):
            return
        item.value, item.size = await spill.write(data), len(data)

    def _has_place(self, spill: SpillFile, size: int, encoded: int | None) -> bool:
        """Whether an item has room; `encoded`: its bytes in the file, to be known before that is asked."""
        while True:
            if len(self.account.items) + self.account.held < self.account.capacity and (
                self._fits_memory(size) or encoded is None or spill.room.fits(encoded)
            ):
                return True
            if not self._evicts or not self.account.evict_oldest():
                return False

    def _fits_memory(self, size: int) -> bool:
        return self.account.bytes - (self.spill.room.used if self.spill else 0) + size <= self._memory_max

    @property
    def _spill_max(self) -> int:
        return 0 if self.spill is None else self.spill.room.bytes_max

    async def hold(self, count: int, max_age: int | None) -> int:
        """Wait for so many items and give them to a consumer, first come, first served."""
        self._check(count)
        found: list[int] = []

        def has_got() -> bool:
            number = self.account.hold(count, max_age)
            if number is not None:
                found.append(number)
            return bool(found)

        async with self._taking:
            await self._soon(has_got)
        self.changed()
        return found[0]

    async def values_of(self, hold: int) -> list[Any]:
        """Return the values of a hold."""
        return await self._values(self.account.holds[hold][1])

    async def _values(self, items: Sequence[ReplayItem]) -> list[Any]:
        values = [item.value for item in items]
        if self.spill is None or not any(isinstance(one, SpilledValue) for one in values):
            return values
        found = await self.spill.read_all(values)
        self.changed()
        return found

    def state(self) -> dict[str, Any]:
        """Return what `load` takes, with all values."""
        state = self.account.state()
        values = [item[1] for item in state["items"]]
        if self.spill is not None:
            values = self.spill.loaded(values)
        return {
            **state,
            "items": [(one[0], value, *one[2:]) for one, value in zip(state["items"], values, strict=True)],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state: what memory has no room for goes to the file, the newest first."""
        self.account.load(state)
        spill = self.spill
        for item in reversed(list(self.account.items.values()) if spill else ()):
            if spill is None or self._fits_memory(0):
                break
            data = spill.encoded(item.value)
            if not spill.room.fits(len(data)):
                self.account.evict_oldest()
                continue
            self.account.bytes += len(data) - item.size
            item.value, item.size = spill.write_now(data), len(data)
        self.changed()

    def confirm(self, hold: int) -> None:
        """Count the items of a hold as trained."""
        self.account.confirm(hold)
        self.changed()

    def put_back(self, hold: int) -> None:
        """Store the items of a hold again."""
        self.account.put_back(hold)
        self.changed()

    async def sample(self, count: int, max_age: int | None, by: By) -> list[Any]:
        """Wait until a draw is possible, and make it."""
        self._check(count)
        found: list[list[ReplayItem]] = []

        def has_drawn() -> bool:
            items = self.account.sample(count, max_age, by)
            if items is not None:
                found.append(items)
            return bool(found)

        await self._until(has_drawn)
        return await self._values(found[0])

    def advance(self, version: int) -> None:
        """Go on to a version."""
        self.account.advance(version)
        self.changed()

    def changed(self) -> None:
        """Let all that waits look again."""
        self._changed.set()
        self._changed = trio.Event()
        if self.slots is not None:
            self.slots.pump()

    def close(self) -> None:
        """Refuse what comes, and what waits."""
        self._is_closed = True
        self._changed.set()
        if self.spill is not None:
            self.spill.close()

    async def _until(self, is_done: Callable[[], bool]) -> None:
        await trio.lowlevel.checkpoint()
        await self._soon(is_done)

    async def _soon(self, is_done: Callable[[], bool]) -> None:
        """Wait until something is done; no checkpoint if it is: a lock that the caller has got was one."""
        while True:
            if self._is_closed:
                raise MeshStopped("the block of this replay buffer is being left, or was")
            if is_done():
                return
            await self._changed.wait()

    def _make_room(self, size: int) -> bool:
        return self.account.has_room(size) or (self._evicts and self.account.make_room(size))

    def _see_version_of(self, item: ReplayItem) -> None:
        if item.version <= self.account.version:
            return
        if self.slots is not None:
            raise ValueError(
                f"an item has the version of its lease, at most that of the slots: {self.account.version}, "
                f"got {item.version}"
            )
        self.account.advance(item.version)

    def _check(self, count: int) -> None:
        if not 1 <= count <= self.account.capacity:
            raise ValueError(f"a batch is of 1 to {self.account.capacity} items, got {count}")
