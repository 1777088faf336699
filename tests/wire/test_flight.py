"""The file format of flight records: what is read of whole ones, and of any other bytes (FL-1 to FL-3)."""

from __future__ import annotations

import math
from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trimesh._wire import flight, observed
from trimesh._wire.flight import CallName, FlightHead, LeftBlock, RaisedError
from trimesh.errors import ProtocolError

ROWS, NAMES, HALF = 4, 128, 512
HEAD = FlightHead(proc=observed.ProcRow(id="5", pid=7), started_at=1000.0, trio_at=100.0, ticks=3, boot="b")
NAME = CallName("trainers", {"gpus": 1}, "step")


def row(number: int, outcome: int = 0, name: int = 0, lasted: float = 0.5) -> bytes:
    return flight.ROW.pack(100.0 + number, 9, number, name | outcome << 24, lasted, 0.25, number)


def whole(*, numbers: tuple[int, ...] = (1, 2, 3), halves: tuple[bytes, bytes] | None = None) -> bytes:
    """Return a file with calls of these numbers."""
    page = bytearray(flight.PAGE_BYTES)
    first = flight.first_page(HEAD, ROWS, NAMES, HALF)
    page[: len(first)] = first
    names = flight.named(NAME)
    page[flight.NAMES_USED : flight.NAMES_USED + 8] = len(names).to_bytes(8, "little")
    rows = bytearray(ROWS * flight.ROW_BYTES)
    for number in numbers:
        at = number % ROWS * flight.ROW_BYTES
        rows[at : at + flight.ROW_BYTES] = row(number, 1 if number % 2 else 0)
    one, two = halves or (log(1, RaisedError(at=1001.0, number=1, text="early")), log(2, LeftBlock(at=1002.0)))
    return bytes(page) + names.ljust(NAMES, b"\0") + bytes(rows) + one + two


def log(generation: int, *records: flight.Record) -> bytes:
    data = b"".join(flight.framed(flight.encode(record)) for record in records)
    return (flight.HALF.pack(generation) + data).ljust(HALF, b"\0")


def test_whole_file_says_what_was_written() -> None:
    found = flight.read_flight(whole())

    assert found.head == HEAD
    assert [(call.number, call.at, call.name, call.outcome) for call in found.calls] == [
        (1, 1001.0, NAME, flight.RETURNED),
        (2, 1002.0, NAME, flight.RUNNING),
        (3, 1003.0, NAME, flight.RETURNED),
    ]
    assert [type(record) for record in found.records] == [RaisedError, LeftBlock]
    assert flight.read_head(whole()[: flight.PAGE_BYTES]) == (HEAD, 0.0)


@pytest.mark.parametrize("lasted", [math.nan, math.inf, -1.0])
def test_times_of_calls_that_are_none_count_as_not_known(lasted: float) -> None:
    """FL-2."""
    data = bytearray(whole())
    at = flight.PAGE_BYTES + NAMES + 1 * flight.ROW_BYTES
    data[at : at + flight.ROW_BYTES] = row(1, lasted=lasted)
    assert [(call.waited, call.lasted) for call in flight.read_flight(bytes(data)).calls[:2]] == [
        (0.25, 0.0),
        (0.25, 0.5),
    ]


def test_newer_half_comes_last() -> None:
    old, new = LeftBlock(at=1.0), RaisedError(at=2.0, number=1, text="")
    assert flight.read_flight(whole(halves=(log(4, new), log(3, old)))).records == (old, new)


def test_oldest_row_of_a_full_ring_is_left_out() -> None:
    """FL-1: the next call may have been written over it in part."""
    assert [call.number for call in flight.read_flight(whole(numbers=(5, 6, 7, 8))).calls] == [6, 7, 8]


def test_torn_record_ends_its_half() -> None:
    """FL-1: what was before it, and the other half, are there."""
    kept = LeftBlock(at=1.0)
    half = bytearray(log(2, kept, RaisedError(at=2.0, number=1, text="torn")))
    half[half.index(b"torn")] ^= 1
    assert flight.read_flight(whole(halves=(log(1, kept), bytes(half)))).records == (kept, kept)


def test_calls_of_names_that_did_not_fit_are_there() -> None:
    data = bytearray(whole())
    at = flight.PAGE_BYTES + NAMES + 1 * flight.ROW_BYTES
    data[at : at + flight.ROW_BYTES] = row(1, name=flight.NO_NAME)
    assert flight.read_flight(bytes(data)).calls[0].name is None


@pytest.mark.parametrize("size", [0, 1, flight.PAGE_BYTES - 1, flight.PAGE_BYTES, len(whole()) - 1])
def test_file_that_is_cut_off_is_refused(size: int) -> None:
    with pytest.raises(ProtocolError):
        flight.read_flight(whole()[:size])


def test_head_that_is_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match="at most"):
        flight.first_page(FlightHead(proc=observed.ProcRow(id="x" * flight.PAGE_BYTES)), ROWS, NAMES, HALF)


@given(st.binary(max_size=300))
def test_other_bytes_are_refused(data: bytes) -> None:
    """FL-2: with a `ProtocolError`."""
    with pytest.raises(ProtocolError):
        flight.read_flight(data.ljust(flight.PAGE_BYTES, data[:1] or b"\0"))


@given(st.lists(st.tuples(st.integers(0, len(whole()) - 1), st.binary(min_size=1, max_size=40)), max_size=6))
@example([(16, b"\xff" * 24)])
@example([(20, b"\0\0\0\0")])
@example([(40, b"\xff" * 16)])
@example([(flight.PAGE_BYTES + NAMES, b"\xff" * 40)])
def test_damaged_files_are_read_or_refused(damage: list[tuple[int, bytes]]) -> None:
    """FL-2: with a `ProtocolError`, or as what they say."""
    data = bytearray(whole())
    for at, part in damage:
        data[at : at + len(part)] = part
    with suppress(ProtocolError):
        found = flight.read_flight(bytes(data[: len(whole())]))
        assert len(found.calls) <= ROWS or found.head != HEAD
        assert all(call.outcome <= flight.CANCELLED for call in found.calls)
