"""Memory for large values: huge pages for received values; layout of memory that is sent beside a pickle.

A `bytes` owns its memory, so received data is copied into it once. A plain copy spends most of its time on page faults,
one for each new page of 4 KiB. With huge pages a copy of 64 MiB takes 10 ms, not 30 ms (measured), and freeing the
memory 0.1 ms, not 3 ms. Where the system has none, plain pages are used.

Memory beside a pickle: overlaps are sent once, small pieces are packed at the end of the payload.

Pickle numbers its out-of-band buffers in the order in which it meets them. Here those *entries* are placed into
*regions*: entries whose memory overlaps share one region, so that `t` and `t[:5]` arrive as views of one piece of
memory, and only bytes that some entry covers travel. A region is one body of the message; small regions are packed
behind the pickle's last opcode, which `pickle.loads` ignores:

    payload = pickle stream | packed regions, 64-byte steps | regions | entries | footer
              ends with "."                                    three u64 each      ends with 0x01 or 0x03

    WR-1 A payload without packed or shared regions and without bound names has no trailer: entry k is body k.
    WR-2 Nothing here trusts the trailer: every range is checked before it is used.
"""

from __future__ import annotations

import functools
import mmap
import pickle
import struct
import sys
import types
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple, NewType, Protocol

import msgspec

from trimesh import limits

_HUGE_PAGE_BYTES: Final = 1 << 21
_OFFSET: Final = bytes.__basicsize__ - 1
"""Where the contents of a `bytes` begin; `__basicsize__` counts the zero behind them."""
_HASH: Final = _OFFSET - 8
"""Where its hash is kept, -1 until it is asked for."""


def new_bytes(size: int) -> tuple[bytes, memoryview]:
    """Return a `bytes` of undefined contents, and its memory, to be filled before it is used elsewhere.

    Raises:
        MemoryError: There is not enough memory.
    """
    fresh: bytes = _native().make(None, size)
    address = id(fresh) + _OFFSET
    ask_for_huge_pages(address, size)
    return fresh, memory_at(address, size, fresh)


def ask_for_huge_pages(address: int, nbytes: int) -> None:
    """Request huge pages for the pages wholly inside a memory range of this process that was not written yet.

    Does nothing for small ranges (`limits.HUGE_PAGES_BYTES_MIN`), or if the system has no huge pages.
    """
    if nbytes >= limits.HUGE_PAGES_BYTES_MIN:
        start = -(-address // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        end = (address + nbytes) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
        if end > start:
            _native().advise(start, end - start, mmap.MADV_HUGEPAGE)  # an error means that there are none


class ReusableBytes:
    """A `bytes` that is written to again once nothing else refers to it: then it is as good as a new one.

    Args:
        whole: Made by `new_bytes`.
    """

    __slots__ = ("_whole", "size")

    def __init__(self, whole: bytes) -> None:
        self._whole = whole
        self.size = len(whole)

    @property
    def is_free(self) -> bool:
        """True if nothing else refers to it: no name, no view, no running code."""
        return self._references() == _own_references()

    def take(self) -> tuple[bytes, memoryview]:
        """Return it in the form of `new_bytes`; it must be free."""
        whole = self._whole
        address = id(whole)
        memory_at(address + _HASH, 8, None).cast("q")[0] = -1
        return whole, memory_at(address + _OFFSET, self.size, whole)

    def _references(self) -> int:
        return sys.getrefcount(self._whole)


@functools.cache
def can_be_reused() -> bool:
    """Return whether a `bytes` of this interpreter has the layout that `ReusableBytes` assumes.

    It creates one to test this. False without the GIL: another thread may begin to refer to it at any time.
    """
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return False
    size = 16
    whole, memory = new_bytes(size)
    memory[:] = bytes(range(size))
    kept = memory_at(id(whole) + _HASH, 8, None).cast("q")
    is_unset = kept[0] == -1
    return is_unset and hash(whole) == kept[0] == hash(bytes(range(size)))


@functools.cache
def _own_references() -> int:
    """Return the number of references that `ReusableBytes` counts without others; it depends on the interpreter."""
    return ReusableBytes(new_bytes(16)[0])._references()  # noqa: SLF001 - of the same class


def new_pages(size: int) -> mmap.mmap:
    """Return private, writable memory whose pages are allocated when they are written.

    Raises:
        OSError, ValueError, OverflowError, MemoryError: There is not enough memory, or the size is impossible.
    """
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= limits.HUGE_PAGES_BYTES_MIN:
        try:
            pages.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without huge pages
            pass
    return pages


def whole_bytes(view: memoryview) -> bytes | None:
    """Return the `bytes` that `view` covers completely, or None if it views anything else."""
    shown = view.obj
    return shown if type(shown) is bytes and len(shown) == view.nbytes and view.contiguous else None


def copied_bytes(view: memoryview) -> bytes:
    """Return the contents of a contiguous view as a `bytes`."""
    if view.nbytes < limits.HUGE_PAGES_BYTES_MIN:
        return bytes(view)
    fresh, memory = new_bytes(view.nbytes)
    memory[:] = view.cast("B")
    return fresh


@functools.cache
def _native() -> Any:
    import ctypes  # noqa: PLC0415 - only messages with large values need it; `import trimesh` stays cheap

    make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t)
    advise = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return types.SimpleNamespace(
        make=make(("PyBytes_FromStringAndSize", ctypes.pythonapi)),
        advise=advise(("madvise", ctypes.CDLL(None))),
    )


