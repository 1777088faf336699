"""Memory for large values that a receiver fills itself: pages that come two megabytes at a time where they can.

A `bytes` owns its memory, so what has arrived is copied into it once. Half of the time of a plain copy goes into
faults, one for each page of 4 KiB that is written first; huge pages cut that to a fifth (64 MiB: 30 ms, 10 with them,
measured), and giving them back from 3 ms to 0.1. Where the system has none, all is as with plain pages.
"""

from __future__ import annotations

import functools
import mmap
import sys
import types
from typing import Any, Final

from trimesh import limits
from trimesh._wire.memory.regions import memory_at

_HUGE_PAGE_BYTES: Final = 1 << 21
_OFFSET: Final = bytes.__basicsize__ - 1
"""Where the contents of a `bytes` begin; `__basicsize__` counts the zero behind them."""
_HASH: Final = _OFFSET - 8
"""Where its hash is kept, -1 until it is asked for."""


def new_bytes(size: int) -> tuple[bytes, memoryview]:
    """Return a `bytes` of any contents, and the memory to write them to before it is used elsewhere.

    Raises:
        MemoryError: There is not enough.
    """
    fresh: bytes = _native().make(None, size)
    address = id(fresh) + _OFFSET
    ask_for_huge_pages(address, size)
    return fresh, memory_at(address, size, fresh)


def ask_for_huge_pages(address: int, nbytes: int) -> None:
    """Have the pages that lie wholly in memory of this process, which nothing was written to yet, be huge ones.

    Nothing happens to what is small (`limits.HUGE_PAGES_BYTES_MIN`), nor where the system has none.
    """
    if nbytes >= limits.HUGE_PAGES_BYTES_MIN:
        start = -(-address // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        end = (address + nbytes) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
        if end > start:
            _native().advise(start, end - start, mmap.MADV_HUGEPAGE)  # an error is that there are none


class ReusableBytes:
    """A `bytes` that may be written to again when nothing but this refers to it: then it is as good as a new one.

    Args:
        whole: Made by `new_bytes`.
    """

    __slots__ = ("_whole", "size")

    def __init__(self, whole: bytes) -> None:
        self._whole = whole
        self.size = len(whole)

    @property
    def is_free(self) -> bool:
        """Whether nothing else refers to it: no name, no view, no code that is being run."""
        return self._references() == _own_references()

    def take(self) -> tuple[bytes, memoryview]:
        """Return what `new_bytes` does. It must be free."""
        whole = self._whole
        address = id(whole)
        memory_at(address + _HASH, 8, None).cast("q")[0] = -1
        return whole, memory_at(address + _OFFSET, self.size, whole)

    def _references(self) -> int:
        return sys.getrefcount(self._whole)


@functools.cache
def can_be_reused() -> bool:
    """Return whether a `bytes` of this interpreter is what a `ReusableBytes` takes it for.

    That is asked by making one. Without the GIL another thread may begin to refer to it at any time.
    """
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return False
    size = 16
    whole, memory = new_bytes(size)
    memory[:] = bytes(range(size))
    kept = memory_at(id(whole) + _HASH, 8, None).cast("q")
    is_unset = kept[0] == -1
    return is_unset and hash(whole) == kept[0] == hash(bytes(range(size)))


@functools.cache
def _own_references() -> int:
    """Return how many references `ReusableBytes` counts where there are no others: interpreters differ."""
    return ReusableBytes(new_bytes(16)[0])._references()  # noqa: SLF001 - of the same class


def new_pages(size: int) -> mmap.mmap:
    """Return private, writable memory whose pages come when they are written.

    Raises:
        OSError, ValueError, OverflowError, MemoryError: There is not enough, or there cannot be.
    """
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= limits.HUGE_PAGES_BYTES_MIN:
        try:
            pages.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without huge pages
            pass
    return pages


def whole_bytes(view: memoryview) -> bytes | None:
    """Return the `bytes` that `view` shows all of, or None when it shows anything else."""
    shown = view.obj
    return shown if type(shown) is bytes and len(shown) == view.nbytes and view.contiguous else None


def copied_bytes(view: memoryview) -> bytes:
    """Return the contents of a contiguous view as a `bytes`."""
    if view.nbytes < limits.HUGE_PAGES_BYTES_MIN:
        return bytes(view)
    fresh, memory = new_bytes(view.nbytes)
    memory[:] = view.cast("B")
    return fresh


@functools.cache
def _native() -> Any:
    import ctypes  # noqa: PLC0415 - only messages with large values need it; `import trimesh` stays cheap

    make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t)
    advise = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return types.SimpleNamespace(
        make=make(("PyBytes_FromStringAndSize", ctypes.pythonapi)),
        advise=advise(("madvise", ctypes.CDLL(None))),
    )
