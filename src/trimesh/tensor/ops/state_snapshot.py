"""One version of what the ranks of a mesh have published, while it is pinned on all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch

from trimesh._runtime.tasks import in_trio
from trimesh.errors import ProtocolError
from trimesh.rdma.publications.snapshot import Snapshot
from trimesh.tensor.controller.shard_of import ShardOf, shard_of
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

    async def read_into(self, tensors: Mapping[str, torch.Tensor | ShardOf]) -> None:
        """Copy published tensors into those of this process that have the same names: a state dict.

        Only what is asked for is read, from the ranks that have it, whatever the layout there.

        Args:
            tensors: Some names or all; each has the size of what was published, or is a `ShardOf` that or a `DTensor`.
                Values are cast where the types differ.

        Raises:
            KeyError, TypeError, ValueError: One of them does not fit; nothing was copied.
            ProcDied, MeshStopped, trio.ClosedResourceError, LinkLost, Unresponsive: As `RDMABuffer.read_into`.

        Blocking: a checkpoint, cancellable.
        """
        await in_trio(self._read_into)(tensors)

    async def _read_into(self, tensors: Mapping[str, torch.Tensor | ShardOf]) -> None:
        shards = {name: shard_of(tensor) for name, tensor in tensors.items()}
        for name, shard in shards.items():
            self._check(name, shard)
        for name, shard in shards.items():
            await self._read_one(name, shard.tensor.detach(), shard.box)
        for snapshot in {id(one): one for parts in self._parts.values() for _, one in parts}.values():
            await snapshot.check()

    async def _read_one(self, name: str, tensor: torch.Tensor, place: Box) -> None:
        """Read the part `place` of a tensor."""
        dtype = _dtype(self._parts[name][0][0])
        is_direct = tensor.is_contiguous() and tensor.device.type == "cpu" and tensor.dtype == dtype
        there = tensor if is_direct else torch.empty(tensor.size(), dtype=dtype)
        found = 0
        for one, snapshot in self._parts[name]:
            common = one.box.overlap(place) if one.is_here else None
            if common is None:
                continue
            found += common.count
            reading = PartReading()
            reading.add(Part(one.box, dtype, 0), there, place)
            buffer = snapshot.buffer(name)
            for offset, piece in reading.pieces:
                await buffer[offset : offset + piece.numel() * piece.element_size()].read_into(piece)
            reading.finish()
        if found != place.count:
            raise ProtocolError(f"the published parts of {name!r} must be all of it: {found} of {place.count} elements")
        if not is_direct:
            with torch.inference_mode():  # what was made there can be changed nowhere else, all others anywhere
                tensor.copy_(there)

    async def read(self) -> dict[str, torch.Tensor]:
        """Return a copy of everything, whole; raises and blocks as `read_into`."""
        found = {name: parts[0][0] for name, parts in self._parts.items()}
        made = {name: torch.empty(self.sizes[name], dtype=_dtype(one)) for name, one in found.items()}
        await self.read_into(made)
        return made

    def _check(self, name: str, shard: ShardOf) -> None:
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
        if shard.size != one.size:
            raise ValueError(
                f"{name!r} must have the size that was published, {one.size}, or be a part of that, got {shard.size}"
            )
        if not torch.can_cast(_dtype(one), shard.tensor.dtype):
            raise ValueError(f"{name!r} must be able to hold {one.dtype}, got {shard.tensor.dtype}")


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
