"""Where the parts of tensors of a checkpoint are: a file of each rank, and places in it."""

from __future__ import annotations

import io
import math
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final

import msgspec
import torch

from trimesh.tensor.protocol.box import Box
from trimesh.tensor.protocol.new_memory import new_tensor

RAW_SUFFIX: Final = ".safetensors"
"""Of files whose parts are their elements."""


class Stored(msgspec.Struct, frozen=True, array_like=True):
    """One part of a tensor in a file, as `torch.save` writes it; in one of safetensors its elements, in order.

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

    def read(self, directory: Path, dtype: torch.dtype) -> torch.Tensor:
        """Return the part; of a file of safetensors, pages of it that are read when they are looked at.

        Raises:
            OSError: The file cannot be read.
            ValueError: There is something else in it.
        """
        with (directory / self.file).open("rb") as file:
            if self.file.endswith(RAW_SUFFIX):
                return self._mapped(file, dtype)
            file.seek(self.offset)
            found = torch.load(io.BytesIO(file.read(self.length)), map_location="cpu", weights_only=True)
        if not isinstance(found, torch.Tensor) or tuple(found.size()) != self.size:
            raise ValueError(f"a part of size {self.size} is to be at {self.offset} of {self.file}, got {found!r:.80}")
        return found

    def _mapped(self, file: IO[bytes], dtype: torch.dtype) -> torch.Tensor:
        count = math.prod(self.size)
        if self.length != count * dtype.itemsize or os.fstat(file.fileno()).st_size < self.offset + self.length:
            raise ValueError(f"{self.file} has not {count} elements of {dtype} at {self.offset}")
        if not count:
            return torch.empty(self.size, dtype=dtype)
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch wants memory that can be written to
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=self.offset).view(self.size)


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
    made = new_tensor(box.size, dtype)
    count = 0
    for part in parts:
        common = box.overlap(part.box)
        if common is None:
            continue
        made[box.slices(common)] = part.read(directory, dtype)[part.box.slices(common)]
        count += math.prod(common.size)
    if count != box.count:
        raise ValueError(f"the parts of a checkpoint must be all of a tensor, got {count} of {box.count} elements")
    return made
