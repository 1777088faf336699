"""The words of a publication that everybody looks at: which version is the latest, where it lies, who has pinned what.

    header   latest version, its slot, 1 when closed
    slots    version (0: none), place, generation and secret of its grant, bytes of it, bytes of its layout, and of what
             readers with an RDMA adapter need besides, which follows the layout
    rows     for each reader: its lease, and a cell for each slot: what it has pinned there, or 0

Pinning is safe without a word from the owner, because both sides write first and look then: a reader puts the version
into its cell, and looks whether the slot still has it; the publisher takes the version out of the slot, and looks
whether a cell still has it. Both write by `Kind.SWAP`, which everybody sees in one order.

    BO-1 A slot that is pinned is not written to: `publish` puts its version back and takes another slot, or waits.
    BO-2 A reader that has seen its version in the slot after writing its cell has it pinned, for as long as its row has
         its lease.
    BO-3 A process that counts as ended may live: its link was cut. The publisher takes its lease out of its row before
         it forgets what is pinned there, and never gives that lease again. So a reader that finds lease and pin in its
         row after it has copied something has copied what it had pinned; and what it writes later, to cells that
         belong to somebody else by then, does not count, for a pin has the lease in it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import attrs

from trimesh import limits
from trimesh._transport.mover import Grant
from trimesh.errors import ProtocolError

WORD: Final = 8

_VERSION_BITS: Final = 40
"""Of a pin, the rest is its lease. At a thousand versions a second they last for 34 years."""

LEASE_MAX: Final = (1 << 64 - _VERSION_BITS) - 1
"""So many processes may read one publication, one after the other: 16 million."""

_HEADER: Final = struct.Struct("<QQQQ")
_SLOT: Final = struct.Struct("<QIIII16sQQ8x")

HEAD_BYTES: Final = _HEADER.size + limits.PUBLISHED_SLOTS_MAX * _SLOT.size
"""Header and slots: what a reader reads at once."""

_ROW_WORDS: Final = 1 + limits.PUBLISHED_SLOTS_MAX

ROW_BYTES: Final = _ROW_WORDS * WORD
"""Lease and cells: what a reader reads to see that its pins still hold."""

BOARD_BYTES: Final = HEAD_BYTES + limits.PUBLISHED_READERS_MAX * ROW_BYTES


@attrs.frozen
class Slot:
    """Where one version lies.

    Attributes:
        version: From 1; 0 while nothing is to be read there.
        grant: Its memory.
        block: Number of the block that it is.
        nbytes: What is used of it.
        layout_nbytes: How much of that, at the start, is the layout.
        exported_nbytes: How much after that is `Grant.exported`; here `grant` has none.
    """

    version: int
    grant: Grant
    block: int
    nbytes: int
    layout_nbytes: int
    exported_nbytes: int


@attrs.frozen
class Head:
    """What a reader has read.

    Attributes:
        latest: The latest version, or 0.
        is_closed: Whether there will be no other.
        slots: Where versions lie.
    """

    latest: int
    is_closed: bool
    slots: tuple[Slot, ...]

    def find(self, version: int) -> int | None:
        """Return the slot of a version, or None."""
        if version < 1:
            return None  # what is in an empty slot is no version
        return next((index for index, slot in enumerate(self.slots) if slot.version == version), None)


def read_head(data: bytes | bytearray | memoryview) -> Head:
    """Return what the first `HEAD_BYTES` of a board say.

    Raises:
        ProtocolError: They cannot be those of a board.
    """
    latest, is_closed, _, __ = _HEADER.unpack_from(data)
    slots = list[Slot]()
    for index in range(limits.PUBLISHED_SLOTS_MAX):
        found = _SLOT.unpack_from(data, offset_of_slot(index))
        version, place, generation, block, exported, secret, nbytes, layout = found
        if version and not (0 < layout <= nbytes - exported and exported <= limits.EXPORT_BYTES_MAX):
            raise ProtocolError(f"a layout must lie in its slot, got {layout} and {exported} bytes of {nbytes}")
        slots.append(Slot(version, Grant(place, generation, secret), block, nbytes, layout, exported))
    return Head(latest, is_closed == 1, tuple(slots))


def write_header(board: memoryview, latest: int, *, is_closed: bool) -> None:
    """Say which version is the latest."""
    _HEADER.pack_into(board, 0, latest, is_closed, 0, 0)


def write_slot(board: memoryview, index: int, slot: Slot) -> None:
    """Say where a version lies, all but the version itself."""
    grant = slot.grant
    at = offset_of_slot(index) + WORD
    name = (grant.place, grant.generation, slot.block, slot.exported_nbytes, grant.secret)
    packed = _SLOT.pack(0, *name, slot.nbytes, slot.layout_nbytes)
    board[at : at + _SLOT.size - WORD] = packed[WORD:]


def offset_of_slot(index: int) -> int:
    """Return where the version of a slot stands."""
    return _HEADER.size + index * _SLOT.size


def offset_of_row(reader: int) -> int:
    """Return where the row of a reader is."""
    return HEAD_BYTES + reader * ROW_BYTES


def offset_of_cell(reader: int, slot: int) -> int:
    """Return where a reader writes what it has pinned."""
    return offset_of_row(reader) + (1 + slot) * WORD


def pin_word(lease: int, version: int) -> int:
    """Return what a reader writes to pin a version."""
    return lease << _VERSION_BITS | version


def lease_of(word: int) -> int:
    """Return whose pin it is that was found in a cell."""
    return word >> _VERSION_BITS


def holds(row: bytes | bytearray | memoryview, lease: int, slot: int, version: int) -> bool:
    """Return whether the row of a reader says that its pin holds (BO-3)."""
    words = memoryview(row).cast("Q")
    return words[0] == lease and words[1 + slot] == pin_word(lease, version)


def pinned(board: memoryview, slot: int, leases: Sequence[int]) -> set[int]:
    """Return the versions that readers have pinned in a slot, by the leases that their rows have; 0 for none."""
    if not leases:
        return set()
    cells = board[offset_of_cell(0, slot) : offset_of_cell(len(leases) - 1, slot) + WORD].cast("Q")
    words = cells.tolist()[::_ROW_WORDS]
    of_leases = zip(words, leases, strict=True)
    return {word - pin_word(lease, 0) for word, lease in of_leases if lease and lease_of(word) == lease} - {0}


def write_lease(board: memoryview, reader: int, lease: int) -> None:
    """Give a row to a reader, or take it away by lease 0, before anything else of it is changed (BO-3)."""
    at = offset_of_row(reader)
    board[at : at + WORD] = lease.to_bytes(WORD, "little")


def clear_cells(board: memoryview, reader: int) -> None:
    """Forget what a reader had pinned."""
    board[offset_of_cell(reader, 0) : offset_of_row(reader + 1)] = bytes(ROW_BYTES - WORD)
