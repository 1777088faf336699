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
HEAD = FlightHead(
    proc=observed.ProcRow(id="5", pid=7), started_at=1000.0, trio_at=100.0, clock_at=10.0, ticks=3, boot="b"
)
NAME = CallName("trainers", {"gpus": 1}, "step")


def row(number: int, outcome: int = 0, name: int = 0, ended_after: float = 0.25, end_of: int = 0) -> bytes:
    """Return the row of a call that came at Unix time 1000 + `number`, and was taken 0.25 s later.

    Args:
        number: Of the call.
        outcome: RUNNING writes no end.
        name: What is called.
        ended_after: Seconds from when it was taken.
        end_of: The call whose outcome stands in the row; 0 for its own.
    """
    began_at = 10.25 + number
    end = flight.END.pack(
        began_at + ended_after if outcome else 0.0,
        flight.not_returned(end_of or number, outcome) if outcome > flight.RETURNED else 0,
    )
    return flight.ROW.pack(100.0 + number, began_at, 9, number, name, number) + end


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


def first_with(replaced: bytes) -> flight.FlightCall:
    """Return the first call of a file with another row in its place."""
    data = bytearray(whole())
    at = flight.PAGE_BYTES + NAMES + 1 * flight.ROW_BYTES
    data[at : at + flight.ROW_BYTES] = replaced
    return flight.read_flight(bytes(data)).calls[0]


@pytest.mark.parametrize("outcome", [flight.RETURNED, flight.RAISED, flight.CANCELLED])
def test_calls_have_their_times_and_outcomes(outcome: int) -> None:
    call = first_with(row(1, outcome))
    assert (call.at, call.waited, call.lasted, call.outcome) == (1001.0, 0.25, 0.5, outcome)


@pytest.mark.parametrize("ended_after", [math.nan, math.inf, -1e-6, -5.0])
def test_ends_that_are_none_of_their_row_leave_the_call_running(ended_after: float) -> None:
    """FL-1, FL-2: the row that this one replaces had ended before this call was taken."""
    call = first_with(row(1, flight.RAISED, ended_after=ended_after))
    assert (call.outcome, call.waited, call.lasted) == (flight.RUNNING, 0.25, 0.0)


def test_outcome_of_the_call_before_is_none_of_this_one() -> None:
    """FL-1: a call that has returned leaves the outcome of the one whose row it has taken."""
    call = first_with(row(1, flight.RAISED, end_of=5))
    assert (call.outcome, call.lasted) == (flight.RETURNED, 0.5)


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
    assert first_with(row(1, name=flight.NO_NAME)).name is None


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
