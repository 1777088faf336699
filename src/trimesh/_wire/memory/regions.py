"""Memory that travels beside a pickle: overlaps are sent once, small pieces ride at the end of the payload.

Pickle numbers its out-of-band buffers in the order in which it meets them. Here those *entries* are laid into
*regions*: entries whose memory overlaps lie in one region, so that `t` and `t[:5]` arrive as views of one piece of
memory, and only bytes that some entry covers travel. A region is one body of the message; small regions are packed
behind the pickle's last opcode, where `pickle.loads` does not look:

    payload = pickle stream | packed regions, 64-byte steps | regions | entries | footer
              ends with "."                                    three u64 each      ends with 0x01 or 0x03

    WR-1 A payload without packed or shared regions and without bound names has no trailer: entry k is body k.
    WR-2 Nothing here trusts the trailer: every range is checked before it is used.
"""

from __future__ import annotations

import functools
import pickle
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from trimesh import limits

Buffer = bytes | bytearray | memoryview

STOP = pickle.STOP[0]
"""Last byte of a pickle, and so of a payload without a trailer."""

TRAILER_PLAIN = 0x01
TRAILER_BOUND = 0x03
"""Last byte of a payload with a trailer; the second says that names must be resolved by the decoder's bindings."""

_FOOTER = struct.Struct("<QIIB")  # bytes of the stream, regions, entries, marker
_ONE = struct.Struct("<6QQIIB")  # the tables of one region with one entry, and the footer
_ALIGN = 64  # a cache line, and the widest vector load
_PACKED = 0  # source of a region that lies in the payload; body k is source k + 1


class SourceMemory:
    """Memory of the sender that one entry covers (see `Sink.memory`)."""

    __slots__ = ("address", "compact", "nbytes", "read", "space")

    def __init__(
        self,
        address: int,
        nbytes: int,
        read: Callable[[int, int], memoryview],
        space: str,
        compact: Callable[[], memoryview] | None,
    ) -> None:
        self.address = address
        self.nbytes = nbytes
        self.read = read
        self.space = space
        self.compact = compact


class ArrivedRegion:
    """A piece of arrived memory that several entries share.

    Attributes:
        memory: Its bytes, writable.
        cache: What rebuilders made of the whole region (a tensor storage), by a key of theirs.
    """

    __slots__ = ("cache", "memory")

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        self.cache: dict[Any, Any] = {}


class EntryMemory(msgspec.Struct, frozen=True, eq=False):
    """An entry that shares its region with others."""

    region: ArrivedRegion
    offset: int
    nbytes: int

    def view(self) -> memoryview:
        return self.region.memory[self.offset : self.offset + self.nbytes]


def view_of(data: EntryMemory | memoryview) -> memoryview:
    """Return the bytes of what a rebuilder was given."""
    return data.view() if isinstance(data, EntryMemory) else data


def writable(view: memoryview) -> memoryview:
    """Return a view that may be written: this one, or a copy if a transport has lent it for reading only."""
    return memoryview(bytearray(view)) if view.readonly else view


def memory_at(address: int, nbytes: int, keep: object) -> memoryview:
    """Return a view of this process's memory that keeps `keep` alive."""
    if nbytes == 0:
        return memoryview(b"")
    array = _bytes_type(nbytes.bit_length()).from_address(address)
    array.keep = keep
    return memoryview(array).cast("B")[:nbytes]


@functools.cache
def _bytes_type(bits: int) -> Any:
    """Return a type of arrays for every size of so many bits. To make one for each size costs ten times a message."""
    import ctypes  # noqa: PLC0415 - only messages with arrays need it; `import trimesh` stays cheap

    return ctypes.c_ubyte * (1 << bits)


class _Plan:
    """A region in the making: the bytes to send, and where each of its entries lies in them."""

    __slots__ = ("end", "entries", "start", "view")

    def __init__(self, start: int, end: int, entries: list[int]) -> None:
        self.start = start
        self.end = end
        self.entries = entries
        self.view: memoryview = memoryview(b"")


