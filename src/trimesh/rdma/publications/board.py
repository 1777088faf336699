"""Board of a publication, in shared memory: its latest version, the slots of versions, and the pins of readers.

    header   latest version; state (0 open, 1 closed, 2 last version published); number of the publication
    slots    version (0: none); place, generation and secret of its grant; sizes in bytes of the version, its layout,
             and the fields for readers with an RDMA adapter, which follow the layout
    rows     for each reader: its process, its lease, and a cell for each slot: the version pinned there, or 0

A reader reads everything from the header to its own row in one transfer. The first readers have the first rows.

Pinning is safe without a message to the owner, because both sides write first and then check. A reader writes the
version into its cell, then checks that the slot still has it. The publisher removes the version from the slot, then
checks that no cell has it. Both write by `TransferKind.SWAP`, whose writes all processes see in one order.

    BO-1 A slot that is pinned is not written to: `publish` puts its version back and takes another slot, or waits.
    BO-2 A reader that has seen its version in the slot after writing its cell has had it pinned since then, for as long
         as its row has its lease.
    BO-3 A process that counts as ended may live: its link was cut. The publisher changes the lease of its row before it
         forgets the pins there, and the lease only grows. So a reader that finds lease and pin in its row after a
         copy has copied the version that it had pinned. Its later writes, to cells that belong to another reader by
         then, do not count, for a pin contains the lease.
    BO-4 A reader takes a row by swapping itself for 0, by `TransferKind.SWAP`, alone; then it reads the lease, and
         after that checks again that it owns the row. The publisher takes a row back in this order: no reader may
         have it, another lease, empty cells, any may have it. So a lease that a reader reads while it owns the row
         is its own. It writes to no cell before it knows that.
    BO-5 When the publisher has ended, nothing can be pinned, and pinned memory stays unchanged: no process is left that
         writes to it. A reader that has mapped header and row still sees whether its pin held to the end, and whether
         the memory belonged to this publication: a closed one gives its memory back, for reuse by others.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, Final

import attrs
import msgspec

from trimesh import limits
from trimesh._transport.interface import Grant
from trimesh.errors import ProtocolError
from trimesh.rdma.memory.local import memory_of

WORD: Final = 8

_VERSION_BITS: Final = 40
"""Bits of a pin that hold its version; the rest hold its lease. At 1000 versions a second they last for 34 years."""

VERSION_MAX: Final = (1 << _VERSION_BITS) - 1

LEASE_MAX: Final = (1 << 64 - _VERSION_BITS) - 1
"""Number of processes that can have one row, one after the other: 16 million."""

NO_READER: Final = (1 << 64) - 1
"""Marks a row that no process can take: it is being taken back, or its leases are used up."""

_HEADER: Final = struct.Struct("<QQQQ")
_SLOT: Final = struct.Struct("<QIIII16sQQ8x")

HEAD_BYTES: Final = _HEADER.size + limits.PUBLISHED_SLOTS_MAX * _SLOT.size
"""Size of header and slots."""

_ROW_WORDS: Final = 2 + limits.PUBLISHED_SLOTS_MAX

ROW_BYTES: Final = _ROW_WORDS * WORD
"""Size of a row (process, lease and cells), which a reader reads to check that its pins still hold."""

BOARD_BYTES: Final = HEAD_BYTES + limits.PUBLISHED_READERS_MAX * ROW_BYTES


class BoardState(IntEnum):
    """State of a publication."""

    OPEN = 0
    CLOSED = 1
    LAST = 2


class Slot(msgspec.Struct, frozen=True):
    """Location of one version.

    Attributes:
        version: From 1; 0 while the slot is empty.
        grant: Its memory.
        block: Number of its block.
        nbytes: Bytes in use.
        layout_nbytes: Size of the layout, at the start of these bytes.
        exported_nbytes: Size of `Grant.exported`, which follows the layout; `grant` lacks it.
    """

    version: int
    grant: Grant
    block: int
    nbytes: int
    layout_nbytes: int
    exported_nbytes: int


_EMPTY: Final = Slot(0, Grant(0, 0, b""), 0, 0, 0, 0)


class Head(msgspec.Struct, frozen=True):
    """Decoded header and slots of a board.

    Attributes:
        latest: The latest version, or 0.
        is_closed: True if a reader that begins now can pin nothing.
        is_last: True if there will be no other version.
        number: Of the publication, in its process.
        slots: Locations of versions.
    """

    latest: int
    is_closed: bool
    is_last: bool
    number: int
    slots: tuple[Slot, ...]

    def find(self, version: int) -> int | None:
        for index, slot in enumerate(self.slots):
            if slot.version == version >= 1:  # 0 marks an empty slot
                return index
        return None


def read_head(data: bytes | bytearray | memoryview) -> Head:
    """Decode the first `HEAD_BYTES` of a board.

    Raises:
        ProtocolError: They are malformed.
    """
    latest, state, number, _ = _HEADER.unpack_from(data)
    slots = list[Slot]()
    for found in _SLOT.iter_unpack(memoryview(data)[_HEADER.size : HEAD_BYTES]):
        version, place, generation, block, exported, secret, nbytes, layout = found
        if not version:
            slots.append(_EMPTY)
            continue
        if not (0 < layout <= nbytes - exported and exported <= limits.EXPORT_BYTES_MAX):
            raise ProtocolError(f"a layout must fit into its slot, got {layout} and {exported} bytes of {nbytes}")
        slots.append(Slot(version, Grant(place, generation, secret), block, nbytes, layout, exported))
    return Head(latest, state == BoardState.CLOSED, state != BoardState.OPEN, number, tuple(slots))


def write_header(board: memoryview, latest: int, state: BoardState, number: int) -> None:
    """Write the header: latest version, state, and number of the publication."""
    _HEADER.pack_into(board, 0, latest, state, number, 0)


def write_slot(board: memoryview, index: int, slot: Slot) -> None:
    """Write a slot, except for its version."""
    grant = slot.grant
    at = offset_of_slot(index) + WORD
    name = (grant.place, grant.generation, slot.block, slot.exported_nbytes, grant.secret)
    packed = _SLOT.pack(0, *name, slot.nbytes, slot.layout_nbytes)
    board[at : at + _SLOT.size - WORD] = packed[WORD:]


def offset_of_slot(index: int) -> int:
    """Return the offset of the version of a slot."""
    return _HEADER.size + index * _SLOT.size


def offset_of_row(reader: int) -> int:
    return HEAD_BYTES + reader * ROW_BYTES


def offset_of_cell(reader: int, slot: int) -> int:
    """Return the offset of a reader's cell for a slot."""
    return offset_of_row(reader) + (2 + slot) * WORD


