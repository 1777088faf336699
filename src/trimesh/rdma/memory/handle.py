"""Handle of a buffer in serialized form: numbers that name memory in a process, and a secret; tickets of devices."""

from __future__ import annotations

import re
from typing import Any, Final

import attrs
import msgspec

from trimesh import limits
from trimesh._runtime.services import Granted
from trimesh._transport.interface import Grant, ProcessAddress, Right
from trimesh.errors import Origin, ProtocolError
from trimesh.ids import ID_MAX
from trimesh.shape.extent import Point

# A *ticket* describes how other processes open memory of a device. The owner writes it into memory that they can read.
#
# The grant of a buffer on a device is that of its ticket. So the ledger admits a process before it opens the memory (if
# the owner lives, the buffer is not revoked, and secret and rights are valid), and keeps a claim of it while it copies.
# A handle, which may come from any source, never names the memory to open.

HOST: Final = "cpu"
"""The space of host memory."""

_DEVICE: Final = re.compile(r"cuda:[0-9A-Za-z-]{1,64}")
"""The space of device memory: a name of the device that is the same in all processes."""

CUDA_HANDLE_BYTES: Final = 64
"""Size of the driver's handles on memory and on events."""

_NUMBER_MAX: Final = 1 << 63

STATE_AT: Final = limits.CUDA_TICKET_BYTES - 1
"""Offset in a ticket of the state byte that readers without the device poll: `COMPUTING` and so on."""

COMPUTING: Final = 0
"""The owner has not yet seen the end of the work that was queued when the buffer was made."""
READY: Final = 1
FAILED: Final = 2
"""The device has failed at that work."""


