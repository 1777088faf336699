"""One version of what the ranks of a mesh have published, while it is pinned on all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from trimesh._runtime.tasks import in_trio
from trimesh.errors import ProtocolError
from trimesh.rdma.publications.snapshot import Snapshot
from trimesh.tensor.controller.tensor import MeshTensor
from trimesh.tensor.protocol.box import Box
from trimesh.tensor.protocol.state_layout import LAYOUT, PartOfState, read_parts
from trimesh.tensor.rank.parts import Part, PartReading


@attrs.define(eq=False)
class StateSnapshot:
    """A version that is pinned: what it holds, and how to get it. Of no use after its block.

    Attributes:
        version: Its number.
        sizes: What it holds, by name: the size of the whole tensor.
    """

    version: int
    sizes: Mapping[str, tuple[int, ...]]
    _parts: Mapping[str, Sequence[tuple[PartOfState, Snapshot]]] = attrs.field(repr=False)
    """By name, as each rank has it."""

    async def read_into(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy published tensors, whole, into those of this process that have the same names: a state dict.

        Args:
            tensors: Some names or all; each of the type and size of what was published.

        Raises:
            KeyError, TypeError, ValueError: One of them does not fit; nothing was copied.
            ProcDied, MeshStopped, trio.ClosedResourceError, LinkLost, Unresponsive: As `RDMABuffer.read_into`.

        Blocking: a checkpoint, cancellable.
        """
        await in_trio(self._read_into)(tensors)

    async def _read_into(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            self._check(name, tensor)
        for name, tensor in tensors.items():
            await self._read_one(name, tensor.detach())
        for snapshot in {id(one): one for parts in self._parts.values() for _, one in parts}.values():
            await snapshot.check()

    async def _read_one(self, name: str, tensor: torch.Tensor) -> None:
        is_direct = tensor.is_contiguous() and tensor.device.type == "cpu"
        there = tensor if is_direct else torch.empty(tensor.size(), dtype=tensor.dtype)
        place, found = Box.of_all(tensor.size()), 0
        for one, snapshot in self._parts[name]:
            if not one.is_here:
                continue
            found += one.box.count
            reading = PartReading()
            reading.add(Part(one.box, tensor.dtype, 0), there, place)
            buffer = snapshot.buffer(name)
            for offset, piece in reading.pieces:
                await buffer[offset : offset + piece.numel() * piece.element_size()].read_into(piece)
            reading.finish()
        if found != place.count:
            raise ProtocolError(f"the published parts of {name!r} must be all of it: {found} of {place.count} elements")
        if not is_direct:
            tensor.copy_(there)

    async def read(self) -> dict[str, torch.Tensor]:
        """Return a copy of everything, whole; raises and blocks as `read_into`."""
        found = {name: parts[0][0] for name, parts in self._parts.items()}
        made = {name: torch.empty(self.sizes[name], dtype=_dtype(one)) for name, one in found.items()}
        await self.read_into(made)
        return made

    def _check(self, name: str, tensor: Any) -> None:
        """Refuse what a published tensor cannot be read into."""
        parts = self._parts.get(name)
        if parts is None:
            some = ", ".join(sorted(self.sizes)[:3])
            raise KeyError(f"version {self.version} has no tensor {name!r}; it has {len(self.sizes)}: {some}, ...")
        one = parts[0][0]
        if not one.is_global and len(parts) > 1:
            raise TypeError(
                f"{name!r} is a tensor on each of {len(parts)} ranks, not one whole: read what one of them has, "
                "`async with weights.shard(...).pin() as snapshot:`"
            )
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, MeshTensor):
            raise TypeError(f"{name!r} is read into a tensor of this process, got {tensor!r:.100}")
        if (tensor.dtype, tuple(tensor.size())) != (_dtype(one), one.size):
            raise ValueError(
                f"{name!r} must be as it was published, {one.dtype} of size {one.size}, "
                f"got {tensor.dtype} of size {tuple(tensor.size())}"
            )


def _dtype(one: PartOfState) -> torch.dtype:
    found = getattr(torch, one.dtype, None)
    if not isinstance(found, torch.dtype):
        raise ProtocolError(f"a published tensor must be of a type of torch, got {one.dtype!r}")
    return found


async def state_snapshot(version: int, ranks: Sequence[Snapshot]) -> StateSnapshot:
    """Return a version that is pinned on all ranks."""
    parts: dict[str, list[tuple[PartOfState, Snapshot]]] = {}
    for snapshot in ranks:
        buffer = snapshot.buffer(LAYOUT)
        data = bytearray(buffer.nbytes)
        await buffer.read_into(data)
        for one in read_parts(data):
            parts.setdefault(one.name, []).append((one, snapshot))
    sizes = {name: found[0][0].size for name, found in parts.items()}
    for name, found in parts.items():
        told = [one for one, _ in found]
        if len(told) != len(ranks) or any((one.size, one.dtype) != (told[0].size, told[0].dtype) for one in told):
            raise ProtocolError(f"all ranks must publish the same tensor {name!r}, got {told!r:.300}")
    return StateSnapshot(version, sizes, parts)
