"""Transfers by RDMA adapters that reach memory of devices themselves (GPUDirect RDMA, ADR 0107).

The owner is asked for nothing, as by any carrier; but adapters and devices have no common order of what they do.

AD-1 Readers of other hosts cannot look at an event of the owner's. So its process says in the ticket when what had
     been queued at the making of the buffer has ended, and readers look there first.
AD-2 A write to a device over there counts once the adapter there has read from it: that pushes what it wrote
     before. What an adapter has written to a device here counts once the driver has been told to flush.
AD-3 What no adapter moves goes through pinned memory of the host, if there is a way; that is said once.
"""

from __future__ import annotations

import warnings

import trio

from trimesh import limits
from trimesh._runtime.services import Bulk, Granted, NotByAdapter, describe
from trimesh._transport.interface.mover import Span, Transfer, TransferKind
from trimesh._wire.memory.regions import memory_at
from trimesh.errors import LinkLost, set_origin
from trimesh.rdma.memory.device import DeviceMemory, in_thread, settle_writes
from trimesh.rdma.memory.driver import DriverError
from trimesh.rdma.memory.handle import Handle
from trimesh.rdma.memory.local import Memory, address_of
from trimesh.rdma.memory.staging import until
from trimesh.rdma.memory.ticket import COMPUTING, FAILED, READY, STATE_AT, read_ticket
from trimesh.untried import warn_untried

_said = set[str]()


def _warn_of_first_use() -> None:
    warn_untried("GPUDirect RDMA", "run `python -m trimesh.rdma --gpudirect` on two machines (docs/rdma.md)")


def _say_once(what: str, why: str) -> None:
    if what not in _said:
        _said.add(what)
        warnings.warn(f"{what}: {why}", stacklevel=2)


# ---- the owner -------------------------------------------------------------------------------------------------------


def announce(bulk: Bulk, granted: Granted, ticket: Span, memory: DeviceMemory) -> None:
    """Tell readers by adapters when they may begin; or the user, once, that there are adapters which do not reach it.

    Args:
        bulk: Of this process.
        granted: The buffer.
        ticket: Where its ticket lies.
        memory: The memory of the device.
    """
    if granted.device is not None:
        _warn_of_first_use()
        bulk.proc.serve(_tell_when_ready, ticket, memory)
    elif bulk.mover.has_adapters:
        _say_once("buffers on CUDA devices are not reached by RDMA adapters", granted.why_no_device)


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
    """Wait until the owner says that a buffer on a device holds what had been queued when it was made.

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
            error = LinkLost(f"the CUDA device of {describe(handle.granted)} has failed at what the buffer was to hold")
            set_origin(error, handle.granted.origin)
            raise error
        await trio.sleep(pause)
        pause = min(2 * pause, limits.CUDA_POLL_SECONDS_MAX)


async def move_directly(bulk: Bulk, handle: Handle, kind: TransferKind, memory: Memory) -> bool:
    """Make a transfer of all of a buffer with memory of a device here, by an adapter alone.

    Args:
        bulk: Of this process.
        handle: Of memory that an adapter reaches over there.
        kind: What to do.
        memory: The memory of the device.

    Returns:
        Whether it was made. If not it is to be made otherwise, from its beginning; the reason was said.

    Raises:
        Exception: As `Bulk.move`, for what has nothing to do with the device.
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
    _say_once("RDMA adapters do not reach CUDA devices here, transfers go through memory of the host", why)  # AD-3
    return False


async def push_writes(bulk: Bulk, handle: Handle) -> None:
    """Have what was written to memory of a device over there be there: AD-2. Raises as `Bulk.move`."""
    byte = bytearray(1)
    here = Span(address_of(memoryview(byte)), 1, byte)
    last = handle.offset + handle.nbytes - 1
    await bulk.move(handle.granted, Transfer(TransferKind.READ, handle.granted.grant, last, here))
