"""Copies of rows out of memory that is mapped: what lies where, what is left to torch, when a cancel counts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import trio
from tests.patience import HANG_SECONDS

torch = pytest.importorskip("torch", reason="torch is an extra")

from trimesh.tensor.publications.state_snapshot import flat_over, rows_of, run_all  # noqa: E402 - needs torch

pytestmark = pytest.mark.torch

SIZE = (6, 40, 50)

PLACES: dict[str, tuple[tuple[Any, ...], int]] = {
    "all": ((slice(None),), 1),
    "rows": ((slice(2, 3), slice(10, 20)), 1),
    "columns": ((slice(2, 3), slice(None), slice(10, 40)), 40),
    "columns of all": ((slice(None), slice(None), slice(10, 40)), 240),
    "one row": ((slice(2, 3), slice(7, 8), slice(3, 50)), 1),
}


@pytest.mark.parametrize("is_huge", [False, True])
@pytest.mark.parametrize("name", PLACES)
def test_rows_come_to_where_they_belong(name: str, *, is_huge: bool) -> None:
    where, rows = PLACES[name]
    count = 6 * 40 * 50
    memory = bytearray(8 + 4 * count)
    torch.frombuffer(memory, dtype=torch.float32)[2:] = torch.arange(count)
    source = flat_over(memoryview(memory), torch.float32, 8, count).view(SIZE)[where]
    room = torch.full((6, 40, 60), -1.0)
    target = room[tuple(slice(0, length) for length in source.shape)]

    for into in (target, torch.zeros(source.shape)):
        found = rows_of(into, source)
        assert found is not None
        assert found.nbytes == source.numel() * 4
        pieces = found.cut(1_000)
        assert sum(piece.rows for piece in pieces) == found.rows
        assert max(piece.rows for piece in pieces) == max(1, min(found.rows, 1_000 // found.row_bytes))
        for piece in pieces:
            piece.run(is_huge=is_huge)
        assert (into == source).all()
    assert found.rows == rows
    assert (room >= 0).sum() == (source >= 0).sum()  # and nothing between the rows


def test_what_is_no_copy_of_rows_is_left_to_torch() -> None:
    source = torch.zeros(SIZE)
    assert rows_of(torch.zeros(SIZE, dtype=torch.bfloat16), source) is None
    assert rows_of(torch.zeros(50, 40, 6).permute(2, 1, 0), source) is None
    assert rows_of(torch.zeros(6, 40, 10), source[:, :, :10]) is None  # 40 bytes
    assert rows_of(torch.zeros(1, 40, 50).expand(SIZE), source) is None
    assert rows_of(torch.zeros(4, 20, 50)[:, :, :40], source[:4, :20, :40]) is None  # gaps of two sizes
    assert rows_of(torch.zeros(4, 20, 50), source[:4, :20]) is not None
    assert rows_of(torch.zeros(6, 40, 16), source[:, :, :16]) is not None  # 64 bytes, the least
    assert rows_of(torch.zeros(0, 40, 50), source[:0]) is None
    for other in (
        torch.nn.Parameter(torch.zeros(SIZE)),
        torch.zeros(SIZE, device="meta"),
        torch.zeros(SIZE).to_sparse(),
        torch._neg_view(torch.zeros(SIZE)),
    ):
        assert rows_of(other, source) is None
    assert rows_of(torch.zeros(SIZE, dtype=torch.complex64).conj(), torch.zeros(SIZE, dtype=torch.complex64)) is None


async def test_a_cancel_counts_before_the_next_piece() -> None:
    may_end, has_begun = threading.Event(), trio.Event()
    done: list[str] = []

    def first() -> None:
        trio.from_thread.run_sync(has_begun.set)
        may_end.wait(HANG_SECONDS)
        done.append("first")

    copies: list[Callable[[], object]] = [first, lambda: done.append("second")]
    with trio.fail_after(HANG_SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, run_all, copies)
            await has_begun.wait()
            nursery.cancel_scope.cancel()
            may_end.set()
    assert done == ["first"]
