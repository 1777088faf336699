"""The owner's side of slots."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

import trio

from trimesh.context_managers import asynccontextmanager
from trimesh.errors import MeshStopped
from trimesh.service.accounts.slots import SlotAccount, SlotLease


class SlotsEngine:
    """Slots in the process that has opened them.

    Attributes:
        account: Who may begin.
        buffer: How many slots the items of a linked buffer use; None without one.
        on_version: Told of each new version, before slots are granted for it.
    """

    def __init__(self, account: SlotAccount) -> None:
        self.account = account
        self.buffer: Callable[[], int] | None = None
        self.on_version: Callable[[int], None] | None = None
        self._granted: dict[SlotLease, trio.Event] = {}
        self._is_closed = False

    @asynccontextmanager
    async def lease(self, group: int) -> AsyncGenerator[SlotLease, None]:
        """Hold slots while the body runs."""
        lease = await self.acquire(group)
        try:
            yield lease
        except BaseException:
            self.end(lease, well=False)
            raise
        self.end(lease, well=True)

    def end(self, lease: SlotLease, *, well: bool) -> None:
        """End a lease that was granted."""
        self.account.end(lease, well=well)
        self.pump()

    def advance(self, version: int) -> None:
        """Go on to a version."""
        if self.account.advance(version) and self.on_version is not None:
            self.on_version(version)
        self.pump()

    def release(self, count: int) -> None:
        """Free slots of work that is over."""
        self.account.release(count)
        self.pump()

    def pump(self) -> None:
        """Grant what can be granted."""
        if self.buffer is not None:
            self.account.stored = self.buffer()
        for lease in self.account.grant():
            self._granted.pop(lease).set()

    def close(self) -> None:
        """Refuse leases, also those that wait."""
        self._is_closed = True
        for event in self._granted.values():
            event.set()

    async def acquire(self, group: int) -> SlotLease:
        """Wait for slots; `end` gives them back."""
        if not 1 <= group <= self.account.capacity:
            raise ValueError(f"a lease is of 1 to {self.account.capacity} slots (batch * (staleness + 1)), got {group}")
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._is_closed:
            raise MeshStopped(_CLOSED)
        lease = self.account.ask(group)
        event = self._granted[lease] = trio.Event()
        self.pump()
        try:
            await event.wait()
            if lease.version is None:
                raise MeshStopped(_CLOSED)
        except BaseException:
            if lease.version is None:
                del self._granted[lease]
                self.account.withdraw(lease)
                self.pump()
            else:
                self.end(lease, well=False)
            raise
        return lease


_CLOSED = "the block of these slots is being left, or was: open_slots gives slots for its block only"
