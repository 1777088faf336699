"""Mover of simulated processes, which share one interpreter and reach granted memory through a table.

It is as strict as the native one: each transfer checks secret, rights, range and generation. No transfer reads or
writes memory of a dead process; a stopped or partitioned one is reached like any process of its host. Small transfers
are done at once. `run` moves larger ones, as the native thread does: a chunk of each in turn,
`MemoryTable.chunk_seconds` apart, after a check of the grant.

    MM-1 Only secrets are random, and nothing depends on them; transfers end in the order in which they began.
    MM-2 Claims of a process that has ended are ignored.
"""

from __future__ import annotations

import hashlib
from collections import deque
from functools import partial
from typing import Final

import trio

from trimesh import limits
from trimesh._transport.interface import (
    Attachment,
    Carrier,
    End,
    Grant,
    MemoryKind,
    Mover,
    ProcessAddress,
    Right,
    Span,
    Transfer,
    TransferDone,
    TransferError,
    TransferKind,
    UnderWay,
    lent_memory,
)
from trimesh._wire.memory import memory_at
from trimesh.errors import LimitExceeded
from trimesh.ids import ProcId

CHUNK_BYTES: Final = 1 << 16
"""Chunk size, and size of the largest transfer that is done at once. Smaller than in the native mover, so that a test
needs little memory to observe a transfer in flight."""

_HOST: Final = 1
_WORD: Final = 1 << 64


class _Row:
    """One grant.

    Attributes:
        claims: Number of open accesses of each process.
    """

    __slots__ = ("block", "claims", "generation", "is_revoked", "rights", "secret", "span")

    def __init__(self, span: Span, rights: Right, block: int, generation: int, secret: bytes) -> None:
        self.span = span
        self.rights = rights
        self.block = block
        self.generation = generation
        self.secret = secret
        self.is_revoked = False
        self.claims: dict[MemoryMover, int] = {}

    def claim(self, by: MemoryMover) -> None:
        self.claims[by] = self.claims.get(by, 0) + 1

    def release(self, by: MemoryMover) -> None:
        self.claims[by] -= 1
        if not self.claims[by]:
            del self.claims[by]

    @property
    def is_in_use(self) -> bool:
        return any(not by.has_ended for by in self.claims)  # MM-2


class MemoryTable:
    """The memory that the processes of one simulation have granted.

    Attributes:
        chunk_seconds: Virtual time that a chunk of a large transfer takes; 0 is one turn of the scheduler.
        movers: Mover of every living process that has one.
    """

    def __init__(self) -> None:
        self.chunk_seconds = 0.0
        self.movers: dict[int, MemoryMover] = {}


class _Copy:
    """A large transfer in flight."""

    __slots__ = ("at", "attachment", "is_given_up", "row", "under_way")

    def __init__(self, under_way: UnderWay, attachment: MemoryAttachment, row: _Row) -> None:
        self.under_way = under_way
        self.attachment = attachment
        self.row = row
        self.at = 0
        self.is_given_up = False


