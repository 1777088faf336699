"""Tensors over memory that is only to be read, which torch has none of: they must not be written to."""

from __future__ import annotations

import torch

from trimesh._wire.memory.regions import memory_at
from trimesh.rdma.memory.local import address_of


def flat_over(view: memoryview, dtype: torch.dtype, offset: int, count: int) -> torch.Tensor:
    """Return some elements that lie in a view; they are only to be read, and not after the view was released.

    Args:
        view: Of bytes.
        dtype: Of the elements.
        offset: In bytes.
        count: Of elements, at least one.
    """
    assert offset + count * dtype.itemsize <= view.nbytes, "elements lie within their view"
    return torch.frombuffer(memory_at(address_of(view) + offset, count * dtype.itemsize, None), dtype=dtype)
