"""The words that publisher and readers share."""

from __future__ import annotations

import pytest

from trimesh import limits
from trimesh._transport.interface import Grant
from trimesh.errors import ProtocolError
from trimesh.rdma.publications import board


def new_board() -> memoryview:
    words = memoryview(bytearray(b"\xff") * board.BOARD_BYTES)  # of memory that was used before
    board.new_board(words)
    return words


def leases_of(*first: int) -> list[int]:
    """Return the leases of all rows, of which a test needs the first."""
    return [*first, *(1 for _ in range(limits.PUBLISHED_READERS_MAX - len(first)))]


def set_version(words: memoryview, slot: int, version: int) -> None:
    at = board.offset_of_slot(slot)
    words[at : at + 8] = version.to_bytes(8, "little")


def test_slots_read_as_they_were_written() -> None:
    words = new_board()
    assert board.read_head(words).latest == 0
    assert board.read_head(words).find(0) is None
    one = board.Slot(7, Grant(1, 2, bytes(range(16))), 5, 1000, 64, 30)
    board.write_slot(words, 3, one)
    assert board.read_head(words).find(7) is None  # not before its version is there
    set_version(words, 3, 7)
    board.write_header(words, 7, board.BoardState.CLOSED, 4)

    head = board.read_head(words)

    assert (head.latest, head.is_closed, head.is_last, head.number) == (7, True, True, 4)
    assert (head.find(7), head.slots[3]) == (3, one)
    full = board.Slot(8, Grant(1, 2, bytes(16)), 5, 1 + limits.EXPORT_BYTES_MAX, 1, limits.EXPORT_BYTES_MAX)
    board.write_slot(words, 0, full)
    set_version(words, 0, 8)
    assert board.read_head(words).slots[:4:3] == (full, one)


def test_cells_and_leases_lie_apart_and_within_the_board() -> None:
    readers, slots = limits.PUBLISHED_READERS_MAX, limits.PUBLISHED_SLOTS_MAX
    offsets = {board.offset_of_cell(reader, slot) for reader in range(readers) for slot in range(slots)}
    offsets |= {board.offset_of_row(reader) for reader in range(readers)}
    offsets |= {board.offset_of_lease(reader) for reader in range(readers)}
    assert len(offsets) == readers * (slots + 2)
    assert min(offsets) == board.HEAD_BYTES
    assert max(offsets) + board.WORD == board.BOARD_BYTES
    assert all(offset % board.WORD == 0 for offset in offsets)


def write_pin(words: memoryview, reader: int, slot: int, word: int) -> None:
    at = board.offset_of_cell(reader, slot)
    words[at : at + 8] = word.to_bytes(8, "little")


def row_of(words: memoryview, reader: int) -> memoryview:
    at = board.offset_of_row(reader)
    return words[at : at + board.ROW_BYTES]


def test_pins_are_found_in_the_cells_of_all_readers() -> None:
    words = new_board()
    leases = leases_of(11, 12, 13, 14)
    for reader, slot, version in (0, 1, 5), (2, 1, 6), (2, 0, 9), (3, 1, 7), (1, 1, 0):  # 0 is none
        write_pin(words, reader, slot, board.pin_word(leases[reader], version))
    assert board.pinned(words, 1, leases) == {5, 6, 7}
    assert board.pinned(words, 0, leases) == {9}
    assert board.pinned(words, 2, leases) == set()


def test_pins_of_another_lease_do_not_count() -> None:
    """BO-3."""
    words = new_board()
    write_pin(words, 0, 1, board.pin_word(3, 5))
    write_pin(words, 1, 1, board.pin_word(4, 6))
    assert board.pinned(words, 1, leases_of(5, 4)) == {6}
    assert board.pinned(words, 1, leases_of(4, 5)) == set()
    assert board.lease_of(board.pin_word(board.LEASE_MAX, 6)) == board.LEASE_MAX


def write_word(words: memoryview, at: int, word: int) -> None:
    words[at : at + 8] = word.to_bytes(8, "little")


def test_pin_holds_while_its_row_has_lease_and_pin() -> None:
    """BO-3."""
    words = new_board()
    write_word(words, board.offset_of_lease(3), 7)
    assert not board.holds(row_of(words, 3), 7, 1, 20)
    write_pin(words, 3, 1, board.pin_word(7, 20))
    assert board.holds(row_of(words, 3), 7, 1, 20)
    assert not board.holds(row_of(words, 3), 7, 2, 20)
    assert not board.holds(row_of(words, 3), 7, 1, 21)
    write_word(words, board.offset_of_lease(3), 8)
    assert not board.holds(row_of(words, 3), 7, 1, 20)
    assert not board.holds(row_of(words, 3), 8, 1, 20)


def test_row_that_is_taken_back_is_empty_and_has_another_lease() -> None:
    """BO-4: and nobody gets it any more when its leases are used up."""
    words = new_board()
    for reader in 2, 3:
        write_word(words, board.offset_of_row(reader), 70 + reader)
        write_pin(words, reader, 1, board.pin_word(1, 20))
    assert board.readers_of(words[board.HEAD_BYTES :])[:5] == [0, 0, 72, 73, 0]

    board.take_back(words, 2, board.LEASE_MAX)
    assert board.readers_of(words[board.HEAD_BYTES :])[:5] == [0, 0, 0, 73, 0]
    board.take_back(words, 2, 2)

    assert board.readers_of(words[board.HEAD_BYTES :])[:5] == [0, 0, 0, 73, 0]
    assert not board.holds(row_of(words, 2), 1, 1, 20)
    assert board.pinned(words, 1, leases_of(1, 1, 2)) == {20}  # of the other reader
    board.take_back(words, 3, board.LEASE_MAX + 1)
    assert board.readers_of(words[board.HEAD_BYTES :])[:5] == [0, 0, 0, board.NO_READER, 0]
    assert board.pinned(words, 1, leases_of(1, 1, 2, board.LEASE_MAX + 1)) == set()


@pytest.mark.parametrize(
    ("nbytes", "layout", "exported"),
    [(10, 11, 0), (10, 0, 5), (10, 6, 5), (10, 1, (1 << 32) - 1), (1 << 20, 1, limits.EXPORT_BYTES_MAX + 1)],
)
def test_slot_of_a_peer_is_checked(nbytes: int, layout: int, exported: int) -> None:
    words = new_board()
    board.write_slot(words, 0, board.Slot(1, Grant(1, 1, bytes(16)), 0, nbytes, layout, exported))
    set_version(words, 0, 1)
    with pytest.raises(ProtocolError):
        board.read_head(words)
