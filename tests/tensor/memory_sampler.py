"""How much memory the operations of a rank have taken at most, as the allocator of libc has it."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
        )
    ]  # fmt: skip


def allocated() -> int:
    """Return the bytes that are allocated in this process, in all of its arenas and beside them."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Mallinfo
    found = libc.mallinfo2()
    return int(found.uordblks + found.hblkhd)


class _Sampler(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Looks after each operator; stays on the stack of the rank's thread."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        gc.collect()
        self.first = allocated()
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(one is not torch.Tensor for one in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self.peak = max(self.peak, allocated() - self.first)
        return result


_samplers: list[_Sampler] = []


def begin() -> None:
    """Look from here on: called in the thread of the rank."""
    _samplers.append(_Sampler())
    _samplers[-1].__enter__()


def end() -> int:
    """Look no more; return how many bytes there have been at most beyond those of the beginning."""
    sampler = _samplers.pop()
    sampler.__exit__(None, None, None)
    return sampler.peak