# ---- regions ---------------------------------------------------------------------------------------------------------

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
        cache: Objects that rebuilders made of the whole region (a tensor storage), by their own keys.
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
    """Return the bytes of an argument of a rebuilder."""
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
    """Return a type of arrays for all sizes of `bits` bits. Creating one for each size costs ten times a message."""
    import ctypes  # noqa: PLC0415 - only messages with arrays need it; `import trimesh` stays cheap

    return ctypes.c_ubyte * (1 << bits)


class _Plan:
    """A region that is being laid out: its bytes, and the entries in it."""

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
        buffers: Arguments of the pickler's buffer callback, in order.
        extents: Known memory extents of some of them, by `id`.
        bound: True if the pickle holds names that only the decoder's bindings resolve.
        bodies_max: Maximum number of bodies: with more regions, the smallest are packed whatever their size.

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
    """Return whether any two entries share bytes. Foreign `PickleBuffer`s, of unknown address, count as separate."""
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
    """Do what `_apart` does for entries of which some share bytes."""
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
    """Return the smallest size of a region that is sent as a separate body."""
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
        if extent is None:  # a PickleBuffer of user code: its address is unknown, so it overlaps nothing known
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
    """A parsed payload with a trailer.

    Attributes:
        stream: The pickle.
        entries: The out-of-band buffers for pickle, in order.
        bound: Whether names must be resolved by the decoder's bindings.
    """

    def __init__(self, payload: memoryview, bodies: Sequence[memoryview]) -> None:
        """Parse `payload`.

        Raises:
            ValueError: The trailer is broken, or the bodies do not fit it.
        """
        if payload.nbytes < _FOOTER.size:
            raise ValueError(f"a payload with a trailer must have {_FOOTER.size} bytes, got {payload.nbytes}")
        stream_bytes, region_count, entry_count, marker = _FOOTER.unpack(payload[-_FOOTER.size :])
        if marker not in (TRAILER_PLAIN, TRAILER_BOUND):
            raise ValueError(f"a payload must end as a pickle or a trailer does, got {marker:#04x}")
        tables_bytes = 24 * (region_count + entry_count)
        tables_at = payload.nbytes - _FOOTER.size - tables_bytes
        if not 0 <= stream_bytes <= tables_at:
            raise ValueError(f"a stream must fit its payload of {payload.nbytes} bytes, got {stream_bytes} bytes")
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
        raise ValueError(f"a payload must name one of its {len(bodies)} bodies, got {source}")
    return bodies[source - 1]


def _cut(memory: memoryview, offset: int, nbytes: int) -> memoryview:
    if offset + nbytes > memory.nbytes:
        raise ValueError(f"an entry must lie within {memory.nbytes} bytes, got {offset} to {offset + nbytes}")
    return memory[offset : offset + nbytes]


def _entries(regions: list[memoryview], entries: list[tuple[int, int, int]]) -> list[EntryMemory | memoryview]:
    sharers = [0] * len(regions)
    for number, offset, nbytes in entries:
        if number >= len(regions):
            raise ValueError(f"a payload must name one of its {len(regions)} regions, got {number}")
        _cut(regions[number], offset, nbytes)
        sharers[number] += 1
    shared = {number: ArrivedRegion(regions[number]) for number, count in enumerate(sharers) if count > 1}
    return [
        EntryMemory(shared[number], offset, nbytes) if number in shared else _cut(regions[number], offset, nbytes)
        for number, offset, nbytes in entries
    ]


