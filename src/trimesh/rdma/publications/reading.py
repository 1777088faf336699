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
RE-6 To pin takes three transfers: the cell is written by what the board said last, the layout is copied, of a small
     version all, and the board is looked at. If that finds version and pin, what was copied is whole (BO-2, BO-3); if
     not, the reader has learnt what is there now, and pins that, or gives up.
"""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import trio

from trimesh import limits
from trimesh._runtime.peers import Parcel
from trimesh._runtime.services import Granted
from trimesh._runtime.tasks import in_trio
from trimesh._transport.interface import Right, Span, Transfer, TransferKind
from trimesh._wire import messages
from trimesh._wire.memory import memory_at
from trimesh.errors import LimitExceeded, LinkLost, MeshStopped, ProcDied, set_origin
from trimesh.ids import ProcId
from trimesh.rdma.buffers.buffer import RDMABuffer, buffer_by, destination_of
from trimesh.rdma.memory.handle import Handle, with_exported
from trimesh.rdma.memory.local import Memory, address_of, memory_of
from trimesh.rdma.publications import board
from trimesh.rdma.publications.board import Head, Slot, TensorEntry, describe, read_head, read_layout

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
        copied: Its beginning: the layout, and all of a small version.
        kept: Lets go of its memory, which outlives the publisher until then.
    """

    version: int
    index: int
    users: int = 0
    is_settled: trio.Event = attrs.field(factory=trio.Event)
    slot: Slot | None = None
    copied: bytearray = attrs.field(factory=bytearray)
    kept: ExitStack = attrs.field(factory=ExitStack)


