"""The owner's side of a replay buffer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import trio

from trimesh.errors import MeshStopped
from trimesh.service.accounts.replay import By, ReplayAccount, ReplayItem
from trimesh.service.work.slots_engine import SlotsEngine


class ReplayEngine:
    """A replay buffer in the process that has opened it.

    Attributes:
        account: What is stored.
        slots: Linked slots, which the items use; None without.
    """

    def __init__(self, account: ReplayAccount, slots: SlotsEngine | None, *, evicts: bool) -> None:
        self.account = account
        self.slots = slots
        self._evicts = evicts
        self._changed = trio.Event()
        self._adding = trio.Lock()
        self._taking = trio.Lock()
        self._is_closed = False

    async def add(self, item: ReplayItem) -> None:
        """Store an item, once there is room; first come, first served."""
        if item.size > self.account.bytes_max:
            raise ValueError(
                f"an item of {item.size} bytes does not fit into a buffer of {self.account.bytes_max} bytes"
            )
        async with self._adding:
            await self._until(lambda: self._make_room(item.size))
            self._see_version_of(item)
            self.account.add(item)
        self.changed()

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
            await self._until(has_got)
        self.changed()
        return found[0]

    def values_of(self, hold: int) -> list[Any]:
        """Return the values of a hold."""
        return [item.value for item in self.account.holds[hold][1]]

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
        return [item.value for item in found[0]]

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

    async def _until(self, is_done: Callable[[], bool]) -> None:
        await trio.lowlevel.checkpoint()
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
