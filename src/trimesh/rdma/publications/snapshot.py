"""One version of a publication, while it is pinned."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import attrs

from trimesh.rdma.buffers.buffer import RDMABuffer, buffer_by
from trimesh.rdma.memory.handle import Handle, with_exported
from trimesh.rdma.publications import board
from trimesh.rdma.publications.layout import TensorEntry, describe, read_layout


@attrs.define(eq=False)
class Snapshot:
    """A version that is pinned: what it holds, and how to get it. Of no use after its block.

    Attributes:
        version: Its number.
        entries: What it holds, by name: kind, dtype, shape.
        is_lent: Whether a handle on part of it was handed out, which may have read by that.
    """

    version: int
    entries: Mapping[str, TensorEntry]
    _handle: Handle = attrs.field(repr=False)
    _check: Callable[[], Awaitable[None]] = attrs.field(repr=False)
    """Raises if it is not pinned any more: what was copied until now may be torn."""
    is_lent: bool = attrs.field(default=False, repr=False)

    def buffer(self, name: str) -> RDMABuffer:
        """Return a read-only handle on one tensor, to read parts of it or to map it.

        Raises:
            KeyError: There is none of that name.
        """
        made = self._buffer(name)
        self.is_lent = True
        return made

    def whole(self) -> RDMABuffer:
        """Return a read-only handle on all of it, where each tensor lies at the offset of its entry."""
        self.is_lent = True
        return buffer_by(self._handle)

    @property
    def host(self) -> int:
        """Which host it lies on, as a number."""
        return self._handle.granted.home.host

    def _buffer(self, name: str) -> RDMABuffer:
        entry = self.entry(name)
        return buffer_by(self._handle.part(entry.offset, entry.offset + entry.nbytes))

    async def read_into(self, tensors: Mapping[str, Any]) -> None:
        """Copy published tensors into those of this process that have the same names: a state dict.

        They are copied one after the other, and other tasks run meanwhile: whoever computes with `tensors` then gets
        some of the new version and some of the old one. For a model that is in use there is `Published.follow`.

        Args:
            tensors: Some names or all; each as it was published: of its kind of elements and its shape.

        Raises:
            KeyError, TypeError, ValueError: One of them does not fit; nothing was copied.
            ProcDied, MeshStopped, trio.ClosedResourceError, LinkLost, Unresponsive: As `RDMABuffer.read_into`.

        Blocking: a checkpoint, cancellable.
        """
        for name, data in tensors.items():
            entry = self.entry(name)
            came = describe(data)
            if (came[1], came[2]) != (entry.dtype, entry.shape) and entry.kind != "bytes":
                is_now = f"{came[1] or 'bytes'} of shape {came[2]}"
                raise ValueError(f"{name!r} must be as it was published, {entry.describe()}, got {is_now}")
            self._buffer(name).check_read(data)
        for name, data in tensors.items():
            await self._buffer(name).read_into(data)
        await self._check()

    async def check(self) -> None:
        """Raise if what was read by `buffer` until now may be torn; the end of the block of the pin does it, too."""
        await self._check()

    async def read(self) -> dict[str, Any]:
        """Return a copy of everything, of the kinds that were published; bytes as bytearrays.

        Raises and blocks as `read_into`.
        """
        made = {name: _empty(entry) for name, entry in self.entries.items()}
        await self.read_into(made)
        return made

    def entry(self, name: str) -> TensorEntry:
        """Return what a tensor was published as: kind, dtype, shape.

        Raises:
            KeyError: There is none of that name.
        """
        found = self.entries.get(name)
        if found is None:
            some = ", ".join(sorted(self.entries)[:3])
            raise KeyError(f"version {self.version} has no tensor {name!r}; it has {len(self.entries)}: {some}, ...")
        return found


async def snapshot_of(version: int, slot: board.Slot, handle: Handle, check: Callable[[], Awaitable[None]]) -> Snapshot:
    """Return a version whose slot is pinned, as long as `check` does not raise."""
    data = bytearray(slot.layout_nbytes + slot.exported_nbytes)
    await buffer_by(handle.part(0, len(data))).read_into(data)
    await check()
    whole = with_exported(handle, bytes(data[slot.layout_nbytes :]))
    return Snapshot(version, read_layout(data[: slot.layout_nbytes], slot.nbytes), whole, check)


def _empty(entry: TensorEntry) -> Any:
    if entry.kind == "torch":
        torch = importlib.import_module("torch")
        return torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    if entry.kind == "numpy":
        return importlib.import_module("numpy").empty(entry.shape, entry.dtype)
    return bytearray(entry.nbytes)