def pin_word(lease: int, version: int) -> int:
    """Return the word that pins a version under a lease."""
    return lease << _VERSION_BITS | version


def lease_of(word: int) -> int:
    """Return the lease in the word of a cell."""
    return word >> _VERSION_BITS


def held_to_the_end(board: memoryview, number: int) -> bool:
    """Return whether an ended process's publication kept its memory to the end (BO-5)."""
    head = read_head(board[:HEAD_BYTES])
    return head.number == number and not head.is_closed


def holds(row: bytes | bytearray | memoryview, lease: int, slot: int, version: int) -> bool:
    """Return whether a reader's pin still holds, by its row (BO-3)."""
    words = memoryview(row).cast("Q")
    return words[1] == lease and words[2 + slot] == pin_word(lease, version)


def pinned(board: memoryview, slot: int, leases: Sequence[int]) -> set[int]:
    """Return the versions that readers have pinned in a slot, by the leases that their rows have."""
    return set(_pins_in(board, slot, leases).values())


def pins(board: memoryview, slot: int, leases: Sequence[int]) -> dict[int, int]:
    """Return the versions that readers have pinned in a slot, by their processes."""
    readers = readers_of(board[HEAD_BYTES:])
    return {readers[row]: version for row, version in _pins_in(board, slot, leases).items()}


def _pins_in(board: memoryview, slot: int, leases: Sequence[int]) -> dict[int, int]:
    """Return the version that each reader row has pinned in a slot."""
    cells = board[HEAD_BYTES:].cast("Q")[2 + slot :: _ROW_WORDS].tolist()
    return {
        row: word - pin_word(leases[row], 0)
        for row, word in enumerate(cells)
        if word and lease_of(word) == leases[row] and word != pin_word(leases[row], 0)
    }


def new_board(board: memoryview) -> list[int]:
    """Make an empty board; return the leases of its rows."""
    board[:] = bytes(BOARD_BYTES)
    leases = [1] * limits.PUBLISHED_READERS_MAX
    for row, lease in enumerate(leases):
        _write(board, offset_of_lease(row), lease)
    return leases


def offset_of_lease(reader: int) -> int:
    """Return the offset of the lease of a row."""
    return offset_of_row(reader) + WORD


def given_lease(row: memoryview) -> int:
    """Return the lease of a row."""
    return int(row.cast("Q")[1])


def readers_of(rows: bytes | bytearray | memoryview) -> list[int]:
    """Return the process of each row in the bytes after the head of a board; 0 and `NO_READER` stand for none."""
    found: list[int] = memoryview(rows).cast("Q")[::_ROW_WORDS].tolist()
    return found


