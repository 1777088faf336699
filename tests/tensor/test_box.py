"""Boxes: parts of tensors, and where they lie in memory."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is an extra")
hypothesis = pytest.importorskip("hypothesis")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.distributed.tensor import Shard  # noqa: E402

from trimesh.tensor.protocol.placement import Box  # noqa: E402
from trimesh.tensor.rank.moves import PartReading, fill, lay_out, part_of  # noqa: E402

pytestmark = pytest.mark.torch

SIZES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def two_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, Box]:
    """Draw the size of a tensor, and two parts of it."""
    size = draw(SIZES)
    found = []
    for _ in range(2):
        start = tuple(draw(st.integers(0, length)) for length in size)
        limits = zip(size, start, strict=True)
        found.append(Box(start, tuple(draw(st.integers(0, length - begin)) for length, begin in limits)))
    return size, found[0], found[1]


@settings(deadline=None)
@given(SIZES.filter(len), st.integers(1, 4))
def test_cuts_are_those_of_torch(size: tuple[int, ...], pieces: int) -> None:
    whole = torch.arange(torch.Size(size).numel()).reshape(size)
    parts, _ = Shard(0)._split_tensor(whole, pieces, with_padding=False)

    boxes = [Box.of_all(size).cut(0, pieces, index) for index in range(pieces)]

    for part, box in zip(parts, boxes, strict=True):
        found = whole[Box.of_all(size).slices(box)]
        assert found.numel() == part.numel()
        assert found.flatten().equal(part.flatten())


@settings(deadline=None)
@given(two_boxes())
def test_what_two_boxes_share_is_read_from_the_one_into_the_other(
    drawn: tuple[tuple[int, ...], Box, Box],
) -> None:
    size, source, target = drawn
    whole = torch.arange(torch.Size(size).numel(), dtype=torch.int64).reshape(size)
    values = whole[Box.of_all(size).slices(source)]
    there = torch.full(target.size, -1, dtype=torch.int64)
    [_, part], nbytes = lay_out([(Box((0,), (3,)), torch.uint8), (source, torch.int64)])
    memory = memoryview(bytearray(nbytes))
    fill(memory, part, values)

    reading = PartReading()
    reading.add(part_of(part.fields(), nbytes), there, target)
    for offset, piece in reading.pieces:
        assert piece.is_contiguous()
        flat = torch.frombuffer(memory, dtype=piece.dtype, count=piece.numel(), offset=offset)
        piece.copy_(flat.view(piece.size()))
    reading.finish()

    expected = torch.full(size, -1, dtype=torch.int64)
    expected[Box.of_all(size).slices(source)] = values
    assert there.equal(expected[Box.of_all(size).slices(target)])