@attrs.define(eq=False)
class Reading:
    """One publication, in one process that reads it.

    Attributes:
        proc: The process.
        number: Of the publication, in its own process.
        granted: Its board.
        forget: Called when it is of no use any more, as often as that is found; who reads later begins anew.
    """

    proc: Proc
    number: int
    granted: Granted
    forget: Callable[[], object]
    _reader: int | None = None
    _lease: int = 0
    _head: Head | None = None
    """As the board was last; None once there is news."""
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
        return ProcId(self.granted.home.epoch)

    # ---- news ------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Learn that there is news, or that the publisher has ended: who waits looks again."""
        self._head = None
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
        if self._reader is None:
            async with self._taking:
                while self._reader is None:
                    await self._take_row()
        return self._reader

    async def _take_row(self) -> None:
        me, words = self.proc.proc_id, await self._read_board(board.BOARD_BYTES)
        if read_head(words).is_closed:
            raise trio.ClosedResourceError("this publication is closed")
        readers = board.readers_of(memoryview(words)[board.HEAD_BYTES :])
        wanted = me if me in readers else 0  # it is there if this process has read this publication before
        for row in [row for row, reader in enumerate(readers) if reader == wanted]:
            if await self._swap(board.offset_of_row(row), 0, me) not in (0, me):
                continue  # another one was faster
            lease = board.given_lease((await self._look(row))[1])
            if board.readers_of((await self._look(row))[1]) == [me]:
                self._reader, self._lease = row, lease
                self.proc.serve(self._ask)  # no task waits for that; the publisher says when it closes
            return
        self.forget()
        raise LimitExceeded("PUBLISHED_READERS_MAX", limits.PUBLISHED_READERS_MAX + 1)

    async def _look(self, reader: int) -> tuple[Head, memoryview]:
        """Read the board, in one transfer, from its header to the row of a reader; return head and row."""
        at = board.offset_of_row(reader)
        words = await self._read_board(at + board.ROW_BYTES)
        self._head = head = read_head(words)
        return head, memoryview(words)[at:]

    async def _read_board(self, nbytes: int) -> bytearray:
        try:
            return await self._read(self.granted, 0, nbytes)
        except trio.ClosedResourceError:
            self.forget()
            raise

    async def _read(self, granted: Granted, at: int, nbytes: int) -> bytearray:
        """Read some granted memory, in one transfer."""
        data = bytearray(nbytes)
        view = memoryview(data)
        local = Span(address_of(view), nbytes, view)
        await self.proc.bulk.move(granted, Transfer(TransferKind.READ, granted.grant, at, local))
        return data

    async def _swap(self, at: int, expected: int, new: int) -> int:
        """Put a word for another one on the board; return what was there."""
        swap = Transfer(TransferKind.SWAP, self.granted.grant, at, Span(0, board.WORD), new, expected)
        return (await self.proc.bulk.move(self.granted, swap)).value

    async def wait_newer(self, version: int) -> Head:
        """Wait until there is a version above `version`; return what the board says then."""
        reader = await self.row()  # before the board is looked at: whoever publishes looks for readers after
        while True:
            news = self._news  # looked at before the board: whoever publishes tells after
            head, _ = await self._look(reader)
            if head.latest > version:
                return head
            if head.is_last:
                raise trio.ClosedResourceError(f"this publication is closed: version {head.latest} was its last")
            if not await self._ask():
                await news.wait()

    # ---- pins ------------------------------------------------------------------------------------------------

    async def pin(self, version: int | None) -> Pin:
        """Keep a version, by default the latest, from being overwritten until `unpin`.

        Raises:
            VersionGone: `version` is not there any more.
        """
        reader = await self.row()
        while True:
            head = self._head
            if version is None:
                if head is None or head.find(head.latest) is None or head.latest in self._pins:
                    head = await self.wait_newer(0)  # who shares a pin has seen that there is nothing newer
                wanted = head.latest
            else:
                wanted = version
                if wanted not in self._pins and (head is None or head.find(wanted) is None):
                    head, _ = await self._look(reader)
            pin = self._pins.get(wanted)
            if pin is not None:
                await self._share(pin)
            elif head is not None and (index := head.find(wanted)) is not None:
                pin = Pin(wanted, index)
                await self._pin_first(pin, head.slots[index], reader)
            if pin is None or pin.slot is None:
                if version is not None:
                    text = "pin() takes the latest, wait_newer() waits for the next"
                    raise VersionGone(f"version {version} is not there any more: {text}")
            elif version is not None or (self._head is not None and self._head.latest == wanted):
                return pin
            else:
                await self.unpin(pin)

    async def _share(self, pin: Pin) -> None:
        """Wait until another task has made a pin, and see that it holds."""
        pin.users += 1
        try:
            await pin.is_settled.wait()
            if pin.slot is not None:
                await self.check(pin)
        except BaseException:
            await self.unpin(pin)
            raise

    async def _pin_first(self, pin: Pin, slot: Slot, reader: int) -> None:
        """Write the cell of a pin, copy what lies in its slot, and look whether that is still there (RE-6)."""
        self._pins[pin.version] = pin
        pin.users += 1
        try:
            await self._enter_cell(pin)
            try:
                await self._try_slot(pin, slot, reader)
            finally:
                self._locks[pin.index].release()
        finally:
            if pin.slot is None:
                del self._pins[pin.version]
            pin.is_settled.set()

    async def _enter_cell(self, pin: Pin) -> None:
        """Wait until no other task writes or clears the cell of a pin, and be the one that does."""
        lock = self._locks[pin.index]
        if lock.locked():
            await lock.acquire()
        else:
            lock.acquire_nowait()

    async def _try_slot(self, pin: Pin, slot: Slot, reader: int) -> None:
        for other in self._pins.values():
            if other.index == pin.index and other.slot is not None:
                await self._look(reader)  # another task has pinned what lies there now
                return
        cell, granted = board.offset_of_cell(reader, pin.index), self.handle_of(slot).granted
        is_small = slot.nbytes <= limits.PUBLISHED_COPY_BYTES_MAX
        nbytes = slot.nbytes if is_small else slot.layout_nbytes + slot.exported_nbytes
        try:
            await self._write_cell(cell, pin.version)
            try:
                pin.copied = await self._read(granted, 0, nbytes)
            except (trio.ClosedResourceError, PermissionError):
                if (await self._look(reader))[0].slots[pin.index] == slot:
                    raise
                return  # its memory was given back
            head, row = await self._look(reader)
            if head.slots[pin.index] == slot:
                self._check_row(row, pin)
                pin.slot = slot
                self._keep(pin, granted, slot.nbytes)
        finally:
            if pin.slot is None:
                await self._clear(cell, pin.version)  # RE-2

    def _keep(self, pin: Pin, granted: Granted, nbytes: int) -> None:
        """Have a version, and the board, outlive the publisher in this process (RE-5)."""
        bulk = self.proc.bulk
        if self._kept_board is None:
            self._kept_board = bulk.keep(self.granted, board.BOARD_BYTES)
        view = bulk.keep(granted, nbytes)
        if view is not None:
            pin.kept.enter_context(bulk.kept.holding(granted, view))

    async def _write_cell(self, cell: int, version: int) -> None:
        """Write a pin, in place of what was left there by this process, or by one that had the row before."""
        word, expected = board.pin_word(self._lease, version), 0
        while (left := await self._swap(cell, expected, word)) != expected:
            if board.lease_of(left) > self._lease:
                return  # the row is another one's now, as the look at it will show
            expected = left

    async def unpin(self, pin: Pin) -> None:
        """Let go of a version; the last one in this process clears the cell."""
        pin.users -= 1
        if pin.users or self._pins.get(pin.version) is not pin or pin.slot is None:
            return
        del self._pins[pin.version]
        pin.kept.close()
        assert self._reader is not None, "who has pinned a version has cells"
        with trio.CancelScope(shield=True):
            await self._enter_cell(pin)
            try:
                await self._clear(board.offset_of_cell(self._reader, pin.index), pin.version)
            finally:
                self._locks[pin.index].release()

    async def check(self, pin: Pin) -> None:
        """Look whether a pin still holds: whether what was copied before is whole (RE-3).

        Raises:
            LinkLost: The publisher has counted this process as ended.
            ProcDied, MeshStopped: It has ended, and had closed the publication, or its memory is not mapped here.
        """
        assert self._reader is not None, "who has pinned a version has cells"
        at = board.offset_of_row(self._reader)
        try:
            row: bytes | bytearray = await self._read(self.granted, at, board.ROW_BYTES)
        except (ProcDied, MeshStopped):
            kept = self._kept_board
            if kept is None or not board.held_to_the_end(kept, self.number):
                raise
            row = bytes(kept[at : at + board.ROW_BYTES])  # RE-5; an error that is kept would keep the mapping of a view
            del kept
        self._check_row(row, pin)

    def _check_row(self, row: bytes | bytearray | memoryview, pin: Pin) -> None:
        if not board.holds(row, self._lease, pin.index, pin.version):
            error = LinkLost(
                f"version {pin.version} is not pinned any more, what was read of it may be torn: the process that "
                "publishes counts this one as ended, for the link between them was lost"
            )
            set_origin(error, self.granted.origin)
            raise error

    async def _clear(self, cell: int, version: int) -> None:
        """Clear a cell and tell the publisher; no more than a moment, and nothing is raised that it means."""
        with trio.move_on_after(limits.UNPIN_SECONDS, shield=True):
            while True:
                try:
                    await self._swap(cell, board.pin_word(self._lease, version), 0)
                    break
                except (ProcDied, MeshStopped, trio.ClosedResourceError):
                    return  # the cell is not looked at any more
                except Exception:  # noqa: BLE001 - it may be over in a moment
                    await trio.sleep(limits.UNPIN_RETRY_SECONDS)
            # Without a link, this is dropped: the publisher looks at the cells when it is asked, which comes later.
            self.proc.peer(self.owner).send(Parcel(messages.encode(messages.Unpinned(self.number))))

    def handle_of(self, slot: Slot) -> Handle:
        whole = self.granted
        return Handle(Granted(whole.home, slot.grant, slot.block, whole.origin), 0, 0, slot.nbytes, Right.READ)


