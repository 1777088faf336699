"""Incoming large messages, whose chunks are copied into the receiver's memory as they arrive.

PURE but for memory. Data of a peer is never trusted; `outgoing` defines chunks.

    KB-1 Only memory that nothing else refers to is reused (`ReusableBytes`).
    KB-2 The first buffer of a size is not kept: it may be the only one.
    KB-3 Kept memory is at most `limits.KEPT_BYTES_MAX`, whether or not the program still refers to it; the oldest
         buffer makes room.
    KB-4 A buffer not reused for `limits.KEPT_BYTES_SECONDS` is released; the owner of the clock calls `expire`.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from trimesh import limits
from trimesh._native import lib
from trimesh._native.lib import Library
from trimesh._transport.messages.casts import kept_bytes, padding
from trimesh._transport.messages.outgoing import CHUNK, IMMUTABLE, Piece
from trimesh._wire.memory import ReusableBytes, can_be_reused, new_bytes, new_pages


def read_piece(head: memoryview) -> tuple[int, Piece]:
    """Return the number of the message that a piece belongs to, and the kind of the piece.

    Raises:
        AssemblyError: The head of the piece is invalid.
    """
    if len(head) != CHUNK.size:
        raise AssemblyError(f"a chunk whose head has {len(head)} bytes, not {CHUNK.size}")
    number, kind = CHUNK.unpack(head)
    if kind > max(Piece):
        raise AssemblyError(f"a chunk of unknown kind {kind}, above {max(Piece)}")
    return number, Piece(kind)


def read_table(table: memoryview) -> tuple[int, ...]:
    """Return the words of a table.

    Raises:
        AssemblyError: Its size is invalid.
    """
    if table.nbytes % 8 or table.nbytes > 8 * limits.BODIES_MAX:
        raise AssemblyError(f"a large message whose table has {table.nbytes} bytes, not 8 a body")
    return struct.unpack(f"<{table.nbytes // 8}Q", table)


def read_head(head: memoryview) -> bytes:
    """Return the head of a large message.

    Raises:
        AssemblyError: It is too long.
    """
    if head.nbytes > limits.HEAD_BYTES_MAX:
        raise AssemblyError(f"a large message whose head has {head.nbytes} bytes, above limits.HEAD_BYTES_MAX")
    return bytes(head)


class Arrival:
    """One large message, of which chunks have arrived.

    Args:
        head: Head of the large message.
        words: Its table.
        kept: Allocates `bytes`.
    """

    def __init__(self, head: bytes, words: tuple[int, ...], kept: KeptBytes) -> None:
        self.head: Final = head
        self._words: Final = words
        self._kept: Final = kept
        self._copy: Copy = copy_plainly
        self._missing = sum(word & ~IMMUTABLE for word in words)
        if self._missing > limits.MESSAGE_BYTES_MAX:
            raise AssemblyError(f"a message of {self._missing} bytes, above limits.MESSAGE_BYTES_MAX")
        self._bodies: list[memoryview] = []
        self._open = memoryview(b"")
        self._at = 0

    def add(self, piece: memoryview) -> None:
        """Copy the next bytes. A body is allocated when its first byte has arrived."""
        if piece.nbytes > self._missing:
            raise AssemblyError(f"more body bytes than announced, {piece.nbytes} in place of {self._missing}")
        self._missing -= piece.nbytes
        at = 0
        while at < piece.nbytes:
            while self._at == self._open.nbytes:
                self._begin()
            n = min(self._open.nbytes - self._at, piece.nbytes - at)
            self._copy(self._open[self._at : self._at + n], piece[at : at + n])
            self._at += n
            at += n

    def _begin(self) -> None:
        """Allocate the next body."""
        word = self._words[len(self._bodies)]
        size = word & ~IMMUTABLE
        self._at = 0
        if not word & IMMUTABLE:
            self._open, self._copy = allocate(size), copy_plainly
            self._bodies.append(self._open)
            return
        try:
            whole, self._open, self._copy = self._kept.new(size)
        except MemoryError as error:
            raise AssemblyError(f"a body of {size} bytes, which this process cannot allocate") from error
        self._bodies.append(memoryview(whole))

    @property
    def is_whole(self) -> bool:
        """True if all bytes have arrived."""
        return not self._missing

    def bodies(self) -> list[memoryview]:
        """Return the bodies of a whole message; those that were sent as `bytes` are views of new `bytes`."""
        while len(self._bodies) < len(self._words):
            self._begin()  # of size 0
        self._open = memoryview(b"")
        return self._bodies


class Arrivals:
    """All large messages of one link that have arrived in part.

    Args:
        kept: Allocates `bytes`; by default always new ones.
    """

    def __init__(self, kept: KeptBytes | None = None) -> None:
        self._by_number: Final[dict[int, Arrival]] = {}
        self._kept: Final = kept or KeptBytes()

    def take(self, head: memoryview, bodies: list[memoryview]) -> Arrival | None:
        """Add a chunk; return its message if that is complete.

        Raises:
            AssemblyError: The chunks do not fit each other.
        """
        number, piece = read_piece(head)
        if piece is Piece.FIRST:
            arrival = self._open(number, bodies)
        else:
            found = self._by_number.get(number)
            if found is None:
                raise AssemblyError(f"a chunk of message {number}, which has not begun")
            arrival = found
            for body in bodies:
                arrival.add(body)
        if not arrival.is_whole:
            return None
        del self._by_number[number]
        return arrival

    def _open(self, number: int, bodies: list[memoryview]) -> Arrival:
        if number in self._by_number or len(self._by_number) == limits.CHUNKED_MAX:
            raise AssemblyError(
                f"the first chunk of message {number} again, or of more than limits.CHUNKED_MAX messages at a time"
            )
        if len(bodies) != 2:
            raise AssemblyError(f"the first chunk of a message with {len(bodies)} bodies, not its table and its head")
        arrival = self._by_number[number] = Arrival(read_head(bodies[1]), read_table(bodies[0]), self._kept)
        return arrival


# ---- assembly --------------------------------------------------------------------------------------------------------

# Assembles the bodies of one message from pieces, each copied once into memory that the receiver owns.
#
# PURE but for memory. The sizes that a peer announced are checked again: it can still change the memory of the table.

_MAPPED_BYTES_MIN: Final = 1 << 20
"""From this size on a body gets its own pages. They cost nothing before they are written, so a peer that announces much
and sends little uses no memory; and no memory is cleared twice."""


_WORD: Final = struct.Struct("<Q")
_IN_SEGMENT: Final = 1 << 63
"""A word of the table from this value on names a body in shared memory."""


class AssemblyError(Exception):
    """Received data contradicts its announcement, or is invalid; the text completes "the peer sent"."""


def allocate(size: int) -> memoryview:
    """Return private, writable memory."""
    if size < _MAPPED_BYTES_MIN:
        return memoryview(bytearray(size))
    try:
        return memoryview(new_pages(size))
    except (OSError, ValueError, OverflowError, MemoryError) as error:
        raise AssemblyError(f"a body of {size} bytes, which this process cannot allocate ({error})") from error


def one_body(view: memoryview, at: int, piece: memoryview, take: Callable[[int], memoryview]) -> memoryview:
    """Return the body of a whole message with one body, as an `Assembly` would.

    Args:
        view: Memory that holds the table.
        piece: All body bytes that came with it.
        take: As for an `Assembly`.
    """
    word = _WORD.unpack_from(view, at)[0]
    if word == len(piece):
        return memoryview(bytearray(piece))
    if word >= _IN_SEGMENT and not piece:
        return take(word)
    raise AssemblyError(f"a body of {len(piece)} bytes, not of the announced {word if word < _IN_SEGMENT else 0}")


class Assembly:
    """One message that arrives in pieces.

    Args:
        sizes: Table of the bodies, uint64 little endian each: a size, or a name for `take`.
        piece: The first body bytes; may be all of them.
        take: Returns the body that a word of the table names.

    Attributes:
        head: A copy of the head, set while more pieces are awaited.
        is_chunk: Whether it is a chunk of a larger message.
    """

    __slots__ = ("_announced", "_at", "_bodies", "head", "is_chunk")

    def __init__(self, sizes: memoryview, piece: memoryview, take: Callable[[int], memoryview]) -> None:
        words = struct.unpack(f"<{len(sizes) // 8}Q", sizes)
        total = sum(word for word in words if word < _IN_SEGMENT)
        if total > limits.MESSAGE_BYTES_MAX:
            raise AssemblyError(f"a message of {total} bytes, above limits.MESSAGE_BYTES_MAX")
        self.head = b""
        self.is_chunk = False
        self._announced = [word if word < _IN_SEGMENT else take(word) for word in words]
        self._at = 0
        self._bodies: list[memoryview] = []
        if total == len(piece):  # whole: copy without zeroing first
            at = 0
            for one in self._announced:
                if isinstance(one, int):
                    self._bodies.append(memoryview(bytearray(piece[at : at + one])))
                    at += one
                else:
                    self._bodies.append(one)
            self._at = len(self._bodies[-1]) if self._bodies else 0
        else:
            self.add(piece)

    def add(self, piece: memoryview) -> None:
        """Copy the next body bytes. A body is allocated when its first byte has arrived, not when it is announced."""
        at = 0
        while at < len(piece):
            body = self._open_body()
            n = min(len(body) - self._at, len(piece) - at)
            body[self._at : self._at + n] = piece[at : at + n]
            self._at += n
            at += n

    def _open_body(self) -> memoryview:
        """Return the body that the next byte belongs to."""
        while not self._bodies or self._at == len(self._bodies[-1]):
            if len(self._bodies) == len(self._announced):
                raise AssemblyError("more body bytes than announced")
            one = self._announced[len(self._bodies)]
            self._bodies.append(allocate(one) if isinstance(one, int) else one)
            self._at = 0 if isinstance(one, int) else len(one)
        return self._bodies[-1]

    def finish(self) -> list[memoryview]:
        """Return the bodies; all bytes must have arrived."""
        rest = self._announced[len(self._bodies) :]
        missing = any(isinstance(one, int) and one for one in rest)
        if missing or (self._bodies and self._at not in (0, len(self._bodies[-1]))):
            raise AssemblyError("fewer body bytes than announced")
        return self._bodies + [memoryview(bytearray()) if isinstance(one, int) else one for one in rest]


# ---- kept memory: large `bytes` that the program no longer refers to are reused for arriving ones --------------------

# A `bytes` owns its memory, so each arriving one would take new pages, which the system clears first: that takes longer
# than the copy into them. A `bytes` without other references is as good as a new one, and its pages are present.
#
# PURE but for memory.

Copy = Callable[[memoryview, memoryview], None]
"""Copies the second argument into the first, of the same size."""


def copy_plainly(into: memoryview, data: memoryview) -> None:
    """Copy through the CPU caches: the fastest way into new pages, which clearing has just brought into the caches."""
    into[:] = data


class KeptBytes:
    """Allocates `bytes` for arriving bodies.

    Args:
        tell: Called when the first buffer is kept; without it, none are.
        copy: Copies into memory that is larger than the caches and whose pages are present.
    """

    def __init__(self, tell: Callable[[], None] | None = None, copy: Copy = copy_plainly) -> None:
        self._tell: Final = tell
        self._copy: Final = copy
        self._sizes: Final[deque[int]] = deque(maxlen=limits.KEPT_SIZES_MAX)
        self._kept: dict[ReusableBytes, bool] = {}  # oldest first; whether it was used since the last `expire`

    @property
    def is_empty(self) -> bool:
        return not self._kept

    def new(self, size: int) -> tuple[bytes, memoryview, Copy]:
        """Return a `bytes` of undefined contents, its memory, to be filled before it is used, and a copy function.

        Raises:
            MemoryError: There is not enough memory.
        """
        if self._tell is None or not limits.KEPT_BYTES_MIN <= size <= limits.KEPT_BYTES_MAX:
            return *new_bytes(size), copy_plainly
        found = next((one for one in self._kept if one.size == size and one.is_free), None)
        if found is not None:
            del self._kept[found]
            self._kept[found] = True
            return *found.take(), self._copy
        whole, memory = new_bytes(size)
        if size not in self._sizes:  # KB-2
            self._sizes.append(size)
        elif can_be_reused():
            self._keep(ReusableBytes(whole), self._tell)
        return whole, memory, copy_plainly

    def _keep(self, one: ReusableBytes, tell: Callable[[], None]) -> None:
        total = one.size + sum(other.size for other in self._kept)
        while total > limits.KEPT_BYTES_MAX:  # KB-3
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            total -= oldest.size
        was_empty = not self._kept
        self._kept[one] = True
        if was_empty:
            tell()

    def expire(self) -> None:
        """Release buffers not used since the last call (KB-4)."""
        self._kept = {one: False for one, is_used in self._kept.items() if is_used}

    def clear(self) -> None:
        """Release all buffers."""
        self._kept.clear()


# ---- bodies in shared memory: lent by the native library, returned when the last view is gone ------------------------

# A view may end anywhere: in another thread, inside the garbage collector, when the interpreter ends. So its finalizer
# only appends to a queue; the transport's task returns the memory with its next flush.

_SIZE_MASK: Final = (1 << 40) - 1
"""Bits of the size in a word that names a body in shared memory."""


class Lending:
    """All bodies that one bus has lent.

    Attributes:
        returned: Bodies whose last view is gone: link, word, memory, mapped bytes.
    """

    def __init__(self, library: Library, bus: Any) -> None:
        self.returned: Final[deque[tuple[int, int, Any, int]]] = deque()
        self._ffi = library.ffi
        self._lib = library.lib
        self._bus = bus
        self._closed = False
        self._body = library.ffi.new("tm_body *")

    def take(self, link: int, word: int) -> memoryview:
        """Return the memory of a body, writable and private.

        Raises:
            AssemblyError: The peer named memory that it must not name, or that does not exist.
        """
        code = self._lib.tm_body_take(self._bus, link, word, self._body)
        if code == lib.ERR_PEER:
            info = self._ffi.new("tm_link_info *")
            lib.check(self._lib.tm_link_get_info(self._bus, link, info), "querying a link")
            raise AssemblyError(self._ffi.string(info.detail).decode().removeprefix("the peer sent "))
        lib.check(code, "mapping a body")
        memory, mapped = self._body.bytes, int(self._body.mapped)
        note = (link, word, memory, mapped)

        def gone(_: Any) -> None:
            self.returned.append(note)
            if self._closed:
                self.give_back()  # no flush follows

        # The view references the buffer, and the buffer the owner, whose finalizer is `gone`.
        owner = self._ffi.gc(memory, gone)
        return memoryview(self._ffi.buffer(owner, word & _SIZE_MASK))

    def give_back(self) -> None:
        """Return memory that is no longer viewed."""
        while self.returned:
            try:
                link, word, memory, mapped = self.returned.popleft()
            except IndexError:  # another thread was faster
                return
            lib.check(self._lib.tm_body_give_back(self._bus, link, word, memory, mapped), "returning a body")

    def close(self) -> None:
        """Note that the bus is gone. Memory still viewed is unmapped when its last view ends."""
        self._closed = True
        self._bus = self._ffi.NULL
        self.give_back()


# ---- host memory -----------------------------------------------------------------------------------------------------

# Bodies in memory that another process of this host keeps; their location comes from the sender, on another host.
#
# Whatever a peer names, only sealed memory that was made for a cast is mapped: the name of that memory contains a
# random number, which the location repeats.

WHERE: Final = struct.Struct("<IIQQ")
"""Location of bodies: pid of the process that keeps them, its descriptor, size in bytes, number of the memory."""

SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
"""Seals that fix size and contents of memory."""


class HostMemoryError(Exception):
    """The memory cannot be mapped by this process."""


def memory_name(drawn: int) -> str:
    """Return the name of the memory with a random number."""
    return f"trimesh-cast-{drawn:016x}"


def map_bodies(where: bytes, words: Sequence[int]) -> list[memoryview]:
    """Map the bodies of a message: private, writable except those sent as a `bytes`.

    Args:
        where: Location, packed by `WHERE`.
        words: The table of the message, see `outgoing`.

    Raises:
        HostMemoryError: This process cannot map them, so they must be sent.
        AssemblyError: `where` is malformed, or does not fit the table.
    """
    if len(where) != WHERE.size:
        raise AssemblyError(f"an offer of bodies whose location has {len(where)} bytes, not {WHERE.size}")
    pid, fd, size, drawn = WHERE.unpack(where)
    sizes = [word & ~IMMUTABLE for word in words]
    if size != kept_bytes(sizes) or not 0 < size <= limits.HOST_CAST_BYTES:
        raise AssemblyError(f"an offer of {size} bytes, which does not fit its table or limits.HOST_CAST_BYTES")
    try:
        whole = memoryview(_map(f"/proc/{pid}/fd/{fd}", size, memory_name(drawn)))
        return _cut(whole, words)
    except (OSError, ValueError, MemoryError) as error:
        raise HostMemoryError(str(error)) from error


def _map(path: str, size: int, name: str) -> mmap.mmap:
    wanted = f"/memfd:{name} (deleted)"
    if os.readlink(path) != wanted:  # checked before opening: opening a pipe may block
        raise HostMemoryError(f"the descriptor must be of memory {name}, got another file")
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        is_same = os.readlink(f"/proc/self/fd/{fd}") == wanted and os.fstat(fd).st_size == size
        if not is_same or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise HostMemoryError(f"the memory {name} must have {size} bytes and be sealed, got another one")
        return mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)


def _cut(whole: memoryview, words: Sequence[int]) -> list[memoryview]:
    bodies: list[memoryview] = []
    at = 0
    for word in words:
        size = word & ~IMMUTABLE
        body = whole[at : at + size]
        at += size + padding(size)
        if not size:
            body = memoryview(bytearray())
        elif word & IMMUTABLE:  # a `bytes` owns its memory
            fresh, memory = new_bytes(size)
            memory[:] = body
            body = memoryview(fresh)
        bodies.append(body)
    return bodies
