"""A publication as one process reads it: what is the latest version, which are pinned here.

RE-1 Each process has one cell for each slot; tasks that pin the same version share it, the last one clears it.
RE-2 A cell is cleared whatever becomes of the task that wrote it, also when it is cancelled while writing. What could
     not be cleared in time stays, and the next pin of that slot replaces it.
RE-3 The publisher may count this process as ended, which is not told to it. So after a copy its row is looked at, and
     what was copied is whole only if the pin is still there (BO-3).
RE-4 Nothing that can be had now waits for the publisher's Python: the row is taken on the board (BO-4), versions are
     looked up there. To be told of later ones it asks, which only who waits for one waits for.
RE-5 A pinned version is kept: its memory is mapped, where that is of this host, and so is the board. When the publisher
     has ended, what was pinned is read there, and the board says whether it is whole (BO-5).
"""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import attrs
import trio

from trimesh import limits
from trimesh._runtime.peers import Parcel
from trimesh._runtime.services import Granted
from trimesh._transport.interface import Right
from trimesh._wire import messages
from trimesh.errors import LimitExceeded, LinkLost, MeshStopped, ProcDied, set_origin
from trimesh.ids import ProcId
from trimesh.rdma.buffers.buffer import RDMABuffer, buffer_by
from trimesh.rdma.memory.handle import Handle, with_exported
from trimesh.rdma.publications import board
from trimesh.rdma.publications import board as board_words
from trimesh.rdma.publications.board import (
    HEAD_BYTES,
    ROW_BYTES,
    Head,
    Slot,
    TensorEntry,
    describe,
    read_head,
    read_layout,
)

