"""Which rows a stream gives: each once, in an order of the seed, wherever it is asked to go on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is an extra")

from trimesh.data.reading import Order, Position, permutation, stream_pieces  # noqa: E402 - needs torch

pytestmark = pytest.mark.torch

chunk_sizes = st.lists(st.integers(0, 9), max_size=12)


def rows_of(order: Order, epoch: int, first: int, batch: int) -> list[tuple[int, int]]:
    """Return what batches of an epoch have from a row on, as pairs of window and offset."""
    found: list[tuple[int, int]] = []
    while pieces := order.pieces(Position(epoch, first), batch):
        count = sum(piece.rows for piece in pieces)
        assert count <= batch
        found += [(piece.window, piece.offset + row) for piece in pieces for row in range(piece.rows)]
        first += count
    return found


@given(chunk_sizes, st.one_of(st.none(), st.integers()), st.integers(1, 20), st.integers(1, 15), st.integers(0, 3))
def test_each_row_comes_once_whatever_the_batch(chunks, seed, mixed, batch, epoch):
    order = Order(chunks, seed, mixed)

    found = rows_of(order, epoch, 0, batch)

    windows = order.windows(epoch)
    assert found == [(number, row) for number, window in enumerate(windows) for row in range(window.rows)]
    assert sorted(chunk for window in windows for chunk in window.chunks if chunks[chunk]) == [
        number for number, rows in enumerate(chunks) if rows
    ]


@given(chunk_sizes, st.integers(), st.integers(1, 20), st.integers(1, 9), st.integers(1, 9), st.integers(0, 60))
def test_going_on_with_another_batch_gives_the_rest(chunks, seed, mixed, first_batch, second_batch, at):
    whole = rows_of(Order(chunks, seed, mixed), 1, 0, first_batch)
    at = min(at, len(whole))

    assert rows_of(Order(chunks, seed, mixed), 1, at, second_batch) == whole[at:]


@given(st.integers(0, 40), st.integers(1, 30), st.integers(1, 12))
def test_rows_of_a_query_are_in_windows_of_one_size(first, rows, mixed):
    found = [
        piece.window * mixed + piece.offset + row
        for piece in stream_pieces(Position(0, first), rows, mixed)
        for row in range(piece.rows)
    ]

    assert found == list(range(first, first + rows))


@pytest.mark.parametrize("count", [0, 1, 2, 1_000])
def test_a_permutation_has_each_number_once(count):
    assert sorted(permutation(count, 3, 1).tolist()) == list(range(count))


def test_a_permutation_is_the_one_of_other_versions():
    """A run that goes on after an upgrade of Python or torch finds the same rows."""
    assert permutation(10, 1, 2).tolist() == [7, 9, 2, 8, 6, 4, 5, 0, 1, 3]
    assert permutation(10, 1, 3).tolist() == [2, 9, 5, 0, 4, 3, 8, 7, 6, 1]


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [tuple(permutation(50, seed, epoch).tolist()) for seed in range(3) for epoch in range(3)]

    assert len(set(orders)) == 9


def test_without_a_seed_rows_come_as_they_are_stored():
    order = Order([3, 0, 2], None, 100)

    assert [window.chunks for window in order.windows(5)] == [(0,), (1, 2)]
