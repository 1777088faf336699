"""Transfers with CUDA device memory at one end or both.

    buffer      other memory   bytes go
    host        device         through pinned places: the carrier uses one while the device uses another
    device      device         by the device itself
    device      host           through pinned places

Between hosts, and if this process does not see the device, RDMA adapters that reach devices move the bytes (below). If
adapters reach the device at one end only, the bytes at the other end go through pinned places.

The grant of a buffer on a device is that of its ticket (see `handle`). A copy holds a claim on this grant, as a view
does, so `aclose` waits for it. It checks the grant after each piece, so it ends soon after the buffer is revoked or its
owner has died.

AD-1 Readers on other hosts cannot query a CUDA event of the owner. So the owner's process sets a byte in the ticket
     once the work that was queued when the buffer was made has ended; readers that use adapters poll it first.
AD-2 A write to a remote device is complete once a read of the last byte by the same way has returned: it pushes earlier
     writes of the adapter there. A read into a local device is complete once the driver has flushed adapters' writes.
AD-3 A transfer that adapters cannot make from or to a local device goes through pinned host memory; warned of once.
"""

from __future__ import annotations

import ctypes
import warnings
import weakref
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import attrs
import trio

from trimesh import limits
from trimesh._runtime.services import Bulk, Granted, NotByAdapter, Registration, describe
from trimesh._transport.interface import Right, Span, Transfer, TransferKind
from trimesh._wire.memory import memory_at
from trimesh.errors import LinkLost, set_origin
from trimesh.rdma.memory.device import (
    DeviceLane,
    DeviceMemory,
    DriverError,
    Opened,
    Step,
    close,
    drain,
    feed,
    find_device,
    granted_here,
    in_thread,
    open_memory,
    pinned_places,
    queued_before,
    settle_writes,
    until,
)
from trimesh.rdma.memory.handle import COMPUTING, FAILED, READY, STATE_AT, Handle, Ticket, read_ticket, write_ticket
from trimesh.rdma.memory.local import Memory, address_of
from trimesh.untried import warn_untried

# ---- granting --------------------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class _Kept:
    """References that a granted ticket keeps alive; its storage is reused when this object is collected."""

    block: memoryview
    memory: DeviceMemory


@attrs.define(eq=False)
class _Room:
    """Storage of the tickets of one process: granted blocks, cut into tickets."""

    free: list[tuple[memoryview, int]] = attrs.field(factory=list[tuple[memoryview, int]])

    def take(self, bulk: Bulk) -> tuple[memoryview, int]:
        if not self.free:
            block = bulk.take_block(limits.CUDA_TICKET_BLOCK_BYTES)
            self.free += [(block, at) for at in range(0, block.nbytes, limits.CUDA_TICKET_BYTES)]
        return self.free.pop()


_rooms: weakref.WeakKeyDictionary[Bulk, _Room] = weakref.WeakKeyDictionary()


def post_ticket(bulk: Bulk, memory: DeviceMemory) -> Span:
    """Write a ticket into granted memory and return its range, which is kept with the device memory.

    Raises:
        LimitExceeded, OSError: There is no place.
    """
    room = _rooms.setdefault(bulk, _Room())
    block, at = room.take(bulk)
    block[at : at + limits.CUDA_TICKET_BYTES] = write_ticket(memory.ticket)
    kept = _Kept(block, memory)
    weakref.finalize(kept, room.free.append, (block, at)).atexit = False
    return Span(address_of(block) + at, limits.CUDA_TICKET_BYTES, kept)


def register(bulk: Bulk, memory: DeviceMemory, span: Span, rights: Right) -> tuple[Registration, Granted]:
    """Grant memory of a device, by its ticket, and to RDMA adapters if this process has some.

    Args:
        bulk: Bulk data of this process.
        memory: The memory, as CUDA shares it.
        span: The same memory, as adapters register it.
        rights: Access that others get.

    Raises:
        LimitExceeded, OSError: There is no place.
    """
    ticket = post_ticket(bulk, memory)
    made = bulk.register(ticket, rights, span)
    granted = made.granted(rights)
    announce(bulk, granted, ticket, memory)
    return made, granted