# ---- one version of a publication, while it is pinned ----------------------------------------------------------------

Wanted = tuple[TensorEntry, Memory]
"""A tensor of a version, and where it is copied to."""


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
    _copied: memoryview | None = attrs.field(default=None, repr=False)
    """All of it, if it is small: whole, whatever becomes of the pin (RE-6)."""
    is_lent: bool = attrs.field(default=False, repr=False)

    def buffer(self, name: str) -> RDMABuffer:
        """Return a read-only handle on one tensor, to read parts of it or to map it.

        Raises:
            KeyError: There is none of that name.
        """
        entry = self.entry(name)
        self.is_lent = True
        return self._part(entry.offset, entry.nbytes)

    def whole(self) -> RDMABuffer:
        """Return a read-only handle on all of it, where each tensor lies at the offset of its entry."""
        self.is_lent = True
        return buffer_by(self._handle)

    @property
    def host(self) -> int:
        """Which host it lies on, as a number."""
        return self._handle.granted.home.host

    @trio.lowlevel.enable_ki_protection
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
        await in_trio(self._read_into)(tensors)

    async def _read_into(self, tensors: Mapping[str, Any]) -> None:
        wanted = list[Wanted]()
        for name, data in tensors.items():
            entry = self.entry(name)
            came = describe(data)
            if (came[1], came[2]) != (entry.dtype, entry.shape) and entry.kind != "bytes":
                is_now = f"{came[1] or 'bytes'} of shape {came[2]}"
                raise ValueError(f"{name!r} must be as it was published, {entry.describe()}, got {is_now}")
            wanted.append((entry, destination_of(data, entry.nbytes)))
        await self._copy(wanted)

    async def _copy(self, wanted: list[Wanted]) -> None:
        """Copy tensors, small neighbours in one transfer; then look whether what was copied is whole (RE-3)."""
        if self._copied is not None:
            wanted = _scatter(self._copied, 0, wanted)
            if not wanted:
                await trio.lowlevel.checkpoint()
                return
        for near in _neighbours(wanted):
            start, stop = near[0][0].offset, max(entry.offset + entry.nbytes for entry, _ in near)
            part = self._part(start, stop - start)
            if len(near) == 1:
                await part.move(TransferKind.READ, near[0][1])
                continue
            data = bytearray(part.nbytes)
            await part.move(TransferKind.READ, memory_of(data, "a copy of tensors"))
            _scatter(memoryview(data), start, near)
        await self._check()

    def _part(self, start: int, nbytes: int) -> RDMABuffer:
        return buffer_by(self._handle.part(start, start + nbytes))

    @trio.lowlevel.enable_ki_protection
    async def check(self) -> None:
        """Raise if what was read by `buffer` until now may be torn; the end of the block of the pin does it, too."""
        await in_trio(self._check)()

    @trio.lowlevel.enable_ki_protection
    async def read(self) -> dict[str, Any]:
        """Return a copy of everything, of the kinds that were published; bytes as bytearrays.

        Raises and blocks as `read_into`.
        """
        made = {name: _empty(entry) for name, entry in self.entries.items()}
        await in_trio(self._copy)([(entry, memory_of(made[name], name)) for name, entry in self.entries.items()])
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