class MemoryMover(Mover):
    """Grants and attachments of one simulated process."""

    def __init__(self, proc_id: ProcId, table: MemoryTable, *, has_ended: bool = False) -> None:
        self.proc_id = proc_id
        self.table = table
        self.has_ended = has_ended
        self._rows: dict[int, _Row] = {}
        self._quarantine: list[object] = []
        self._free: list[tuple[int, int]] = []  # places to be reused, each with its last generation
        self._places = 0
        self._blocks: dict[int, range] = {}
        self._next_block = 0
        self._attachments = 0
        self._copies: deque[_Copy] = deque()
        self._news = trio.Event()
        self._room = trio.Event()

    @property
    def home(self) -> ProcessAddress:
        return ProcessAddress(self.proc_id, _HOST)

    # ---- granting --------------------------------------------------------------------------------------------

    def grant(self, span: Span, rights: Right, *, block: int = 0) -> Grant:
        """Let others access memory of this process; see `Mover.grant`.

        Raises:
            LimitExceeded: `limits.GRANTS_MAX` grants exist.
        """
        if self._free:
            place, generation = self._free.pop()
        elif self._places < limits.GRANTS_MAX:
            place, generation = self._places, 0
            self._places += 1
        else:
            raise LimitExceeded("GRANTS_MAX", limits.GRANTS_MAX + 1)
        generation += 1
        secret = hashlib.sha256(f"{self.proc_id} {place} {generation}".encode()).digest()[:16]
        self._rows[place] = _Row(span, rights, block, generation, secret)
        return Grant(place, generation, secret)

    @property
    def has_adapters(self) -> bool:
        """Return False: a simulation has no adapters."""
        return False

    @property
    def why_no_device(self) -> str:
        return "simulated processes have no RDMA adapter"

    def revoke(self, grant: Grant) -> bool:
        """Refuse new accesses; see `Mover.revoke`."""
        row = self._own(grant)
        row.is_revoked = True
        return row.is_in_use

    def drop(self, grant: Grant) -> None:
        row = self._own(grant)
        assert row.is_revoked, "a grant is revoked before it is dropped"
        del self._rows[grant.place]
        if row.is_in_use:
            self._quarantine.append(row)
        else:
            self._free.append((grant.place, grant.generation))

    def _own(self, grant: Grant) -> _Row:
        row = self._rows[grant.place]
        assert row.generation == grant.generation, "a grant is dropped once"
        return row

    def find(self, transfer: Transfer, by: MemoryMover) -> _Row:
        """Return the grant for a transfer of another process, or of this one.

        Raises:
            TransferError: The transfer is not allowed.
        """
        if self.has_ended:
            raise TransferError(End.GONE)
        grant = transfer.grant
        row = self._rows.get(grant.place)
        if row is None or row.generation != grant.generation:
            raise TransferError(End.REVOKED)
        needed = Right.READ if transfer.kind is TransferKind.READ else Right.WRITE
        fits = 0 <= transfer.offset <= transfer.offset + transfer.local.nbytes <= row.span.nbytes
        if row.secret != grant.secret or needed not in row.rights or not fits:
            raise TransferError(End.DENIED)
        if row.is_revoked:
            raise TransferError(End.REVOKED)
        if MemoryKind.CUDA in (row.span.kind, transfer.local.kind):
            raise TransferError(End.DEVICE)
        if by.has_ended:
            raise TransferError(End.CANCELLED)
        return row

    def is_in_block(self, grant: Grant) -> bool:
        row = self._rows.get(grant.place)
        return row is not None and row.block != 0

    # ---- blocks ----------------------------------------------------------------------------------------------

    def take_block(self, nbytes: int) -> memoryview:
        """Allocate memory that others can map; see `Mover.take_block`.

        Raises:
            LimitExceeded: `limits.BLOCKS_MAX` blocks are in use, or it is larger than `limits.BLOCK_BYTES_MAX`.
        """
        if nbytes > limits.BLOCK_BYTES_MAX:
            raise LimitExceeded("BLOCK_BYTES_MAX", nbytes)
        if len(self._blocks) >= limits.BLOCKS_MAX:
            raise LimitExceeded("BLOCKS_MAX", limits.BLOCKS_MAX + 1)
        self._next_block += 1
        number = self._next_block
        pages = bytearray(nbytes + 64)
        address = -(-_address_of(pages) // 64) * 64
        self._blocks[number] = range(address, address + nbytes)
        return lent_memory(address, nbytes, partial(self._blocks.pop, number), pages)

    def block_of(self, span: Span) -> int:
        for number, block in self._blocks.items():
            if block.start <= span.address and span.address + span.nbytes <= block.stop:
                return number
        return 0

    # ---- attachments -----------------------------------------------------------------------------------------

    def attach(self, home: ProcessAddress) -> MemoryAttachment:
        """Attach to a process; see `Mover.attach`.

        Raises:
            LimitExceeded: `limits.ATTACHMENTS_MAX` attachments are open.
        """
        if self._attachments >= limits.ATTACHMENTS_MAX:
            raise LimitExceeded("ATTACHMENTS_MAX", limits.ATTACHMENTS_MAX + 1)
        self._attachments += 1
        return MemoryAttachment(self, home)

    def detached(self) -> None:
        """Note the end of an attachment."""
        self._attachments -= 1

    @property
    def copies(self) -> deque[_Copy]:
        """Large transfers in flight."""
        return self._copies

    def begin_copy(self, copy: _Copy) -> None:
        """Let `run` move a large transfer."""
        self._copies.append(copy)
        self._news.set()

    async def wait_for_room(self) -> None:
        """Wait until a transfer of this process has ended."""
        await self._room.wait()

    @trio.lowlevel.enable_ki_protection
    async def run(self) -> None:
        """Move large transfers until cancelled; see `Mover.run`."""
        while True:
            await self._news.wait()
            if self.table.chunk_seconds:
                await trio.sleep(self.table.chunk_seconds)
            else:
                await trio.lowlevel.checkpoint()
            for copy in tuple(self._copies):
                self._step(copy)
            if not self._copies:
                self._news = trio.Event()

    def _step(self, copy: _Copy) -> None:
        if self.has_ended:
            return  # in a process that has ended no task waits, and no thread writes
        transfer = copy.under_way.transfer
        try:
            if copy.is_given_up:
                raise TransferError(End.CANCELLED)
            there = copy.attachment.owner
            row = there.find(transfer, self)
            nbytes = min(CHUNK_BYTES, transfer.local.nbytes - copy.at)
            _copy_bytes(transfer, row, copy.at, nbytes)
            copy.at += nbytes
            if copy.at < transfer.local.nbytes:
                return
        except TransferError as error:
            self._end(copy, error.with_traceback(None))  # its frame would keep the memory until a garbage collection
        else:
            self._end(copy, TransferDone(copy.attachment.carrier_of(transfer.grant)))

    def _end(self, copy: _Copy, result: TransferDone | Exception) -> None:
        self._copies.remove(copy)
        copy.row.release(self)
        copy.under_way.end(result)
        self._room.set()
        self._room = trio.Event()

    def end(self) -> None:
        """Become the mover of an ended process: without memory of its own, and without access to other memory."""
        self.has_ended = True
        if self.table.movers.get(self.proc_id) is self:
            del self.table.movers[self.proc_id]

    def close(self) -> None:
        self.end()
        for copy in tuple(self._copies):
            self._end(copy, TransferError(End.CANCELLED))
        self._rows.clear()
        self._quarantine.clear()


class MemoryAttachment(Attachment):
    """An open view of the home of a simulated process."""

    def __init__(self, mover: MemoryMover, home: ProcessAddress) -> None:
        self.mover = mover
        self.home = home
        self._is_closed = False

    @property
    def owner(self) -> MemoryMover:
        """The mover of the other process.

        Raises:
            TransferError: That process has ended, or never existed.
        """
        found = self.mover.table.movers.get(self.home.epoch)
        if found is None:
            raise TransferError(End.GONE)
        return found

    @property
    def carriers(self) -> Carrier:
        if self.is_gone:
            return Carrier.NONE
        return Carrier.LOCAL if self.home.epoch == self.mover.proc_id else Carrier.SHM | Carrier.CMA

    @property
    def is_gone(self) -> bool:
        return self.home.epoch not in self.mover.table.movers

    @property
    def why_not(self) -> str:
        return "tcp: simulated processes have no network of their own"

    @property
    def is_busy(self) -> bool:
        return any(copy.attachment is self for copy in self.mover.copies)

    def carrier_of(self, grant: Grant) -> Carrier:
        """Return the carrier for the memory of a grant."""
        if self.home.epoch == self.mover.proc_id:
            return Carrier.LOCAL
        return Carrier.SHM if self.owner.is_in_block(grant) else Carrier.CMA

    def begin(self, transfer: Transfer) -> TransferDone | UnderWay | None:
        """Begin a transfer; see `Attachment.begin`.

        Raises:
            TransferError: It has failed.
        """
        if self._is_closed:
            raise TransferError(End.CANCELLED)
        row = self.owner.find(transfer, self.mover)
        if transfer.kind in (TransferKind.ADD, TransferKind.SWAP):
            return TransferDone(self.carrier_of(transfer.grant), _change(transfer, row))
        if transfer.local.nbytes <= CHUNK_BYTES:
            _copy_bytes(transfer, row, 0, transfer.local.nbytes)
            return TransferDone(self.carrier_of(transfer.grant))
        if len(self.mover.copies) >= limits.TRANSFERS_MAX:
            return None
        row.claim(self.mover)
        under_way = UnderWay(transfer)
        self.mover.begin_copy(_Copy(under_way, self, row))
        return under_way

    def give_up(self, under_way: UnderWay) -> None:
        for copy in self.mover.copies:
            if copy.under_way is under_way:
                copy.is_given_up = True

    async def wait_for_room(self) -> None:
        await self.mover.wait_for_room()

    def view(self, grant: Grant, offset: int, nbytes: int, *, writable: bool, is_shared: bool = False) -> memoryview:
        """Return a zero-copy view of granted memory of a block; see `Attachment.view`.

        Raises:
            TransferError: The memory cannot be mapped.
        """
        kind = TransferKind.WRITE if writable else TransferKind.READ
        row = self.owner.find(Transfer(kind, grant, offset, Span(0, nbytes)), self.mover)
        if not row.block:
            raise TransferError(End.UNREACHABLE)
        row.claim(self.mover)
        release = partial(row.release, self.mover)
        view = lent_memory(row.span.address + offset, nbytes, release, row.span.keep)
        return view if writable else view.toreadonly()

    def keep(self, grant: Grant, nbytes: int) -> memoryview:
        """Return granted memory of a block that outlives its process; see `Attachment.keep`.

        Raises:
            TransferError: The memory cannot be mapped.
        """
        row = self.owner.find(Transfer(TransferKind.READ, grant, 0, Span(0, nbytes)), self.mover)
        if not row.block:
            raise TransferError(End.UNREACHABLE)
        return memory_at(row.span.address, nbytes, row.span.keep).toreadonly()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.mover.detached()
            for copy in self.mover.copies:
                copy.is_given_up = copy.is_given_up or copy.attachment is self


def _copy_bytes(transfer: Transfer, row: _Row, at: int, nbytes: int) -> None:
    here = memory_at(transfer.local.address + at, nbytes, None)
    there = memory_at(row.span.address + transfer.offset + at, nbytes, None)
    if transfer.kind is TransferKind.READ:
        here[:] = there
    else:
        there[:] = here


def _change(transfer: Transfer, row: _Row) -> int:
    """Do an atomic operation; return the old value."""
    word = memory_at(row.span.address + transfer.offset, 8, None)
    old = int.from_bytes(word, "little")
    if transfer.kind is TransferKind.ADD:
        word[:] = ((old + transfer.operand) % _WORD).to_bytes(8, "little")
    elif old == transfer.expected:
        word[:] = transfer.operand.to_bytes(8, "little")
    return old


def _address_of(pages: bytearray) -> int:
    import ctypes  # noqa: PLC0415 - only simulations with buffers need it

    return ctypes.addressof(ctypes.c_ubyte.from_buffer(pages))