# ---- transfers -------------------------------------------------------------------------------------------------------


async def move(bulk: Bulk, handle: Handle, kind: TransferKind, memory: Memory) -> None:
    """Transfer a whole buffer from or to `memory`; at least one of both is on a device.

    Raises:
        LinkLost: This process cannot open the device memory.
        ProtocolError: The owner has described its memory wrongly.
        RuntimeError: CUDA has failed.
        ProcDied, MeshStopped, trio.ClosedResourceError, PermissionError, Unresponsive, OSError: As `Bulk.move`.

    Blocking: a checkpoint, cancellable; a cancel waits for the pieces that are being copied (ST-2).
    """
    if memory.is_idle is not None:
        await until(memory.is_idle)
    if handle.is_on_device:
        await _move_device_buffer(bulk, handle, kind, memory)
    else:
        await _move_host_buffer(bulk, handle, kind, memory)


async def _move_host_buffer(bulk: Bulk, handle: Handle, kind: TransferKind, memory: Memory) -> None:
    if bulk.goes_by_adapter(handle.granted) and await move_directly(bulk, handle, kind, memory):
        return
    await _through_places(bulk, handle, kind, memory)


async def _through_places(bulk: Bulk, handle: Handle, kind: TransferKind, memory: Memory) -> None:
    places = await pinned_places(handle.nbytes)
    is_feed = kind is TransferKind.READ
    index, there = memory.tensor.device.index, memory.span.address
    lane = DeviceLane(index, there, lambda place, _: places[place].address, is_feed, (places, memory.span.keep))
    step = by_carrier(bulk, handle, kind, places)
    await _run(lane, step, handle.nbytes, limits.CUDA_PIECE_BYTES, is_feed=is_feed)


async def _move_device_buffer(bulk: Bulk, handle: Handle, kind: TransferKind, memory: Memory) -> None:
    why_not = bulk.why_no_adapter(handle.granted)
    if not why_not and bulk.is_elsewhere(handle.granted):
        return await _move_by_adapter(bulk, handle, kind, memory)
    try:
        await _move_by_device(bulk, handle, kind, memory)
    except _NotSeenError as missing:
        if why_not:
            raise _lost(handle, f"{missing}; nor by an adapter: {why_not}") from missing.__cause__
        await _move_by_adapter(bulk, handle, kind, memory)
    except LinkLost as error:
        if bulk.is_elsewhere(handle.granted):
            error.add_note(
                "the buffer is on a CUDA device, which processes of its host reach, and others by RDMA adapters that "
                f"reach it (docs/rdma.md). {why_not[:1].upper()}{why_not[1:]}"
            )
        raise


async def _move_by_adapter(bulk: Bulk, handle: Handle, kind: TransferKind, memory: Memory) -> None:
    await until_ready(bulk, handle)
    there = attrs.evolve(handle, granted=handle.granted.on_device)
    if memory.tensor is None:
        await bulk.move(there.granted, Transfer(kind, there.granted.grant, there.offset, memory.span))
    elif not await move_directly(bulk, there, kind, memory):
        await _through_places(bulk, there, kind, memory)
    if kind is TransferKind.WRITE:
        await push_writes(bulk, there)


async def _move_by_device(bulk: Bulk, handle: Handle, kind: TransferKind, memory: Memory) -> None:
    is_feed = kind is TransferKind.WRITE
    async with _reached(bulk, handle, kind) as (there, index):
        if memory.tensor is not None:
            near = memory.span.address
            lane = DeviceLane(index, there, lambda _, start: near + start, is_feed, memory.span.keep)
            step: Step = partial(_look, bulk, handle)
            await _run(lane, step, handle.nbytes, limits.CUDA_COPY_BYTES, is_feed=is_feed)
        else:
            places = await pinned_places(handle.nbytes)
            lane = DeviceLane(index, there, lambda place, _: places[place].address, is_feed, (places, memory.span.keep))
            step = on_host(bulk, handle, kind, places, memory)
            await _run(lane, step, handle.nbytes, limits.CUDA_PIECE_BYTES, is_feed=is_feed)
        await _look(bulk, handle)