def lay_out(
    stream: bytes,
    buffers: Sequence[pickle.PickleBuffer],
    extents: dict[int, SourceMemory],
    *,
    bound: bool = False,
    bodies_max: int = limits.BODIES_MAX - 1,
) -> tuple[bytes, tuple[memoryview, ...]]:
    """Lay the entries of one pickle into regions.

    Args:
        stream: The pickle.
        buffers: What the pickler gave to its buffer callback, in order.
        extents: What is known of some of them, by `id`.
        bound: Whether the pickle holds names that only the decoder's bindings resolve.
        bodies_max: With more regions than this, the smallest are packed whatever their size.

    Returns:
        The payload and the bodies.
    """
    if len(buffers) == 1 and not bound and bodies_max:
        return _lay_out_one(stream, _read_alone(buffers[0], extents.get(id(buffers[0]))))
    views, entries = (_merged if _overlaps(extents) else _apart)(buffers, extents)
    threshold = _threshold(views, bodies_max)
    if not bound and len(views) == len(buffers) and all(view.nbytes >= threshold for view in views):
        return stream, tuple(views)  # WR-1
    packed, regions, bodies = _pack(views, threshold)
    tables = struct.pack(f"<{len(regions) + len(entries)}Q", *regions, *entries)
    footer = _FOOTER.pack(len(stream), len(views), len(buffers), TRAILER_BOUND if bound else TRAILER_PLAIN)
    return b"".join((stream, *packed, tables, footer)), tuple(bodies)


def _lay_out_one(stream: bytes, view: memoryview) -> tuple[bytes, tuple[memoryview, ...]]:
    """Do what `lay_out` does for the only entry of a message, in half of the time."""
    nbytes = view.nbytes
    if nbytes >= limits.BUFFER_INLINE_BYTES:
        return stream, (view,)
    trailer = _ONE.pack(_PACKED, 0, nbytes, 0, 0, nbytes, len(stream), 1, 1, TRAILER_PLAIN)
    return b"".join((stream, view, bytes(-nbytes % _ALIGN), trailer)), ()


def _overlaps(extents: dict[int, SourceMemory]) -> bool:
    """Whether any two entries share bytes. A `PickleBuffer` of others, whose address is not known, does with none."""
    spans = sorted((one.space, one.address, one.address + one.nbytes) for one in extents.values())
    last_space, last_end = "", 0
    for space, start, end in spans:
        if space != last_space:
            last_space, last_end = space, end
        elif start < last_end and start < end:
            return True
        else:
            last_end = max(last_end, end)
    return False


def _apart(
    buffers: Sequence[pickle.PickleBuffer], extents: dict[int, SourceMemory]
) -> tuple[list[memoryview], list[int]]:
    """Return the regions and the table of entries where each is a region, as in most messages."""
    views = [_read_alone(buffer, extents.get(id(buffer))) for buffer in buffers]
    entries: list[int] = []
    for number, view in enumerate(views):
        entries += (number, 0, view.nbytes)
    return views, entries


def _merged(
    buffers: Sequence[pickle.PickleBuffer], extents: dict[int, SourceMemory]
) -> tuple[list[memoryview], list[int]]:
    """Return the same where some share bytes."""
    plans = _plan(buffers, extents)
    entries = [0] * (3 * len(buffers))
    for number, plan in enumerate(plans):
        _read(plan, buffers, extents)
        for index in plan.entries:
            extent = extents.get(id(buffers[index]))
            if extent is None or len(plan.entries) == 1:
                entries[3 * index : 3 * index + 3] = (number, 0, plan.end - plan.start)
            else:
                entries[3 * index : 3 * index + 3] = (number, extent.address - plan.start, extent.nbytes)
    return [plan.view for plan in plans], entries


def _threshold(views: Sequence[memoryview], bodies_max: int) -> int:
    """Return the size from which on a region is a body of its own."""
    threshold = limits.BUFFER_INLINE_BYTES
    if len(views) <= bodies_max:
        return threshold
    sizes = sorted(view.nbytes for view in views)
    return max(threshold, sizes[-bodies_max if bodies_max else -1] + 1)


def _read_alone(buffer: pickle.PickleBuffer, extent: SourceMemory | None) -> memoryview:
    """Return the bytes of an entry that shares its region with no other."""
    if extent is None:
        return buffer.raw()
    return extent.read(extent.address, extent.nbytes) if extent.compact is None else extent.compact()


def _plan(buffers: Sequence[pickle.PickleBuffer], extents: dict[int, SourceMemory]) -> list[_Plan]:
    """Return the regions in the order of their first entries."""
    plans: list[_Plan] = []
    known: list[tuple[str, int, int, int]] = []
    for index, buffer in enumerate(buffers):
        extent = extents.get(id(buffer))
        if extent is None:  # a PickleBuffer of others: its address is unknown, it overlaps nothing we know
            plans.append(_Plan(0, buffer.raw().nbytes, [index]))
        else:
            known.append((extent.space, extent.address, extent.address + extent.nbytes, index))
    known.sort()
    last_space = ""
    last: _Plan | None = None
    for space, start, end, index in known:
        if last is not None and space == last_space and start < end and start < last.end:
            last.end = max(last.end, end)
            last.entries.append(index)
        else:
            last = _Plan(start, end, [index])
            last_space = space
            plans.append(last)
    plans.sort(key=lambda plan: min(plan.entries))
    return plans