# ---- reducers --------------------------------------------------------------------------------------------------------

# Reducers: special encodings of some classes; one table for the process, and the sink that they write to.
#
# A *reducer* returns what `object.__reduce__` does, and may also pass memory to the `Sink`, to be sent beside the
# pickle. Types are registered by the class, or by its dotted name if its module may never be imported ("torch.Tensor"):
# this floor imports neither torch nor numpy, and a name costs nothing until an object of that class is encoded.

DefinitionId = NewType("DefinitionId", str)
"""Name of one class, function or global that travels by value: "<owner>.<number>", the process that first encoded it
in hexadecimal, counted there from 1."""


class Sink(Protocol):
    """Interface of a reducer to the message being encoded."""

    def memory(
        self,
        address: int,
        nbytes: int,
        read: Callable[[int, int], memoryview],
        *,
        space: str = "cpu",
        compact: Callable[[], memoryview] | None = None,
    ) -> pickle.PickleBuffer:
        """Send `nbytes` bytes at `address` beside the pickle; put the result among the arguments of the rebuilder.

        Memory that overlaps other memory of the same message and `space` is sent once and stays shared. The rebuilder
        gets an `EntryMemory`, or a writable memoryview when the bytes overlap no others.

        Args:
            address: First byte, as a number that is comparable within `space`.
            nbytes: Extent. May be 0.
            read: Called as `read(address, nbytes)` for this range, or a larger one that overlaps it, after the pickle
                is complete; must keep the memory alive through the view it returns.
            space: "cpu", or the name of a device's own address space.
            compact: Called if nothing else of the message overlaps, to send these bytes instead; the rebuilder
                distinguishes the two by their length.
        """
        ...

    def attach(self, thing: object) -> None:
        """Add an object that the message refers to (a port, a handle) to `Encoded.attachments`.

        A reducer must have no other side effect: encoding may be repeated to find out what cannot be serialised.
        """
        ...


Reduced = str | tuple[Any, ...]
Reducer = Callable[[Any, Any], Any]
"""Called with the object and the `Sink`; returns what `__reduce__` may return, or `NotImplemented` to leave the
object to pickle."""


class ReducerEntry(NamedTuple):
    """A reducer, and whether it serves subclasses of the class that it is registered for."""

    reducer: Reducer
    subclasses: bool


_by_class: dict[type, ReducerEntry] = {}
_by_name: dict[str, ReducerEntry] = {}
_generation = [0]  # incremented by each registration, so that encoders clear their caches


def register_reducer(cls: type | str, reducer: Reducer, *, subclasses: bool = False) -> None:
    """Let `reducer` encode the objects of a class in every message of this process.

    Args:
        cls: The class, or its dotted name ("torch.Tensor").
        reducer: See `Reducer`.
        subclasses: Whether it also serves subclasses that have no reducer of their own.
    """
    if isinstance(cls, str):
        _by_name[cls] = ReducerEntry(reducer, subclasses)
    else:
        _by_class[cls] = ReducerEntry(reducer, subclasses)
    _generation[0] += 1


class ReducerTable:
    """The reducers of one encoder: its own first, then those of the process; cached by class."""

    def __init__(self, own: dict[type, ReducerEntry]) -> None:
        self._own = own
        self._generation = -1
        self.found: dict[type, Reducer | None] = {}

    def refresh(self) -> None:
        """Clear the cache if a reducer was registered since, or if short-lived classes have filled it."""
        if self._generation != _generation[0] or len(self.found) > limits.REDUCER_CACHE_CLASSES:
            self._generation = _generation[0]
            self.found.clear()

    def find(self, cls: type) -> Reducer | None:
        """Return the reducer for exactly `cls`, or None, and cache it."""
        reducer = self._search(cls)
        self.found[cls] = reducer
        return reducer

    def _search(self, cls: type) -> Reducer | None:
        for base in cls.__mro__:
            entry = self._own.get(base) or _by_class.get(base) or _by_name.get(f"{base.__module__}.{base.__qualname__}")
            if entry is not None and (entry.subclasses or base is cls):
                return entry.reducer
        return None


# ---- values that refer to objects which are not here yet -------------------------------------------------------------


class NotYet(BaseException):
    """A value cannot be decoded yet: its decoder waits and retries. Not an `Exception`, because the value is valid.

    Attributes:
        wait: Waits until a retry makes sense; raises if it never will.
    """

    def __init__(self, wait: Callable[[], Awaitable[object]]) -> None:
        super().__init__()
        self.wait = wait
