"""Where the parts of tensors of a checkpoint are: a file of each rank, and places in it."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from trimesh.tensor.protocol.box import Box


class Stored(msgspec.Struct, frozen=True, array_like=True):
    """One part of a tensor in a file, as `torch.save` writes it.

    Attributes:
        file: Its name in the directory of the checkpoint.
        offset: Where its bytes begin.
        length: How many they are.
        start: The first index of each dimension of the tensor.
        size: How many of each.
    """

    file: str
    offset: int
    length: int
    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def box(self) -> Box:
        """Which part of the tensor it is."""
        return Box(self.start, self.size)


class Wanted(msgspec.Struct, frozen=True, array_like=True):
    """What the ranks read: a directory, and for each tensor the parts that there are."""

    directory: str
    parts: list[list[Stored]]


def read_box(directory: Path, parts: Sequence[Stored], box: Box, dtype: torch.dtype) -> torch.Tensor:
    """Return a part of a tensor, put together of those that files have.

    Raises:
        OSError: A file cannot be read.
        ValueError: There is something else in it, or the parts are not all of it.
    """
    made = torch.empty(box.size, dtype=dtype)
    count = 0
    for part in parts:
        common = box.overlap(part.box)
        if common is None:
            continue
        with (directory / part.file).open("rb") as file:
            file.seek(part.offset)
            found = torch.load(io.BytesIO(file.read(part.length)), map_location="cpu", weights_only=True)
        if not isinstance(found, torch.Tensor) or tuple(found.size()) != part.size:
            raise ValueError(f"a part of size {part.size} is to be at {part.offset} of {part.file}, got {found!r:.80}")
        made[box.slices(common)] = found[part.box.slices(common)]
        count += math.prod(common.size)
    if count != box.count:
        raise ValueError(f"the parts of a checkpoint must be all of a tensor, got {count} of {box.count} elements")
    return made
