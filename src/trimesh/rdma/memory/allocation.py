"""`allocate`: memory that processes of the same host can map."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Sequence
from typing import Any

from trimesh._runtime.life import proc_for
from trimesh._runtime.tasks import in_trio_now
from trimesh.plain_numbers import whole_number


def allocate(shape: int | Sequence[int], dtype: Any = None) -> Any:
    """Return memory for a buffer that others on this host can map: they read it faster, or without any copy.

    What it holds is undefined: zeros, or what was left there before. The memory goes back, to be used again, when
    the buffer over it is closed and nothing looks at it any more.

    Args:
        shape: Of the array or tensor; without `dtype` a number of bytes.
        dtype: Of torch: the result is a tensor. Of numpy, or what numpy takes for one: an array. None: a memoryview.

    Raises:
        TypeError, ValueError: No such thing can be made, or it would be empty.
        RuntimeError: No mesh is open here.
        LimitExceeded: This process has `limits.BLOCKS_MAX` of them, or it is too large.
        OSError: The system refuses the memory.

    Example:
        weights = trimesh.rdma.allocate((1024, 1024), torch.float32)
        self.buffer = trimesh.RDMABuffer(weights)
    """
    sizes = _sizes(shape, dtype)
    itemsize = 1
    torch = sys.modules.get("torch")
    is_torch = torch is not None and isinstance(dtype, torch.dtype)
    if is_torch:
        itemsize = dtype.itemsize
    elif dtype is not None:
        dtype = importlib.import_module("numpy").dtype(dtype)
        if dtype.hasobject:
            raise TypeError(f"memory for others holds numbers, got {dtype}: references mean nothing elsewhere")
        itemsize = dtype.itemsize
    nbytes = math.prod(sizes) * itemsize
    if nbytes <= 0:
        raise ValueError(f"allocate needs at least one byte, got shape {shape!r} and dtype {dtype!r}")
    memory = in_trio_now(_take_block)(nbytes)
    if is_torch:
        assert torch is not None
        return torch.frombuffer(memory, dtype=dtype).view(sizes)
    if dtype is not None:
        return importlib.import_module("numpy").frombuffer(memory, dtype).reshape(sizes)
    return memory


def _sizes(shape: int | Sequence[int], dtype: Any) -> tuple[int, ...]:
    if (number := whole_number(shape)) is not None:
        sizes: tuple[int, ...] = (number,)
    elif isinstance(shape, Sequence) and dtype is not None and all(hasattr(size, "__index__") for size in shape):
        sizes = tuple(size.__index__() for size in shape)
    elif dtype is None:
        raise TypeError(f"allocate takes a number of bytes, or a shape and a dtype, got {shape!r} alone")
    else:
        raise TypeError(f"a shape must be a number or a sequence of numbers, got {shape!r}")
    if any(size < 0 for size in sizes):
        raise ValueError(f"sizes must be 0 or more, got {shape!r}")
    return sizes


def _take_block(nbytes: int) -> memoryview:
    return proc_for("memory for others is allocated").bulk.take_block(nbytes)
