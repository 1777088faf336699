"""New memory for large tensors that are about to be written whole."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch

from trimesh import limits


def fresh(size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a contiguous tensor on the CPU of undefined values.

    The kernel finds a page when it is written to first, which takes three times as long as the copy that writes there;
    with huge pages, which a large one asks for, a tenth of that.
    """
    nbytes = math.prod(size) * dtype.itemsize
    if nbytes < limits.TENSOR_HUGE_BYTES_MIN or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(tuple(size), dtype=dtype)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # a kernel without them
    return torch.frombuffer(memory, dtype=dtype).view(tuple(size))
