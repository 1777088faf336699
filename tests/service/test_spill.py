"""Replay buffers that keep in a file what memory has no room for (`spill=`)."""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.patience import HANG_SECONDS
from tests.rows import rows

from trimesh.service import open_replay
from trimesh.service.accounts import FileExtents
from trimesh.testing import simulate

KIB = 1 << 10
sim = pytest.mark.mesh_backend("sim")


def item(number: int) -> bytes:
    return bytes([number % 256]) * KIB


@rows("seed", range(20))
def test_extents_never_overlap_and_lose_no_byte(seed: int) -> None:
    """FE-1, FE-2."""
    draws = random.Random(seed)
    room = FileExtents(1_000)
    taken: list[list[tuple[int, int]]] = []
    for _ in range(500):
        size = draws.randrange(1, 300)
        if room.fits(size) and draws.random() < 0.6:
            taken.append(room.take(size))
            assert sum(length for _, length in taken[-1]) == size
        elif taken:
            room.give_back(taken.pop(draws.randrange(len(taken))))
        pieces = sorted(piece for one in taken for piece in one)
        assert all(offset >= 0 and offset + length <= 1_000 for offset, length in pieces)
        assert all(sum(one) <= other[0] for one, other in itertools.pairwise(pieces))
        assert room.used == sum(length for _, length in pieces)
    for one in taken:
        room.give_back(one)
    assert room.take(1_000) == [(0, 1_000)]


@sim
@simulate(seeds=3)
async def test_what_memory_has_no_room_for_is_in_the_file(tmp_path: Path):
    """Y8: the oldest come first, wherever they are; the file has no name; its room is used again."""
    async with open_replay(capacity=100, capacity_bytes=4 * KIB, spill=tmp_path, spill_bytes=8 * KIB) as buffer:
        for round_ in range(3):
            for number in range(9):
                await buffer.add(item(number), version=round_)
            found = buffer.statistics()
            assert 5 * KIB <= found.spilled_bytes <= 6 * KIB
            assert os.listdir(tmp_path) == []
            assert await buffer.take(5) == [item(number) for number in range(5)]
            assert sorted(await buffer.sample(4)) == [item(number) for number in range(5, 9)]
            with pytest.raises(LookupError):
                async with buffer.taking(4):
                    raise LookupError
            assert await buffer.take(4) == [item(number) for number in range(5, 9)]
            assert buffer.statistics().spilled_bytes == buffer.statistics().bytes == 0
        with pytest.raises(ValueError, match="does not fit"):
            await buffer.add(b"x" * 9 * KIB, version=3)


@sim
@simulate(seeds=3)
async def test_memory_and_file_are_bounded(tmp_path: Path):
    """Y8: `add` waits, or evicts the oldest, when both are full."""
    bounds: dict[str, Any] = {"capacity": 100, "capacity_bytes": 4 * KIB, "spill": tmp_path, "spill_bytes": 4 * KIB}
    async with open_replay(**bounds) as buffer:
        for number in range(7):
            await buffer.add(item(number), version=0)
        with trio.move_on_after(1) as waited:
            await buffer.add(item(7), version=0)
        assert waited.cancelled_caught
        assert buffer.statistics().added == 7
        with trio.fail_after(HANG_SECONDS):
            assert await buffer.take(1) == [item(0)]
            await buffer.add(item(7), version=0)
    async with open_replay(**bounds, when_full="evict") as buffer:
        for number in range(40):
            await buffer.add(item(number), version=0)
            found = buffer.statistics()
            assert found.bytes - found.spilled_bytes <= 4 * KIB
            assert found.spilled_bytes <= 4 * KIB
        assert found.evicted["full"] == 40 - found.stored
        assert await buffer.take(found.stored) == [item(number) for number in range(40 - found.stored, 40)]


@sim
@simulate(seeds=3)
async def test_a_state_has_the_values_of_the_file(tmp_path: Path):
    """Y9: saved with what is in the file, loaded into a buffer with or without one."""
    async with open_replay(capacity=20, capacity_bytes=4 * KIB, spill=tmp_path) as buffer:
        for number in range(10):
            await buffer.add(item(number), version=0)
        state = buffer.state_dict()
    for bounds in ({"capacity_bytes": 4 * KIB, "spill": tmp_path}, {"capacity_bytes": 64 * KIB}):
        async with open_replay(capacity=20, **bounds) as again:
            again.load_state_dict(state)
            found = again.statistics()
            assert found.stored == 10
            assert found.bytes - found.spilled_bytes <= bounds["capacity_bytes"]
            assert await again.take(10) == [item(number) for number in range(10)]