class Ticket(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Description by which another process opens one range of device memory.

    Attributes:
        space: The device.
        number: Finds the memory in its owner, since a process cannot open its own IPC handle.
        memory: The driver's handle on the allocation.
        offset: Start of the range in the allocation.
        nbytes: Size of the range.
        ready: The driver's handle on the event after the work that was queued when the buffer was made.
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
    """Return the encoded ticket, `limits.CUDA_TICKET_BYTES` bytes."""
    written = msgspec.msgpack.encode(ticket)
    data = len(written).to_bytes(_HEAD, "little") + written
    assert len(data) <= STATE_AT, "the bound has room for the longest"
    return data.ljust(limits.CUDA_TICKET_BYTES, b"\0")


def read_ticket(data: bytes, space: str, offset: int, nbytes: int) -> Ticket:
    """Decode and check a ticket.

    Args:
        data: The encoded ticket.
        space: The device that the handle names.
        offset: Start of the handle's range.
        nbytes: Size of that range.

    Raises:
        ProtocolError: The bytes are not a ticket, or not one for that device.
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


# ---- handle ----------------------------------------------------------------------------------------------------------

_WORD: Final = 1 << 64
_NO_SECRET: Final = bytes(16)
_READABLE: Final = frozenset((Right.READ, Right.READ | Right.WRITE))


@attrs.frozen(eq=False)
class Handle:
    """Handle on a range of granted memory.

    Attributes:
        granted: The memory, as others know it.
        address: Address of the first byte in its own process, to detect overlaps.
        offset: Offset of that byte in the buffer.
        nbytes: Size of the range.
        rights: Access that this handle permits.
        space: Host memory, or the name of a device; for a device, `granted` is the ticket.
    """

    granted: Granted
    address: int
    offset: int
    nbytes: int
    rights: Right
    space: str = HOST

    @property
    def is_writable(self) -> bool:
        """True if the handle permits writes."""
        return Right.WRITE in self.rights

    @property
    def is_on_device(self) -> bool:
        return self.space != HOST

    def part(self, start: int, stop: int) -> Handle:
        """Return a handle on a range of its bytes."""
        return attrs.evolve(self, address=self.address + start, offset=self.offset + start, nbytes=stop - start)

    def fields(self) -> tuple[Any, ...]:
        """Return the handle as plain values; the origin's point stays a point."""
        granted, home, origin = self.granted, self.granted.home, self.granted.origin
        grant = granted.grant
        device = _device_fields(granted)
        return (
            (home.epoch, home.host, home.started, home.pid, home.ledger, home.port, home.address),
            (grant.place, grant.generation, grant.secret, granted.block, grant.exported),
            (self.address, self.offset, self.nbytes, self.rights.value, self.space),
            (origin.point, origin.mesh, origin.actor, origin.endpoint, origin.host, origin.pid, origin.incarnation),
            *((device,) if device else ()),
        )


def _device_fields(granted: Granted) -> tuple[Any, ...]:
    """Return the adapters' fields for device memory, or why no adapter reaches it; empty for other memory."""
    if granted.device is None:
        return (granted.why_no_device[: limits.DEVICE_REASON_CHARS],) if granted.why_no_device else ()
    return granted.device.place, granted.device.generation, granted.device.secret, granted.device.exported


def _device_of(fields: Any, *more: Any) -> tuple[Grant | None, str]:
    match fields:
        case [str() as why] if not more and len(why) <= limits.DEVICE_REASON_CHARS:
            return None, why
        case [int() as place, int() as generation, bytes() as secret, bytes() as exported] if (
            not more
            and type(place) is type(generation) is int
            and 0 <= place < 1 << 32
            and 0 < generation < 1 << 32
            and len(secret) == len(_NO_SECRET)
            and 0 < len(exported) <= limits.EXPORT_BYTES_MAX
        ):
            return Grant(place, generation, secret, exported), ""
        case _:
            raise ProtocolError("device memory must come with a grant for adapters, or the reason why it has none")


def with_exported(handle: Handle, exported: bytes) -> Handle:
    """Return the handle with the fields that readers with an RDMA adapter need."""
    grant = msgspec.structs.replace(handle.granted.grant, exported=exported)
    return attrs.evolve(handle, granted=msgspec.structs.replace(handle.granted, grant=grant))


def handle_of(*fields: Any) -> Handle:
    """Return the handle that `Handle.fields` encoded.

    Raises:
        ProtocolError: The fields are malformed. Only the memory's own process knows whether it still exists.
    """
    try:
        home, grant, (address, offset, nbytes, rights, space), origin, *device = fields
        place, generation, secret, block, exported = grant
        epoch, host, started, pid, ledger, port, listening = home
        point, *names, origin_pid, incarnation = origin
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"a buffer must be named by its process, its grant, its range and its origin: {error}")\
            from error  # fmt: skip
    numbers = (epoch, host, started, pid, ledger, port, place, generation, block, address, offset, nbytes)
    if not all(type(number) is int and 0 <= number < _WORD for number in numbers) or not 0 < epoch <= ID_MAX:
        raise ProtocolError("a buffer must be named by numbers of 64 bits")
    if max(pid, ledger, port, place, generation, block) >= 1 << 32 or not (nbytes and offset + nbytes < _WORD):
        raise ProtocolError("a buffer must be a range of a grant of a process")
    if not (isinstance(secret, bytes) and len(secret) == len(_NO_SECRET) and isinstance(space, str)):
        raise ProtocolError("a buffer must come with a secret of 16 bytes and the name of its memory")
    if space != HOST and not is_device(space):
        raise ProtocolError(f"a buffer must be in memory of the host or of a CUDA device, got {space!r:.100}")
    if not (isinstance(exported, bytes) and len(exported) <= limits.EXPORT_BYTES_MAX):
        raise ProtocolError(f"the adapters' part of a handle must have at most {limits.EXPORT_BYTES_MAX} bytes")
    if not (isinstance(listening, bytes) and len(listening) in (0, 4, 16)):
        raise ProtocolError("the address of a process must have 0, 4 or 16 bytes")
    if type(rights) is not int or rights not in [one.value for one in _READABLE]:
        raise ProtocolError(f"a buffer may be read, or read and written, got rights {rights!r}")
    if not (isinstance(point, Point | None) and type(origin_pid) is int and type(incarnation) is int):
        raise ProtocolError("the origin of a buffer must be a place in a mesh")
    if len(names) != 4 or not all(isinstance(name, str | None) for name in names) or None in (names[0], names[3]):
        raise ProtocolError("the names in the origin of a buffer must be strings")
    on_device, why_no_device = (None, "") if not device else _device_of(*device)
    granted = Granted(
        ProcessAddress(epoch, host, started, pid, ledger, port, listening),
        Grant(place, generation, secret, exported),
        block,
        Origin(point, names[0], names[1], names[2], names[3], origin_pid, incarnation),
        on_device,
        why_no_device,
    )
    return Handle(granted, address, offset, nbytes, Right(rights), space)