if TYPE_CHECKING:
    from trimesh._runtime.life import Proc


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
        kept: Lets go of its memory, which outlives the publisher until then.
    """

    version: int
    index: int
    users: int = 0
    is_settled: trio.Event = attrs.field(factory=trio.Event)
    slot: Slot | None = None
    kept: ExitStack = attrs.field(factory=ExitStack)


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
    _taking: trio.Lock = attrs.field(factory=trio.Lock)
    _has_asked: bool = False
    _kept_board: memoryview | None = None
    _news: trio.Event = attrs.field(factory=trio.Event)
    _pins: dict[int, Pin] = attrs.field(factory=dict[int, Pin])
    _locks: list[trio.Lock] = attrs.field(factory=lambda: [trio.Lock() for _ in range(limits.PUBLISHED_SLOTS_MAX)])
    """One for each cell: it is written and cleared by one task at a time."""

    @property
    def owner(self) -> ProcId:
        """The process that publishes."""
        return ProcId(self.board.handle.granted.home.epoch)

    # ---- news ------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Learn that there is news, or that the publisher has ended: who waits looks again."""
        self._news.set()
        self._news = trio.Event()

    async def _ask(self) -> bool:
        """Ask to be told of versions, once; return whether that was done only now."""
        if self._has_asked:
            return False
        assert self.proc.family is not None, "a process that reaches others has a family"
        peer = self.proc.peer(self.owner)
        await self.proc.family.connect([peer])
        peer.send(Parcel(messages.encode(messages.Subscribe(self.number))))
        self._has_asked = True
        return True

    async def row(self) -> int:
        """Return the number of the row of this process on the board; take one first (BO-4).

        Raises:
            trio.ClosedResourceError: The publication is closed.
            LimitExceeded: It has `limits.PUBLISHED_READERS_MAX` readers.
        """
        async with self._taking:
            while self._reader is None:
                await self._take_row()
        return self._reader

    async def _take_row(self) -> None:
        me, rows = self.proc.proc_id, bytearray(board_words.ROWS_BYTES)
        if (await self.head()).is_closed:
            raise trio.ClosedResourceError("this publication is closed")
        await self.board[HEAD_BYTES:].read_into(rows)
        readers = board_words.readers_of(rows)
        wanted = me if me in readers else 0  # it is there if this process has read this publication before
        for row in [row for row, reader in enumerate(readers) if reader == wanted]:
            at = board_words.offset_of_row(row)
            if await self.board.compare_and_swap(0, me, at) not in (0, me):
                continue  # another one was faster
            data = bytearray(board_words.WORD)
            await self.board[at + board_words.WORD : at + 2 * board_words.WORD].read_into(data)
            lease = int.from_bytes(data, "little")
            await self.board[at : at + board_words.WORD].read_into(data)
            if int.from_bytes(data, "little") == me:
                self._reader, self._lease = row, lease
                self.proc.serve(self._ask)  # no task waits for that; the publisher says when it closes
            return
        self.forget()
        raise LimitExceeded("PUBLISHED_READERS_MAX", limits.PUBLISHED_READERS_MAX + 1)

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
        await self.row()  # before the board is looked at: whoever publishes looks for readers after
        while True:
            news = self._news  # looked at before the board: whoever publishes tells after
            head = await self.head()
            if head.latest > version:
                return head.latest
            if head.is_last:
                raise trio.ClosedResourceError(f"this publication is closed: version {head.latest} was its last")
            if not await self._ask():
                await news.wait()

    # ---- pins ------------------------------------------------------------------------------------------------

    async def pin(self, version: int) -> Pin:
        """Keep a version from being overwritten until `unpin`.

        Raises:
            VersionGone: It is not there any more.
        """
        reader = await self.row()
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
                        self._keep(pin, slot)
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

    def _keep(self, pin: Pin, slot: Slot) -> None:
        """Have a version, and the board, outlive the publisher in this process (RE-5)."""
        bulk = self.proc.bulk
        if self._kept_board is None:
            self._kept_board = bulk.keep(self.board.handle.granted, board_words.BOARD_BYTES)
        granted = self.handle_of(slot).granted
        view = bulk.keep(granted, slot.nbytes)
        if view is not None:
            pin.kept.enter_context(bulk.kept.holding(granted, view))

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
        pin.kept.close()
        if not self._pins:
            self._kept_board = None
        assert self._reader is not None, "who has pinned a version has cells"
        with trio.CancelScope(shield=True):
            async with self._locks[pin.index]:
                await self._clear(board_words.offset_of_cell(self._reader, pin.index), pin.version)

    async def check(self, pin: Pin) -> None:
        """Look whether a pin still holds: whether what was copied before is whole (RE-3).

        Raises:
            LinkLost: The publisher has counted this process as ended.
            ProcDied, MeshStopped: It has ended, and had closed the publication, or its memory is not mapped here.
        """
        assert self._reader is not None, "who has pinned a version has cells"
        row: bytes | bytearray = bytearray(ROW_BYTES)
        at = board_words.offset_of_row(self._reader)
        try:
            await self.board[at : at + ROW_BYTES].read_into(row)
        except (ProcDied, MeshStopped):
            kept = self._kept_board
            if kept is None or not board_words.held_to_the_end(kept, self.number):
                raise
            row = bytes(kept[at : at + ROW_BYTES])  # RE-5; an error that is kept would keep the mapping of a view
            del kept
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
                    return  # the cell is not looked at any more
                except Exception:  # noqa: BLE001 - it may be over in a moment
                    await trio.sleep(limits.UNPIN_RETRY_SECONDS)
            # Without a link, this is dropped: the publisher looks at the cells when it is asked, which comes later.
            self.proc.peer(self.owner).send(Parcel(messages.encode(messages.Unpinned(self.number))))

    def handle_of(self, slot: Slot) -> Handle:
        whole = self.board.handle.granted
        return Handle(Granted(whole.home, slot.grant, slot.block, whole.origin), 0, 0, slot.nbytes, Right.READ)


def _gone(version: int) -> str:
    return f"version {version} is not there any more: pin() takes the latest, wait_newer() waits for the next"


# ---- one version of a publication, while it is pinned ----------------------------------------------------------------


