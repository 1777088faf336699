"""Slots, which bound the staleness of work: `open_slots` and the handle `Slots`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import msgspec
import trio

from trimesh import limits
from trimesh._runtime.tasks import in_trio_block
from trimesh.actor.actor import Actor
from trimesh.actor.endpoint import endpoint
from trimesh.actor.host_mesh import this_proc
from trimesh.context_managers import asynccontextmanager
from trimesh.errors import MeshStopped
from trimesh.plain_numbers import plain_whole
from trimesh.service.accounts import SlotAccount, SlotLease
from trimesh.service.owner_calls import StreamHolds, change, hand_over, held, take_over


class Lease(msgspec.Struct, frozen=True):
    """Permission to begin some work, while its block runs.

    Attributes:
        version: The newest version when it was granted, with which the work begins.
        group: Number of slots that it holds.
    """

    version: int
    group: int


class SlotStatistics(msgspec.Struct, frozen=True):
    """Statistics of slots: `begun == running + returned + handed_on + lost`.

    Attributes:
        version: The current version.
        capacity: Number of all slots.
        in_use: Slots that are not free.
        waiting: Number of leases that wait.
        begun: Slots that were ever granted.
        running: Of those, slots of leases that are held.
        returned: Of those, slots whose lease ended by an error or a cancel.
        handed_on: Of those, slots whose lease ended well.
        lost: Of those, slots that were held when the loaded state was saved.
    """

    version: int
    capacity: int
    in_use: int
    waiting: int
    begun: int
    running: int
    returned: int
    handed_on: int
    lost: int


class SlotsFront(Actor):
    """Actor by which other processes use slots."""

    def __init__(self, number: int) -> None:
        self.slots: Slots = take_over(number)
        self.leases = StreamHolds[SlotLease](partial(self.slots._end, well=False))

    @endpoint(concurrency=limits.SERVICE_REMOTE_CALLS, group="leases")
    async def hold(self, group: int) -> AsyncGenerator[tuple[int, int], None]:
        """Hold slots until `finish`; free them if the consumer leaves before, or dies."""
        lease = await self.slots._acquire(group)
        assert lease.version is not None
        async with self.leases.hold(lease) as number:
            yield number, lease.version

    @endpoint(group="control")
    def finish(self, number: int) -> None:
        """End a lease well."""
        self.slots._end(self.leases.confirm(number), well=True)

    @endpoint(group="control")
    def advance(self, version: int) -> None:
        self.slots._advance(version)

    @endpoint(group="control")
    def release(self, count: int) -> None:
        """Free slots of finished work."""
        self.slots._release(count)


class Slots:
    """Grants permission to begin work that will not be too stale when it is trained; a handle that any actor may hold.

    Outside the process that opened it, it has only `lease`, `advance` and `release`.
    """

    def __init__(self, front: Any, own: SlotAccount | None = None) -> None:
        self._front = front
        self._own = own  # only in the process of the owner
        self._granted: dict[SlotLease, trio.Event] = {}
        self._is_closed = False
        self._count_stored: Callable[[], int] | None = None  # of a linked buffer, whose items use slots
        self._on_version: Callable[[int], None] | None = None  # called before slots are granted for a version

    def lease(self, group: int = 1) -> AbstractAsyncContextManager[Lease]:
        """Wait until work that begins now can still be used, and hold its slots: `async with slots.lease() as lease:`.

        Leases are granted first come, first served, each when all its slots are free. If the body ends well, its work
        is handed on, and the slots stay in use until the work is trained. If the body raises or is cancelled, or its
        process dies, the slots are free again.

        Args:
            group: Number of slots, for work that begins and ends as one: the answers to one prompt (GRPO).

        Raises:
            ValueError: `group` is below 1, or more than there are slots.
            MeshStopped: The block of the slots is being left.

        Blocking: entering waits, cancellable; a deadline of the caller counts.
        """
        return in_trio_block(self._lease(group))

    async def advance(self, *, version: int) -> None:
        """Advance to a version, once the generators have it; this frees the slots of trained work.

        Without a linked buffer each new version frees the slots of one batch; with one, the slots of items taken from
        it. The same version again changes nothing.

        Raises:
            ValueError: It is below the current one.

        Blocking: a checkpoint.
        """
        await change(None if self._own is None else self._advance, self._front.advance.call_one, version)

    async def release(self, count: int) -> None:
        """Free slots of work that was handed on and will not be trained; a linked buffer does so by itself.

        Raises:
            ValueError: `count` is more than the slots of finished work.

        Blocking: a checkpoint.
        """
        await change(None if self._own is None else self._release, self._front.release.call_one, count)

    def statistics(self) -> SlotStatistics:
        """Return the state, in numbers of slots.

        Raises:
            RuntimeError: This is not the process that owns the slots.
        """
        one = self._account
        return SlotStatistics(
            one.version, one.capacity, one.in_use, one.waiting,
            one.begun, one.running, one.returned, one.handed_on, one.lost,
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Return the state, numbers only, for `load_state_dict`. Save it together with the buffer of the work."""
        return self._account.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state, before the first lease: finished work counts as before, leases held then are `lost`.

        Raises:
            ValueError: Leases were granted already, or wait.
        """
        self._account.load(state)

    def __repr__(self) -> str:
        return "<slots>" if self._own is None else f"<slots at version {self._own.version}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return Slots, (self._front,)

    @asynccontextmanager
    async def _lease(self, group: int) -> AsyncGenerator[Lease, None]:
        if self._own is None:
            async with held(self._front.hold.stream(group), self._front.finish.call_one) as version:
                yield Lease(version, group)
            return
        lease = await self._acquire(group)
        assert lease.version is not None
        try:
            yield Lease(lease.version, group)
        except BaseException:
            self._end(lease, well=False)
            raise
        self._end(lease, well=True)

    # ---- in the process of the owner -------------------------------------------------------------------------

    @property
    def _account(self) -> SlotAccount:
        if self._own is None:
            raise RuntimeError(
                "statistics, state_dict and load_state_dict can only be called in the process that opened the slots; "
                "in this process the handle has lease, advance and release"
            )
        return self._own

    async def _acquire(self, group: int) -> SlotLease:
        """Wait for slots, and hold them until `_end`."""
        account = self._account
        if not 1 <= group <= account.capacity:
            raise ValueError(f"a lease must be of 1 to {account.capacity} slots (batch * (staleness + 1)), got {group}")
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._is_closed:
            raise MeshStopped(_CLOSED)
        lease = account.ask(group)
        event = self._granted[lease] = trio.Event()
        self._pump()
        try:
            await event.wait()
            if lease.version is None:
                raise MeshStopped(_CLOSED)
        except BaseException:
            if lease.version is None:
                del self._granted[lease]
                account.withdraw(lease)
                self._pump()
            else:
                self._end(lease, well=False)
            raise
        return lease

    def _end(self, lease: SlotLease, *, well: bool) -> None:
        self._account.end(lease, well=well)
        self._pump()

    def _advance(self, version: int) -> None:
        if self._account.advance(version) and self._on_version is not None:
            self._on_version(version)
        self._pump()

    def _release(self, count: int) -> None:
        self._account.release(count)
        self._pump()

    def _pump(self) -> None:
        """Grant all leases that can be granted."""
        if self._count_stored is not None:
            self._account.stored = self._count_stored()
        for lease in self._account.grant():
            self._granted.pop(lease).set()

    def _close(self) -> None:
        """Refuse new and waiting leases."""
        self._is_closed = True
        for event in self._granted.values():
            event.set()


def open_slots(*, batch: int, staleness: int, version: int = 0) -> AbstractAsyncContextManager[Slots]:
    """Bound the staleness of work when it is trained: `async with service.open_slots(batch=64, staleness=2) as slots:`.

    At most `batch * (staleness + 1)` slots are in use: by running work, and by finished work that is not trained yet.

    Args:
        batch: Number of slots whose work one version trains.
        staleness: Greatest number of versions between the begin of work and its training.
        version: The first version.

    Raises:
        ValueError: A number is out of its bounds.
    """
    batch, staleness, version = plain_whole(batch), plain_whole(staleness), plain_whole(version)
    if batch < 1 or staleness < 0:
        raise ValueError(f"slots need batch >= 1 and staleness >= 0, got batch={batch}, staleness={staleness}")
    return in_trio_block(_open(SlotAccount(batch, staleness, version)))


@asynccontextmanager
async def _open(account: SlotAccount) -> AsyncGenerator[Slots, None]:
    slots = Slots(None, account)
    async with this_proc().spawn("slots", SlotsFront, hand_over(slots)) as front:
        slots._front = front
        try:
            yield slots
        finally:
            slots._close()


_CLOSED = "the block of these slots is being left or has ended: lease slots only inside `async with open_slots(...)`"