async def _run(lane: DeviceLane, step: Step, nbytes: int, size: int, *, is_feed: bool) -> None:
    await (feed if is_feed else drain)(lane, step, nbytes, size)


def by_carrier(bulk: Bulk, handle: Handle, kind: TransferKind, places: Sequence[Span]) -> Step:
    """Return a step that moves pieces of a host buffer to or from places."""

    async def step(place: int, start: int, stop: int) -> None:
        here = Span(places[place].address, stop - start, places[place].keep)
        await bulk.move(handle.granted, Transfer(kind, handle.granted.grant, handle.offset + start, here))

    return step


def on_host(bulk: Bulk, handle: Handle, kind: TransferKind, places: Sequence[Span], memory: Memory) -> Step:
    """Return a step that copies pieces of a device buffer's transfer between places and host memory."""

    async def step(place: int, start: int, stop: int) -> None:
        there, here = places[place].address, memory.span.address + start
        to, source = (here, there) if kind is TransferKind.READ else (there, here)
        if stop - start <= limits.INLINE_BYTES_MAX:
            ctypes.memmove(to, source, stop - start)
        else:
            await in_thread(ctypes.memmove, to, source, stop - start)
        await _look(bulk, handle)

    return step


async def _look(bulk: Bulk, handle: Handle, *_: int) -> None:
    """Check the grant: raise as a transfer would if the buffer is revoked or its owner has ended."""
    word = bytearray(8)
    there = Span(address_of(memoryview(word)), len(word), word)
    await bulk.move(handle.granted, Transfer(TransferKind.READ, handle.granted.grant, 0, there))


@asynccontextmanager
async def _reached(bulk: Bulk, handle: Handle, kind: TransferKind) -> AsyncGenerator[tuple[int, int], None]:
    """Yield the address of a device buffer and the device's local index, holding a claim on the buffer."""
    writable = kind is TransferKind.WRITE
    ticket_view = await bulk.view(handle.granted, 0, limits.CUDA_TICKET_BYTES, writable=writable)
    try:
        ticket = read_ticket(bytes(ticket_view), handle.space, handle.offset, handle.nbytes)
        index, why_not = find_device(handle.space)
        if index is None:
            raise _NotSeenError(why_not)
        own = granted_here(ticket.number)
        if own is not None:
            await until(own.is_ready)
            await until(queued_before(index))  # this process may have queued work on its own buffer since
            yield own.address + handle.offset, index
        else:
            async with _opened(bulk, handle, ticket, index) as address:
                yield address + handle.offset, index
    finally:
        ticket_view.release()
        del ticket_view


@asynccontextmanager
async def _opened(bulk: Bulk, handle: Handle, ticket: Ticket, index: int) -> AsyncGenerator[int, None]:
    opened: Opened | None = None
    try:
        try:
            opened = await in_thread(open_memory, ticket, index)
            await until(opened.is_ready, partial(_look, bulk, handle))  # the event of a dead process may never come
        except RuntimeError as error:
            await _look(bulk, handle)  # raises the better error if the owner has died
            raise _NotSeenError(f"it cannot be opened here: {error}") from error
        yield opened.address
    finally:
        if opened is not None:
            await close(opened)


class _NotSeenError(Exception):
    """The device cannot reach the memory from this process; nothing was moved."""


def _lost(handle: Handle, why: str) -> LinkLost:
    error = LinkLost(f"the memory of a CUDA device of {describe(handle.granted)} cannot be reached from here: {why}")
    set_origin(error, handle.granted.origin)
    return error


# ---- transfers by RDMA adapters that reach memory of devices themselves (GPUDirect RDMA, docs/design/memory.md) ------

# As with any carrier, the owner's Python takes no part; but adapters and devices do not order their accesses.

_said = set[str]()