@attrs.define(eq=False)
class Snapshot:
    """A version that is pinned: what it holds, and how to get it. Of no use after its block.

    Attributes:
        version: Its number.
        entries: What it holds, by name: kind, dtype, shape.
        is_lent: Whether a handle on part of it was handed out, which may have read by that.
    """

    version: int
    entries: Mapping[str, TensorEntry]
    _handle: Handle = attrs.field(repr=False)
    _check: Callable[[], Awaitable[None]] = attrs.field(repr=False)
    """Raises if it is not pinned any more: what was copied until now may be torn."""
    is_lent: bool = attrs.field(default=False, repr=False)

    def buffer(self, name: str) -> RDMABuffer:
        """Return a read-only handle on one tensor, to read parts of it or to map it.

        Raises:
            KeyError: There is none of that name.
        """
        made = self._buffer(name)
        self.is_lent = True
        return made

    def whole(self) -> RDMABuffer:
        """Return a read-only handle on all of it, where each tensor lies at the offset of its entry."""
        self.is_lent = True
        return buffer_by(self._handle)

    @property
    def host(self) -> int:
        """Which host it lies on, as a number."""
        return self._handle.granted.home.host

    def _buffer(self, name: str) -> RDMABuffer:
        entry = self.entry(name)
        return buffer_by(self._handle.part(entry.offset, entry.offset + entry.nbytes))

    async def read_into(self, tensors: Mapping[str, Any]) -> None:
        """Copy published tensors into those of this process that have the same names: a state dict.

        They are copied one after the other, and other tasks run meanwhile: whoever computes with `tensors` then gets
        some of the new version and some of the old one. For a model that is in use there is `Published.follow`.

        Args:
            tensors: Some names or all; each as it was published: of its kind of elements and its shape.

        Raises:
            KeyError, TypeError, ValueError: One of them does not fit; nothing was copied.
            ProcDied, MeshStopped, trio.ClosedResourceError, LinkLost, Unresponsive: As `RDMABuffer.read_into`.

        Blocking: a checkpoint, cancellable.
        """
        for name, data in tensors.items():
            entry = self.entry(name)
            came = describe(data)
            if (came[1], came[2]) != (entry.dtype, entry.shape) and entry.kind != "bytes":
                is_now = f"{came[1] or 'bytes'} of shape {came[2]}"
                raise ValueError(f"{name!r} must be as it was published, {entry.describe()}, got {is_now}")
            self._buffer(name).check_read(data)
        for name, data in tensors.items():
            await self._buffer(name).read_into(data)
        await self._check()

    async def check(self) -> None:
        """Raise if what was read by `buffer` until now may be torn; the end of the block of the pin does it, too."""
        await self._check()

    async def read(self) -> dict[str, Any]:
        """Return a copy of everything, of the kinds that were published; bytes as bytearrays.

        Raises and blocks as `read_into`.
        """
        made = {name: _empty(entry) for name, entry in self.entries.items()}
        await self.read_into(made)
        return made

    def entry(self, name: str) -> TensorEntry:
        """Return what a tensor was published as: kind, dtype, shape.

        Raises:
            KeyError: There is none of that name.
        """
        found = self.entries.get(name)
        if found is None:
            some = ", ".join(sorted(self.entries)[:3])
            raise KeyError(f"version {self.version} has no tensor {name!r}; it has {len(self.entries)}: {some}, ...")
        return found


async def snapshot_of(version: int, slot: board.Slot, handle: Handle, check: Callable[[], Awaitable[None]]) -> Snapshot:
    """Return a version whose slot is pinned, as long as `check` does not raise."""
    data = bytearray(slot.layout_nbytes + slot.exported_nbytes)
    await buffer_by(handle.part(0, len(data))).read_into(data)
    await check()
    whole = with_exported(handle, bytes(data[slot.layout_nbytes :]))
    return Snapshot(version, read_layout(data[: slot.layout_nbytes], slot.nbytes), whole, check)


def _empty(entry: TensorEntry) -> Any:
    if entry.kind == "torch":
        torch = importlib.import_module("torch")
        return torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    if entry.kind == "numpy":
        return importlib.import_module("numpy").empty(entry.shape, entry.dtype)
    return bytearray(entry.nbytes)
