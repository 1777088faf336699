"""What others need to open memory of a device: a *ticket*, which its owner lays into memory that they can look at.

The grant of a buffer on a device is that of its ticket. So whoever opens the memory has been let in by the ledger (its
owner lives, the buffer is not revoked, secret and rights are good), and has a claim there for as long as it copies; and
no handle, which may have come from anywhere, ever says what is to be opened.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from trimesh import limits
from trimesh.errors import ProtocolError

HOST: Final = "cpu"
"""The space of memory of the host."""

_DEVICE: Final = re.compile(r"cuda:[0-9A-Za-z-]{1,64}")
"""The space of memory of a device: the name by which all processes know it."""

CUDA_HANDLE_BYTES: Final = 64
"""Of a handle on memory, and of one on an event, as the driver makes them."""

_NUMBER_MAX: Final = 1 << 63

STATE_AT: Final = limits.CUDA_TICKET_BYTES - 1
"""Of a ticket, the byte by which readers without the device know whether they may begin: `COMPUTING`, and so on."""

COMPUTING: Final = 0
"""What had been queued when the buffer was made has not ended, as far as its process has seen."""
READY: Final = 1
FAILED: Final = 2
"""The device has failed at it."""


class Ticket(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """What opens one piece of memory of a device.

    Attributes:
        space: The device.
        number: Names the memory within its own process, which cannot open it by the handle.
        memory: The driver's handle on the allocation that it lies in.
        offset: Where it begins in there.
        nbytes: Its size.
        ready: The driver's handle on the event after what had been queued when the buffer was made.
    """

    space: str
    number: int
    memory: bytes
    offset: int
    nbytes: int
    ready: bytes


def is_device(space: str) -> bool:
    """Return whether a text names the memory of a device."""
    return _DEVICE.fullmatch(space) is not None


def write_ticket(ticket: Ticket) -> bytes:
    """Return a ticket as it lies in memory: of `limits.CUDA_TICKET_BYTES`."""
    written = msgspec.msgpack.encode(ticket)
    data = len(written).to_bytes(_HEAD, "little") + written
    assert len(data) <= STATE_AT, "the bound has room for the longest"
    return data.ljust(limits.CUDA_TICKET_BYTES, b"\0")


def read_ticket(data: bytes, space: str, offset: int, nbytes: int) -> Ticket:
    """Return the ticket that lies in memory.

    Args:
        data: The memory.
        space: The device that the handle names.
        offset: Where its range begins.
        nbytes: The size of that.

    Raises:
        ProtocolError: It is none, or not for that device.
        PermissionError: The range is not within the memory.
    """
    end = _HEAD + int.from_bytes(data[:_HEAD], "little")
    try:
        ticket = _DECODER.decode(data[_HEAD:end])
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"the memory of a device must be described by a ticket: {error}") from error
    if len(ticket.memory) != CUDA_HANDLE_BYTES or len(ticket.ready) != CUDA_HANDLE_BYTES:
        raise ProtocolError(f"the handles of a ticket must have {CUDA_HANDLE_BYTES} bytes")
    if not (0 <= ticket.offset < _NUMBER_MAX and 0 < ticket.nbytes < _NUMBER_MAX - ticket.offset):
        raise ProtocolError(f"a ticket must name a range of memory, got {ticket.nbytes} bytes at {ticket.offset}")
    if ticket.space != space or not is_device(space):
        raise ProtocolError(f"a ticket must be for the device that the handle names, {space!r}, got {ticket.space!r}")
    if not 0 <= offset <= offset + nbytes <= ticket.nbytes:
        raise PermissionError(
            f"a handle must name a range of the buffer of {ticket.nbytes} bytes, got {nbytes} at {offset}"
        )
    return ticket


_HEAD: Final = 4
_DECODER: Final = msgspec.msgpack.Decoder(Ticket)