def snapshot_of(reading: Reading, pin: Pin) -> Snapshot:
    """Return a version that is pinned."""
    slot, copied = pin.slot, pin.copied
    assert slot is not None, "a pin that has been given has its slot"
    layout_end, exported_end = slot.layout_nbytes, slot.layout_nbytes + slot.exported_nbytes
    entries = read_layout(copied[:layout_end], slot.nbytes)
    handle = with_exported(reading.handle_of(slot), bytes(copied[layout_end:exported_end]))
    whole = memoryview(copied) if len(copied) == slot.nbytes else None
    return Snapshot(pin.version, entries, handle, partial(reading.check, pin), whole)


def _neighbours(wanted: list[Wanted]) -> list[list[Wanted]]:
    """Group tensors that lie within `limits.PUBLISHED_COPY_BYTES_MAX`; larger ones, and those of devices, are alone."""
    groups = list[list[Wanted]]()
    end_max = 0
    for entry, memory in sorted(wanted, key=lambda one: one[0].offset):
        if entry.offset + entry.nbytes <= end_max and memory.tensor is None:
            groups[-1].append((entry, memory))
        else:
            groups.append([(entry, memory)])
            end_max = 0 if memory.tensor is not None else entry.offset + limits.PUBLISHED_COPY_BYTES_MAX
    return groups


def _scatter(data: memoryview, start: int, wanted: list[Wanted]) -> list[Wanted]:
    """Copy tensors out of memory that begins at an offset of their version; return those that go to a device."""
    left = list[Wanted]()
    for entry, memory in wanted:
        at = entry.offset - start
        if memory.tensor is None:
            memory_at(memory.span.address, entry.nbytes, None)[:] = data[at : at + entry.nbytes]
        else:
            left.append((entry, memory))
    return left


def _empty(entry: TensorEntry) -> Any:
    if entry.kind == "torch":
        torch = importlib.import_module("torch")
        return torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    if entry.kind == "numpy":
        return importlib.import_module("numpy").empty(entry.shape, entry.dtype)
    return bytearray(entry.nbytes)