def _read(plan: _Plan, buffers: Sequence[pickle.PickleBuffer], extents: dict[int, SourceMemory]) -> None:
    """Fill in the bytes of a region, and its true length when it is sent compacted."""
    first = buffers[plan.entries[0]]
    extent = extents.get(id(first))
    if extent is None or len(plan.entries) == 1:
        plan.view = _read_alone(first, extent)
    else:
        plan.view = extent.read(plan.start, plan.end - plan.start)
    plan.end = plan.start + plan.view.nbytes


def _pack(views: Sequence[memoryview], threshold: int) -> tuple[list[Buffer], list[int], list[memoryview]]:
    """Return the pieces of the packed bytes, the table of regions and the bodies."""
    packed: list[Buffer] = []
    regions: list[int] = []
    bodies: list[memoryview] = []
    at = 0
    for view in views:
        nbytes = view.nbytes
        if nbytes < threshold:
            padding = -nbytes % _ALIGN
            packed += (view, bytes(padding))
            regions += (_PACKED, at, nbytes)
            at += nbytes + padding
        else:
            bodies.append(view)
            regions += (len(bodies), 0, nbytes)
    return packed, regions, bodies


class Arrived:
    """A payload with a trailer, taken apart.

    Attributes:
        stream: The pickle.
        entries: What pickle is given for its out-of-band buffers, in order.
        bound: Whether names must be resolved by the decoder's bindings.
    """

    def __init__(self, payload: memoryview, bodies: Sequence[memoryview]) -> None:
        """Take `payload` apart.

        Raises:
            ValueError: The trailer is broken, or the bodies do not fit it.
        """
        if payload.nbytes < _FOOTER.size:
            raise ValueError("payload is too short for its trailer")
        stream_bytes, region_count, entry_count, marker = _FOOTER.unpack(payload[-_FOOTER.size :])
        if marker not in (TRAILER_PLAIN, TRAILER_BOUND):
            raise ValueError(f"payload ends with {marker:#04x}, which is neither a pickle's end nor a trailer's")
        tables_bytes = 24 * (region_count + entry_count)
        tables_at = payload.nbytes - _FOOTER.size - tables_bytes
        if not 0 <= stream_bytes <= tables_at:
            raise ValueError(f"payload of {payload.nbytes} bytes cannot hold a stream of {stream_bytes}")
        numbers = struct.unpack_from(f"<{tables_bytes // 8}Q", payload, tables_at)
        self.stream = payload[:stream_bytes]
        self.bound = marker == TRAILER_BOUND
        # One private, writable copy of all packed regions: the payload itself may be lent.
        packed = memoryview(bytearray(payload[stream_bytes:tables_at]))
        if region_count == entry_count == 1 and not numbers[3]:  # the most common, in half of the time
            source, offset, nbytes, _, at, length = numbers
            region = _cut(packed if source == _PACKED else _body(bodies, source), offset, nbytes)
            self.entries: list[EntryMemory | memoryview] = [_cut(region, at, length)]
            return
        regions = [
            _cut(packed if source == _PACKED else _body(bodies, source), offset, nbytes)
            for source, offset, nbytes in _threes(numbers[: 3 * region_count])
        ]
        self.entries = _entries(regions, _threes(numbers[3 * region_count :]))


def _threes(numbers: Sequence[int]) -> list[tuple[int, int, int]]:
    return list(zip(numbers[0::3], numbers[1::3], numbers[2::3], strict=True))


def _body(bodies: Sequence[memoryview], source: int) -> memoryview:
    if source > len(bodies):
        raise ValueError(f"payload names body {source} of {len(bodies)}")
    return bodies[source - 1]


def _cut(memory: memoryview, offset: int, nbytes: int) -> memoryview:
    if offset + nbytes > memory.nbytes:
        raise ValueError(f"bytes {offset}..{offset + nbytes} lie outside of {memory.nbytes} bytes")
    return memory[offset : offset + nbytes]


def _entries(regions: list[memoryview], entries: list[tuple[int, int, int]]) -> list[EntryMemory | memoryview]:
    sharers = [0] * len(regions)
    for number, offset, nbytes in entries:
        if number >= len(regions):
            raise ValueError(f"payload names region {number} of {len(regions)}")
        _cut(regions[number], offset, nbytes)
        sharers[number] += 1
    shared = {number: ArrivedRegion(regions[number]) for number, count in enumerate(sharers) if count > 1}
    return [
        EntryMemory(shared[number], offset, nbytes) if number in shared else _cut(regions[number], offset, nbytes)
        for number, offset, nbytes in entries
    ]