def take_back(board: memoryview, reader: int, lease: int) -> None:
    """Take a row from a reader (BO-4).

    Args:
        board: The board.
        reader: The row.
        lease: The next lease of that row; above `LEASE_MAX` no reader gets it any more.
    """
    _write(board, offset_of_row(reader), NO_READER)
    _write(board, offset_of_lease(reader), lease)
    board[offset_of_cell(reader, 0) : offset_of_row(reader + 1)] = bytes(ROW_BYTES - 2 * WORD)
    if lease <= LEASE_MAX:
        _write(board, offset_of_row(reader), 0)


def _write(board: memoryview, at: int, word: int) -> None:
    board[at : at + WORD] = word.to_bytes(WORD, "little")


# ---- layout of the tensors of a publication: names, kinds, shapes and offsets ----------------------------------------

ALIGN_BYTES: Final = 64
"""Alignment of tensors: a cache line, and the widest vector load."""


class TensorEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Layout of one tensor.

    Attributes:
        name: Its name.
        kind: "torch", "numpy" or "bytes".
        dtype: In the spelling of its library; empty for bytes.
        shape: Its sizes.
        offset, nbytes: Its range in the slot.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def describe(self) -> str:
        return f"{self.dtype or 'bytes'} of shape {self.shape}"


@attrs.frozen
class Layout:
    """Layout of all tensors of a publication.

    Attributes:
        entries: By name, in order.
        head: The encoded layout, which comes first.
        nbytes: Total size.
    """

    entries: Mapping[str, TensorEntry]
    head: bytes
    nbytes: int


def layout_of(tensors: Mapping[str, object], room: int = 0) -> Layout:
    """Compute the layout of tensors.

    Args:
        tensors: By name.
        room: Bytes to leave free between the encoded layout and the first tensor.

    Raises:
        TypeError, ValueError: A tensor cannot be published; or there are none, or too many.
    """
    if not tensors:
        raise ValueError("at least one tensor must be published, got none")
    if len(tensors) > limits.PUBLISHED_TENSORS_MAX:
        raise ValueError(
            f"at most {limits.PUBLISHED_TENSORS_MAX} tensors can be published together, got {len(tensors)}"
        )
    described = dict[str, tuple[tuple[str, str, tuple[int, ...]], int]]()
    for name, data in tensors.items():
        if not isinstance(name, str):
            raise TypeError(f"names of published tensors must be strings, got {name!r}")
        nbytes = memory_of(data, f"the published tensor {name!r}").nbytes
        described[name] = (describe(data), nbytes)
    start = _aligned(len(_encode(described, 0)) + _SLACK_BYTES * len(described) + room)
    head = _encode(described, start)
    entries = {entry.name: entry for entry in _DECODER.decode(head)}
    last = list(entries.values())[-1]
    return Layout(entries, head, last.offset + last.nbytes)


def read_layout(data: bytes | bytearray | memoryview, nbytes: int) -> dict[str, TensorEntry]:
    """Decode the layout of a slot of `nbytes` bytes.

    Raises:
        ProtocolError: It is malformed.
    """
    try:
        entries = _DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"the layout of a publication cannot be read: {error}") from error
    for entry in entries:
        if not len(data) <= entry.offset < entry.offset + entry.nbytes <= nbytes:
            raise ProtocolError(f"a published tensor must lie in its slot, after the layout, got {entry}")
    return {entry.name: entry for entry in entries}


_DECODER: Final = msgspec.msgpack.Decoder(list[TensorEntry])

_SLACK_BYTES: Final = 9
"""Growth of the encoded layout when an offset that was written as 0 gets its value, at most."""


def _encode(described: Mapping[str, tuple[tuple[str, str, tuple[int, ...]], int]], start: int) -> bytes:
    entries = list[TensorEntry]()
    at = start
    for name, ((kind, dtype, shape), nbytes) in described.items():
        entries.append(TensorEntry(name, kind, dtype, shape, at if start else 0, nbytes))
        at = _aligned(at + nbytes)
    return msgspec.msgpack.encode(entries)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGN_BYTES) * ALIGN_BYTES


def describe(data: Any) -> tuple[str, str, tuple[int, ...]]:
    """Return kind, dtype and shape of an object that `memory_of` accepted."""
    module = type(data).__module__.partition(".")[0]
    if hasattr(data, "untyped_storage"):
        return "torch", str(data.dtype).removeprefix("torch."), tuple(data.shape)
    if module == "numpy":
        return "numpy", data.dtype.str, tuple(data.shape)
    return "bytes", "", (memoryview(data).nbytes,)
