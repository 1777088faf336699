"""Reader's side of a publication in one process: its latest version, and the pins of this process.

RE-1 Each process has one cell for each slot; tasks that pin the same version share it, and the last one clears it.
RE-2 A cell is cleared however the task that wrote it ends, also when it is cancelled while writing. If that takes long,
     the task does not wait for it: a transfer fails, or other tasks have kept the loop from running. The process goes
     on trying, until it pins that slot again.
RE-3 The publisher may count this process as ended without telling it. So after a copy the reader checks its row: the
     copy is whole only if the pin is still there (BO-3).
RE-4 Reading existing versions never waits for the publisher's Python: the row is taken (BO-4) and versions are found on
     the board. To be notified of later ones it sends a request, and only a wait for a newer version waits for that.
RE-5 A pinned version is kept: its memory is mapped, where that is of this host, and so is the board. When the publisher
     has ended, pinned data is read there, and the board shows whether it is whole (BO-5).
RE-6 Pinning takes three transfers: the cell is written, by the last known state of the board; the layout, or a small
     version whole, is copied; the board is read. If version and pin are on it, the copy is whole (BO-2, BO-3). If not,
     the reader now knows the current versions, and pins one of them or gives up.
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
    """The version is gone: its memory holds a newer one, or is about to."""


@attrs.define(eq=False)
class Pin:
    """Pin of a version in this process, held or about to be.

    Attributes:
        version: Its number.
        index: Index of its slot.
        users: Number of tasks that share it.
        is_settled: Set when it is pinned, or cannot be.
        slot: The slot; None when it cannot be pinned.
        copied: Start of the version: the layout, and all of a small version.
        kept: Releases its memory, which outlives the publisher until then.
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
    """Reader of one publication in one process.

    Attributes:
        proc: The process.
        number: The owner's number for the publication.
        granted: Its board.
        forget: Called, possibly repeatedly, when this reader is no longer of use; later reads make a new one.
    """

    proc: Proc
    number: int
    granted: Granted
    forget: Callable[[], object]
    _reader: int | None = None
    _lease: int = 0
    _head: Head | None = None
    """Head of the board as last read; None once a newer version was announced."""
    _taking: trio.Lock = attrs.field(factory=trio.Lock)
    _has_asked: bool = False
    _kept_board: memoryview | None = None
    _news: trio.Event = attrs.field(factory=trio.Event)
    _pins: dict[int, Pin] = attrs.field(factory=dict[int, Pin])
    _locks: list[trio.Lock] = attrs.field(factory=lambda: [trio.Lock() for _ in range(limits.PUBLISHED_SLOTS_MAX)])
    """One per cell, which one task at a time writes and clears."""

    @property
    def owner(self) -> ProcId:
        """The process that publishes."""
        return ProcId(self.granted.home.epoch)

    # ---- news ------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Handle a new version, or the publisher's end: waiting tasks check again."""
        self._head = None
        self._news.set()
        self._news = trio.Event()

    async def _ask(self) -> bool:
        """Request notifications of versions, once; return False if they were requested before."""
        if self._has_asked:
            return False
        assert self.proc.family is not None, "a process that reaches others has a family"
        peer = self.proc.peer(self.owner)
        await self.proc.family.connect([peer])
        peer.send(Parcel(messages.encode(messages.Subscribe(self.number))))
        self._has_asked = True
        return True

    async def row(self) -> int:
        """Return this process's row on the board; take one first if it has none (BO-4).

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
        wanted = me if me in readers else 0  # this process has a row if it has read this publication before
        for row in [row for row, reader in enumerate(readers) if reader == wanted]:
            if await self._swap(board.offset_of_row(row), 0, me) not in (0, me):
                continue  # another reader was faster
            lease = board.given_lease((await self._look(row))[1])
            if board.readers_of((await self._look(row))[1]) == [me]:
                self._reader, self._lease = row, lease
                self.proc.serve(self._ask)  # no task waits for it; the publisher announces when it closes
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
        """Read a range of granted memory, in one transfer."""
        data = bytearray(nbytes)
        view = memoryview(data)
        local = Span(address_of(view), nbytes, view)
        await self.proc.bulk.move(granted, Transfer(TransferKind.READ, granted.grant, at, local))
        return data

    async def _swap(self, at: int, expected: int, new: int) -> int:
        """Compare and swap a word of the board; return its previous value."""
        swap = Transfer(TransferKind.SWAP, self.granted.grant, at, Span(0, board.WORD), new, expected)
        return (await self.proc.bulk.move(self.granted, swap)).value

    async def wait_newer(self, version: int) -> Head:
        """Wait for a version above `version`; return the head of the board."""
        reader = await self.row()  # before the board is read: a publisher looks for readers after it publishes
        while True:
            news = self._news  # taken before the board is read: a publisher notifies after it publishes
            head, _ = await self._look(reader)
            if head.latest > version:
                return head
            if head.is_last:
                raise trio.ClosedResourceError(f"this publication is closed: version {head.latest} was its last")
            if not await self._ask():
                await news.wait()

    # ---- pins ------------------------------------------------------------------------------------------------

    async def pin(self, version: int | None) -> Pin:
        """Pin a version, by default the latest, until `unpin`: it is not overwritten.

        Raises:
            VersionGone: `version` was overwritten.
        """
        reader = await self.row()
        while True:
            head = self._head
            if version is None:
                if head is None or head.find(head.latest) is None or head.latest in self._pins:
                    head = await self.wait_newer(0)  # a task that shares a pin has seen that there is nothing newer
                wanted = head.latest
            else:
                wanted = version
                if wanted not in self._pins and (head is None or head.find(wanted) is None):
                    head, _ = await self._look(reader)
            pin = self._pins.get(wanted)
            if pin is not None:
                await self._share(pin)
            else:
                assert head is not None, "the board is read before a version is pinned first"
                index = head.find(wanted)
                if index is not None:
                    pin = Pin(wanted, index)
                    await self._pin_first(pin, head.slots[index], reader)
            if pin is None or pin.slot is None:
                if version is not None:
                    text = "pin() takes the latest, wait_newer() waits for the next"
                    raise VersionGone(f"version {version} was overwritten, or never existed: {text}")
            elif version is not None or (self._head is not None and self._head.latest == wanted):
                return pin
            else:
                await self.unpin(pin)

    async def _share(self, pin: Pin) -> None:
        """Wait until another task has made a pin, and check that it holds."""
        pin.users += 1
        try:
            await pin.is_settled.wait()
            if pin.slot is not None:
                await self.check(pin)
        except BaseException:
            await self.unpin(pin)
            raise

    async def _pin_first(self, pin: Pin, slot: Slot, reader: int) -> None:
        """Write the cell of a pin, copy the start of its slot, and check that both are unchanged (RE-6)."""
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
        """Acquire the cell of a pin: wait until no other task writes or clears it."""
        lock = self._locks[pin.index]
        if lock.locked():
            await lock.acquire()
        else:
            lock.acquire_nowait()

    async def _try_slot(self, pin: Pin, slot: Slot, reader: int) -> None:
        for other in self._pins.values():
            if other.index == pin.index and other.slot is not None:
                await self._look(reader)  # another task has pinned the version that is there now
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
                await self._clear(pin)  # RE-2

    def _keep(self, pin: Pin, granted: Granted, nbytes: int) -> None:
        """Keep a version and the board mapped, so that they outlive the publisher in this process (RE-5)."""
        bulk = self.proc.bulk
        if self._kept_board is None:
            self._kept_board = bulk.keep(self.granted, board.BOARD_BYTES)
        view = bulk.keep(granted, nbytes)
        if view is not None:
            pin.kept.enter_context(bulk.kept.holding(granted, view))

    async def _write_cell(self, cell: int, version: int) -> None:
        """Write a pin over the remains of an earlier one, of this process or of the previous owner of the row."""
        word, expected = board.pin_word(self._lease, version), 0
        while (left := await self._swap(cell, expected, word)) != expected:
            if board.lease_of(left) > self._lease:
                return  # the row is another process's now, as the next read of it will show
            expected = left

    async def unpin(self, pin: Pin) -> None:
        """Release a pin; the last user in this process clears the cell."""
        pin.users -= 1
        if pin.users:  # also the task that could not make it, which never leaves
            return
        del self._pins[pin.version]
        pin.kept.close()
        with trio.CancelScope(shield=True):
            await self._enter_cell(pin)
            try:
                await self._clear(pin)
            finally:
                self._locks[pin.index].release()

    async def check(self, pin: Pin) -> None:
        """Check that a pin still holds, so that earlier copies are whole (RE-3).

        Raises:
            LinkLost: The publisher has counted this process as ended.
            ProcDied, MeshStopped: The publisher has ended, and had closed the publication, or its memory is not mapped.
        """
        assert self._reader is not None, "a process with a pin has a row"
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
                f"version {pin.version} is not pinned any more, and what was read of it may be torn: the publisher "
                "counts this process as ended, because the link between them was lost"
            )
            set_origin(error, self.granted.origin)
            raise error

    async def _clear(self, pin: Pin) -> None:
        """Clear a cell and notify the publisher; bounded in time, and raises no error of the transfer (RE-2)."""
        with trio.move_on_after(limits.UNPIN_SECONDS, shield=True) as scope:
            while not await self._try_to_clear(pin):  # noqa: ASYNC110 - no event tells that transfers work again
                await trio.sleep(limits.UNPIN_RETRY_SECONDS)
        if scope.cancelled_caught:
            self.proc.serve(self._clear_later, pin)

    async def _clear_later(self, pin: Pin) -> None:
        """Clear a cell that could not be cleared in time, unless this process pins its slot again."""
        while True:
            async with self._locks[pin.index]:
                if any(one.index == pin.index and one.slot is not None for one in self._pins.values()):
                    return
                if await self._try_to_clear(pin):
                    return
            await trio.sleep(limits.UNPIN_SECONDS)

    async def _try_to_clear(self, pin: Pin) -> bool:
        """Clear a cell if it has this pin; return whether it has it no more, or none looks at it."""
        assert self._reader is not None, "a process with a pin has a row"
        try:
            await self._swap(board.offset_of_cell(self._reader, pin.index), board.pin_word(self._lease, pin.version), 0)
        except (ProcDied, MeshStopped, trio.ClosedResourceError):
            return True
        except Exception:  # noqa: BLE001 - it may be over in a moment
            return False
        # Without a link, this is dropped: the publisher checks the cells at the request, which arrives later.
        self.proc.peer(self.owner).send(Parcel(messages.encode(messages.Unpinned(self.number))))
        return True

    def handle_of(self, slot: Slot) -> Handle:
        whole = self.granted
        return Handle(Granted(whole.home, slot.grant, slot.block, whole.origin), 0, 0, slot.nbytes, Right.READ)


# ---- snapshots: pinned versions of a publication ---------------------------------------------------------------------

Wanted = tuple[TensorEntry, Memory]
"""A tensor of a version, and the destination of its copy."""


@attrs.define(eq=False)
class Snapshot:
    """Pinned version of a publication, and access to its tensors. Valid inside its block.

    Attributes:
        version: Its number.
        entries: Its tensors by name: kind, dtype, shape.
        is_lent: True if a handle on part of it was handed out, so leaving the block checks the pin.
    """

    version: int
    entries: Mapping[str, TensorEntry]
    _handle: Handle = attrs.field(repr=False)
    _check: Callable[[], Awaitable[None]] = attrs.field(repr=False)
    """Raises if the pin is lost: earlier copies may be torn."""
    _copied: memoryview | None = attrs.field(default=None, repr=False)
    """The whole version, if it is small; valid even if the pin is lost later (RE-6)."""
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
        """Return a read-only handle on the whole version; each tensor starts at the offset of its entry."""
        self.is_lent = True
        return buffer_by(self._handle)

    @property
    def host(self) -> int:
        """Number of the host that has the version in its memory."""
        return self._handle.granted.home.host

    @trio.lowlevel.enable_ki_protection
    async def read_into(self, tensors: Mapping[str, Any]) -> None:
        """Copy published tensors into local ones of the same names: a state dict.

        They are copied one after the other while other tasks run: a task that computes with `tensors` meanwhile sees a
        mix of old and new values. For a model in use there is `Published.follow`.

        Args:
            tensors: Some or all names; each tensor has the published dtype and shape.

        Raises:
            KeyError, TypeError, ValueError: A tensor does not fit; nothing was copied.
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
        """Copy tensors, small neighbours in one transfer; then check that the copies are whole (RE-3)."""
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
        """Raise if earlier reads through `buffer` may be torn; leaving the pin's block does so, too."""
        await in_trio(self._check)()

    @trio.lowlevel.enable_ki_protection
    async def read(self) -> dict[str, Any]:
        """Return a copy of all tensors, of the published kinds; bytes as bytearrays.

        Raises and blocks as `read_into`.
        """
        made = {name: _empty(entry) for name, entry in self.entries.items()}
        await in_trio(self._copy)([(entry, memory_of(made[name], name)) for name, entry in self.entries.items()])
        return made

    def entry(self, name: str) -> TensorEntry:
        """Return kind, dtype and shape of a published tensor.

        Raises:
            KeyError: There is none of that name.
        """
        found = self.entries.get(name)
        if found is None:
            some = ", ".join(sorted(self.entries)[:3])
            raise KeyError(f"version {self.version} has no tensor {name!r}; it has {len(self.entries)}: {some}, ...")
        return found


def snapshot_of(reading: Reading, pin: Pin) -> Snapshot:
    """Return the snapshot of a pin."""
    slot, copied = pin.slot, pin.copied
    assert slot is not None, "a pin that has been given has its slot"
    layout_end, exported_end = slot.layout_nbytes, slot.layout_nbytes + slot.exported_nbytes
    entries = read_layout(copied[:layout_end], slot.nbytes)
    handle = with_exported(reading.handle_of(slot), bytes(copied[layout_end:exported_end]))
    whole = memoryview(copied) if len(copied) == slot.nbytes else None
    return Snapshot(pin.version, entries, handle, partial(reading.check, pin), whole)


def _neighbours(wanted: list[Wanted]) -> list[list[Wanted]]:
    """Group tensors within `limits.PUBLISHED_COPY_BYTES_MAX`; larger ones, and those of devices, stay single."""
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
    """Copy tensors from bytes that start at an offset of their version; return those that go to a device."""
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
