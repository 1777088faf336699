"""A publication as one process reads it: what is the latest version, which are pinned here.

RE-1 Each process has one cell for each slot; tasks that pin the same version share it, the last one clears it.
RE-2 A cell is cleared whatever becomes of the task that wrote it, also when it is cancelled while writing. What could
     not be cleared in time stays, and the next pin of that slot replaces it.
RE-3 The publisher may count this process as ended, which is not told to it. So after a copy its row is looked at, and
     what was copied is whole only if the pin is still there (BO-3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs
import trio

from trimesh import limits
from trimesh._runtime.bulk import Granted
from trimesh._runtime.peer import Parcel
from trimesh._transport.mover import Right
from trimesh._wire import messages
from trimesh.errors import LimitExceeded, LinkLost, MeshStopped, ProcDied, set_origin
from trimesh.ids import ProcId
from trimesh.rdma import board as board_words
from trimesh.rdma.board import HEAD_BYTES, ROW_BYTES, Head, Slot, read_head
from trimesh.rdma.buffer import RDMABuffer
from trimesh.rdma.handle import Handle

if TYPE_CHECKING:
    from trimesh._runtime.proc import Proc


class VersionGone(LookupError):
    """A version is not there any more: its memory holds a newer one, or will."""


@attrs.define(eq=False)
class Pin:
    """A version that is pinned in this process, or about to be.

    Attributes:
        version: Its number.
        index: Of its slot.
        users: How many tasks have it pinned.
        is_settled: Set when it is pinned, or cannot be.
        slot: What lies there; None when it cannot be pinned.
    """

    version: int
    index: int
    users: int = 0
    is_settled: trio.Event = attrs.field(factory=trio.Event)
    slot: Slot | None = None


@attrs.define(eq=False)
class Reading:
    """One publication, in one process that reads it.

    Attributes:
        proc: The process.
        number: Of the publication, in its own process.
        board: Its board.
        forget: Called when it is of no use any more, as often as that is found; who reads later begins anew.
    """

    proc: Proc
    number: int
    board: RDMABuffer
    forget: Callable[[], object]
    _reader: int | None = None
    _lease: int = 0
    _is_asking: bool = False
    _answered: trio.Event = attrs.field(factory=trio.Event)
    _news: trio.Event = attrs.field(factory=trio.Event)
    _pins: dict[int, Pin] = attrs.field(factory=dict[int, Pin])
    _locks: list[trio.Lock] = attrs.field(factory=lambda: [trio.Lock() for _ in range(limits.PUBLISHED_SLOTS_MAX)])
    """One for each cell: it is written and cleared by one task at a time."""

    @property
    def owner(self) -> ProcId:
        """The process that publishes."""
        return ProcId(self.board.handle.granted.home.epoch)

    # ---- news ------------------------------------------------------------------------------------------------

    def subscribed(self, reader: int, lease: int) -> None:
        """Take the answer of the publisher."""
        self._reader, self._lease = reader, lease
        if reader < 0:
            self.forget()
        self._answered.set()

    def wake(self) -> None:
        """Learn that there is news, or that the publisher has ended: who waits looks again."""
        self._news.set()
        self._news = trio.Event()
        if self._reader is None:
            self._answered.set()
            self._answered = trio.Event()

    async def subscribe(self) -> int:
        """Ask for cells and news, once; return the number of the cells.

        Raises:
            trio.ClosedResourceError: The publication is closed.
            LimitExceeded: It has `limits.PUBLISHED_READERS_MAX` readers.
        """
        while self._reader is None:
            answered = self._answered
            if not self._is_asking:
                self._is_asking = True
                peer = self.proc.peer(self.owner)
                assert self.proc.family is not None, "a process that reaches others has a family"
                try:
                    await self.proc.family.connect([peer])
                    peer.send(Parcel(messages.encode(messages.Subscribe(self.number))))
                except BaseException:
                    self._is_asking = False
                    raise
            await self.head()  # raises if the publisher has ended, or its publication
            await answered.wait()
        if self._reader < 0:
            if (await self.head()).is_closed:
                raise trio.ClosedResourceError("this publication is closed")
            raise LimitExceeded("PUBLISHED_READERS_MAX", limits.PUBLISHED_READERS_MAX + 1)
        return self._reader

    async def head(self) -> Head:
        """Read header and slots of the board."""
        data = bytearray(HEAD_BYTES)
        try:
            await self.board[:HEAD_BYTES].read_into(data)
        except trio.ClosedResourceError:
            self.forget()
            raise
        return read_head(data)

    async def wait_newer(self, version: int) -> int:
        """Wait until there is a version above `version`, and return the latest."""
        await self.subscribe()
        while True:
            news = self._news  # looked at before the board: whoever publishes tells after
            head = await self.head()
            if head.latest > version:
                return head.latest
            if head.is_closed:
                raise trio.ClosedResourceError(f"this publication is closed: version {head.latest} was its last")
            await news.wait()

    # ---- pins ------------------------------------------------------------------------------------------------

    async def pin(self, version: int) -> Pin:
        """Keep a version from being overwritten until `unpin`.

        Raises:
            VersionGone: It is not there any more.
        """
        reader = await self.subscribe()
        pin = self._pins.get(version)
        if pin is None:
            index = (await self.head()).find(version)
            pin = self._pins.get(version)  # another task may have been faster
            if pin is None:
                if index is None:
                    raise VersionGone(_gone(version))
                return await self._pin_first(Pin(version, index), reader)
        pin.users += 1
        try:
            await pin.is_settled.wait()
        except BaseException:
            await self.unpin(pin)
            raise
        if pin.slot is None:
            raise VersionGone(_gone(version))
        return pin

    async def _pin_first(self, pin: Pin, reader: int) -> Pin:
        """Write the cell of a pin, and look whether the version is still there (BO-2)."""
        self._pins[pin.version] = pin
        pin.users += 1
        cell = board_words.offset_of_cell(reader, pin.index)
        try:
            async with self._locks[pin.index]:
                try:
                    await self._write_cell(cell, pin.version)
                    slot = (await self.head()).slots[pin.index]
                    if slot.version == pin.version:
                        pin.slot = slot
                finally:
                    if pin.slot is None:
                        await self._clear(cell, pin.version)  # RE-2
        finally:
            if pin.slot is None:
                del self._pins[pin.version]
            pin.is_settled.set()
        if pin.slot is None:
            raise VersionGone(_gone(pin.version))
        return pin

    async def _write_cell(self, cell: int, version: int) -> None:
        """Write a pin, in place of what was left there by this process, or by one that had the row before."""
        word, expected = board_words.pin_word(self._lease, version), 0
        while (left := await self.board.compare_and_swap(expected, word, cell)) != expected:
            if board_words.lease_of(left) > self._lease:
                return  # the row is another one's now: `check` will find that out
            expected = left

    async def unpin(self, pin: Pin) -> None:
        """Let go of a version; the last one in this process clears the cell."""
        pin.users -= 1
        if pin.users or self._pins.get(pin.version) is not pin or pin.slot is None:
            return
        del self._pins[pin.version]
        assert self._reader is not None, "who has pinned a version has cells"
        with trio.CancelScope(shield=True):
            async with self._locks[pin.index]:
                await self._clear(board_words.offset_of_cell(self._reader, pin.index), pin.version)

    async def check(self, pin: Pin) -> None:
        """Look whether a pin still holds: whether what was copied before is whole (RE-3).

        Raises:
            LinkLost: The publisher has counted this process as ended.
        """
        assert self._reader is not None, "who has pinned a version has cells"
        row = bytearray(ROW_BYTES)
        at = board_words.offset_of_row(self._reader)
        await self.board[at : at + ROW_BYTES].read_into(row)
        if not board_words.holds(row, self._lease, pin.index, pin.version):
            error = LinkLost(
                f"version {pin.version} is not pinned any more, what was read of it may be torn: the process that "
                "publishes counts this one as ended, for the link between them was lost"
            )
            set_origin(error, self.board.owner)
            raise error

    async def _clear(self, cell: int, version: int) -> None:
        """Clear a cell and tell the publisher; no more than a moment, and nothing is raised that it means."""
        with trio.move_on_after(limits.UNPIN_SECONDS, shield=True):
            while True:
                try:
                    await self.board.compare_and_swap(board_words.pin_word(self._lease, version), 0, cell)
                    break
                except (ProcDied, MeshStopped, trio.ClosedResourceError):
                    return  # nobody looks at the cell any more
                except Exception:  # noqa: BLE001 - it may be over in a moment
                    await trio.sleep(limits.UNPIN_RETRY_SECONDS)
            self.proc.peer(self.owner).send(Parcel(messages.encode(messages.Unpinned(self.number))))

    def handle_of(self, slot: Slot) -> Handle:
        """Return a handle on what lies in a slot."""
        whole = self.board.handle.granted
        return Handle(Granted(whole.home, slot.grant, slot.block, whole.origin), 0, 0, slot.nbytes, Right.READ)


def _gone(version: int) -> str:
    return f"version {version} is not there any more: pin() takes the latest, wait_newer() waits for the next"