def _warn_of_first_use() -> None:
    warn_untried("GPUDirect RDMA", "run `tools/gpudirect.py` of the sources on two machines (docs/rdma.md)")


def _say_once(what: str, why: str) -> None:
    if what not in _said:
        _said.add(what)
        warnings.warn(f"{what}: {why}", stacklevel=2)


# ---- the owner -------------------------------------------------------------------------------------------------------


def announce(bulk: Bulk, granted: Granted, ticket: Span, memory: DeviceMemory) -> None:
    """Mark when readers that use adapters may begin (AD-1); or warn, once, that adapters do not reach the device.

    Args:
        bulk: Bulk data of this process.
        granted: The buffer.
        ticket: Memory of its ticket.
        memory: The memory of the device.
    """
    if granted.device is not None:
        _warn_of_first_use()
        bulk.proc.serve(_tell_when_ready, ticket, memory)
    elif bulk.mover.has_adapters:
        _say_once("RDMA adapters cannot reach buffers on CUDA devices", granted.why_no_device)


async def _tell_when_ready(ticket: Span, memory: DeviceMemory) -> None:
    """See AD-1."""
    state = READY
    try:
        await until(memory.is_ready)
    except RuntimeError:
        state = FAILED
    memory_at(ticket.address + STATE_AT, 1, ticket.keep)[0] = state


# ---- readers ---------------------------------------------------------------------------------------------------------


async def until_ready(bulk: Bulk, handle: Handle) -> None:
    """Wait until the owner reports that the work queued when a device buffer was made has ended.

    Raises:
        LinkLost: Its device has failed.
        ProtocolError: The owner has described its memory wrongly.
        PermissionError: The handle names no range of it.
        Exception: As `Bulk.move`.
    """
    pause = limits.CUDA_POLL_SECONDS
    while True:
        data = bytearray(limits.CUDA_TICKET_BYTES)
        here = Span(address_of(memoryview(data)), len(data), data)
        await bulk.move(handle.granted, Transfer(TransferKind.READ, handle.granted.grant, 0, here))
        read_ticket(bytes(data), handle.space, handle.offset, handle.nbytes)
        if data[STATE_AT] == READY:
            return
        if data[STATE_AT] != COMPUTING:
            error = LinkLost(f"the CUDA device of {describe(handle.granted)} has failed before the buffer was computed")
            set_origin(error, handle.granted.origin)
            raise error
        await trio.sleep(pause)
        pause = min(2 * pause, limits.CUDA_POLL_SECONDS_MAX)


async def move_directly(bulk: Bulk, handle: Handle, kind: TransferKind, memory: Memory) -> bool:
    """Transfer a whole buffer from or to local device memory, by an adapter alone.

    Args:
        bulk: Bulk data of this process.
        handle: Handle on memory that an adapter reaches at the other side.
        kind: Read or write.
        memory: The memory of the local device.

    Returns:
        Whether the transfer was made. If not, the caller starts it over by other means; a warning gave the reason.

    Raises:
        Exception: As `Bulk.move`, for failures unrelated to the device.
    """
    why = bulk.mover.why_no_device
    if not why:
        _warn_of_first_use()
        try:
            await bulk.move(handle.granted, Transfer(kind, handle.granted.grant, handle.offset, memory.span))
            if kind is TransferKind.READ:
                await in_thread(settle_writes, memory.tensor.device.index)  # AD-2
        except (NotByAdapter, DriverError) as error:
            why = str(error)
        else:
            return True
    _say_once("RDMA adapters cannot reach CUDA devices here, transfers go through host memory", why)  # AD-3
    return False


async def push_writes(bulk: Bulk, handle: Handle) -> None:
    """Make earlier writes to remote device memory complete (AD-2). Raises as `Bulk.move`."""
    byte = bytearray(1)
    here = Span(address_of(memoryview(byte)), 1, byte)
    last = handle.offset + handle.nbytes - 1
    await bulk.move(handle.granted, Transfer(TransferKind.READ, handle.granted.grant, last, here))
