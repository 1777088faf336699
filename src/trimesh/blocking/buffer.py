"""`RDMABuffer`: memory that other processes read and write, without `await`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Self

from trimesh.blocking.body import body_of
from trimesh.blocking.handle import ClosedByBlock, FacedObject
from trimesh.blocking.work import wait_now
from trimesh.errors import Origin
from trimesh.rdma.buffers import buffer


class RDMABuffer(FacedObject["buffer.RDMABuffer"], ClosedByBlock):
    """Memory of this process that others may reach; see `trimesh.RDMABuffer`. Sent to an actor it is that.

    One that an endpoint has returned, or was given, has this form by `tb.face(buffer)`. Waits end as those of calls do:
    by `Cancelled`, or by Ctrl-C; what was copied by then is undefined.

    Args:
        data: A contiguous torch tensor, numpy array, memoryview or bytearray. It is kept.
        writable: Whether others may write; then `data` must be writable.

    Raises:
        TypeError, ValueError, LimitExceeded: As there.
        RuntimeError: No mesh is open here.
    """

    def __init__(self, data: Any, *, writable: bool = True) -> None:
        super().__init__(wait_now(lambda: buffer.RDMABuffer(data, writable=writable)))

    @classmethod
    def of(cls, inner: buffer.RDMABuffer) -> Self:
        """Return the form without `await` of a buffer, or a handle on one."""
        self = cls.__new__(cls)
        super(RDMABuffer, self).__init__(inner)
        return self

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self._inner.nbytes

    @property
    def is_writable(self) -> bool:
        """Whether others may write by this handle."""
        return self._inner.is_writable

    @property
    def owner(self) -> Origin:
        """Who made it; see `trimesh.RDMABuffer.owner`."""
        return self._inner.owner

    @property
    def backend(self) -> str:
        """What carries its bytes from and to here; see `trimesh.RDMABuffer.backend`."""
        return self._now(lambda: self._inner.backend)

    def __getitem__(self, part: slice) -> RDMABuffer:
        """Return a handle on some of its bytes, `buffer[start:stop]`."""
        return RDMABuffer.of(self._inner[part])

    def readonly(self) -> RDMABuffer:
        """Return a handle by which the memory can be read, and not written."""
        return RDMABuffer.of(self._now(self._inner.readonly))

    def read_into(self, destination: Any) -> None:
        """Copy all of it into memory of this process; see `trimesh.RDMABuffer.read_into`."""
        self._wait(self._inner.read_into, destination)

    def write_from(self, source: Any) -> None:
        """Overwrite all of it with memory of this process; see `trimesh.RDMABuffer.write_from`."""
        self._wait(self._inner.write_from, source)

    def fetch_add(self, value: int, offset: int = 0) -> int:
        """Add to the unsigned 64-bit number at `offset`, and return what it was."""
        return self._wait(self._inner.fetch_add, value, offset)

    def compare_and_swap(self, expected: int, new: int, offset: int = 0) -> int:
        """Put `new` for the unsigned 64-bit number at `offset` if that is `expected`; return what it was."""
        return self._wait(self._inner.compare_and_swap, expected, new, offset)

    def map(self, *, writable: bool = False) -> AbstractContextManager[memoryview]:
        """Return the memory itself, where it lies: `with handle.map() as view:`. See `trimesh.RDMABuffer.map`."""
        return body_of(self._inner.map(writable=writable), "the memory of a buffer")

    def close(self) -> None:
        """Revoke it, and all handles on it, everywhere; see `trimesh.RDMABuffer.aclose`."""
        self._wait(self._inner.aclose)
