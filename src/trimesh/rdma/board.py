"""The words of a publication that everybody looks at: which version is the latest, where it lies, who has pinned what.

    header   latest version, its slot, 1 when closed
    slots    version (0: none), place, generation and secret of its grant, bytes of it, bytes of its layout
    cells    a word for each reader and slot: the version that the reader has pinned there, or 0

Pinning is safe without a word from the owner, because both sides write first and look then: a reader puts the version
into its cell, and looks whether the slot still has it; the publisher takes the version out of the slot, and looks
whether a cell still has it. Both write by `Kind.SWAP`, which everybody sees in one order.

    BO-1 A slot that is pinned is not written to: `publish` puts its version back and takes another slot, or waits.
    BO-2 A reader that has seen its version in the slot after writing its cell has it pinned.
"""

from __future__ import annotations

import struct
from typing import Final

import attrs

from trimesh import limits
from trimesh._transport.mover import Grant
from trimesh.errors import ProtocolError

WORD: Final = 8

_HEADER: Final = struct.Struct("<QQQQ")
_SLOT: Final = struct.Struct("<QIII4x16sQQ8x")

HEAD_BYTES: Final = _HEADER.size + limits.PUBLISHED_SLOTS_MAX * _SLOT.size
"""Header and slots: what a reader reads at once."""

BOARD_BYTES: Final = HEAD_BYTES + limits.PUBLISHED_READERS_MAX * limits.PUBLISHED_SLOTS_MAX * WORD


@attrs.frozen
class Slot:
    """Where one version lies.

    Attributes:
        version: From 1; 0 while nothing is to be read there.
        grant: Its memory.
        block: Number of the block that it is.
        nbytes: What is used of it.
        layout_nbytes: How much of that, at the start, is the layout.
    """

    version: int
    grant: Grant
    block: int
    nbytes: int
    layout_nbytes: int


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
        version, place, generation, block, secret, nbytes, layout = found
        if version and not 0 < layout <= nbytes:
            raise ProtocolError(f"a layout must lie in its slot, got {layout} bytes of {nbytes}")
        slots.append(Slot(version, Grant(place, generation, secret), block, nbytes, layout))
    return Head(latest, is_closed == 1, tuple(slots))


def write_header(board: memoryview, latest: int, *, is_closed: bool) -> None:
    """Say which version is the latest."""
    _HEADER.pack_into(board, 0, latest, is_closed, 0, 0)


def write_slot(board: memoryview, index: int, slot: Slot) -> None:
    """Say where a version lies, all but the version itself."""
    grant = slot.grant
    at = offset_of_slot(index) + WORD
    packed = _SLOT.pack(0, grant.place, grant.generation, slot.block, grant.secret, slot.nbytes, slot.layout_nbytes)
    board[at : at + _SLOT.size - WORD] = packed[WORD:]


def offset_of_slot(index: int) -> int:
    """Return where the version of a slot stands."""
    return _HEADER.size + index * _SLOT.size


def offset_of_cell(reader: int, slot: int) -> int:
    """Return where a reader writes what it has pinned."""
    return HEAD_BYTES + (reader * limits.PUBLISHED_SLOTS_MAX + slot) * WORD


def pinned(board: memoryview, slot: int, readers: int) -> set[int]:
    """Return the versions that the first `readers` readers have pinned in a slot."""
    if not readers:
        return set()
    cells = board[offset_of_cell(0, slot) : offset_of_cell(readers - 1, slot) + WORD].cast("Q")
    return set(cells.tolist()[:: limits.PUBLISHED_SLOTS_MAX]) - {0}


def clear_cell(board: memoryview, reader: int, slot: int) -> None:
    """Forget what a reader had pinned in a slot."""
    at = offset_of_cell(reader, slot)
    board[at : at + WORD] = bytes(WORD)
