"""Versions of tensors whose parts several actors have: each publishes its own, readers get them as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import torch

from trimesh import limits
from trimesh._runtime.actors import find_cell
from trimesh.plain_numbers import plain_whole
from trimesh.rdma.publications.published import Published, finish
from trimesh.shape.extent import Extent
from trimesh.shape.point import place_name
from trimesh.shape.region import Region
from trimesh.shape.value_mesh import ValueMesh
from trimesh.tensor.controller.shard_of import ShardOf, shard_of
from trimesh.tensor.protocol.state_layout import LAYOUT, PartOfState
from trimesh.tensor.publications.state_publication import Publication, rebuild


class ShardPublisher:
    """What one of several ranks publishes of a set of tensors: an FSDP rank, an actor of a tensor parallel group.

    Each rank makes one in its actor, and publishes its parts under the same numbers. Who has the handles of all of them
    reads whole versions, by `publication_of`. It ends with the actor that made it.

    Args:
        retain: How many of the newest versions stay readable, from 1; ranks may be one version apart besides. Each has
            memory of its own, so what the optimizer changes afterwards does not touch it.
        alone: Whether its versions are read by themselves, not as one with those of other members of its mesh.

    Raises:
        ValueError: `retain` is not 1 to `limits.PUBLISHED_SLOTS_MAX - 1`.
        RuntimeError: No mesh is open here.

    Attributes:
        handle: What readers need of this rank: an endpoint returns it.

    Example:
        self.shards = ShardPublisher()                                   # in each trainer; an endpoint returns .handle
        await self.shards.publish(self.model.state_dict(), version=step)   # of DTensors, say

        weights = publication_of(await trainers.handle.call())           # anywhere
        async with weights.pin() as snapshot:
            await snapshot.read_into({"w": ShardOf(mine, size=(4096, 1024), start=(0, 512))})
    """

    def __init__(self, *, retain: int = 1, alone: bool = False) -> None:
        retain = plain_whole(retain)
        if not 1 <= retain < limits.PUBLISHED_SLOTS_MAX:
            raise ValueError(f"1 to {limits.PUBLISHED_SLOTS_MAX - 1} versions are retained, got {retain}")
        self.handle = Published(slots=retain + 1)
        self._is_alone = alone

    async def publish(self, tensors: Mapping[str, torch.Tensor | ShardOf], *, version: int | None = None) -> int:
        """Copy this rank's parts of tensors, and make them its latest version; return its number.

        A version is there for readers once every rank has published it.

        Args:
            tensors: By name, the same names on all ranks: each a `ShardOf`, a `DTensor`, or a whole tensor that this
                rank alone publishes whole. They must not be written to meanwhile.
            version: Its number, the same on all ranks; None for one more than the last.

        Raises:
            ValueError: This is not the first member of its mesh, and all tensors are whole: then the first one has
                published them, too.

        Raises and blocks as `Published.publish`.
        """
        if not self._is_alone:
            _check_replica(tensors)
        parts: list[PartOfState] = []
        local: dict[str, Any] = {}
        for name, value in tensors.items():
            if not isinstance(name, str) or name == LAYOUT:
                raise TypeError(f"published tensors are named by texts other than {LAYOUT!r}, got {name!r}")
            one = shard_of(value)
            is_here = one.is_first and one.box.count > 0
            parts.append(
                PartOfState(
                    name,
                    is_global=True,
                    dtype=str(one.tensor.dtype).removeprefix("torch."),
                    size=one.size,
                    start=one.box.start,
                    part=one.box.size,
                    is_here=is_here,
                )
            )
            if is_here:
                local[name] = one.tensor.detach().contiguous()
        return await self.handle.publish({LAYOUT: bytearray(msgspec.msgpack.encode(parts)), **local}, version=version)

    def finish(self) -> None:
        """Say that no version follows; those that are there are read and pinned until `aclose`."""
        finish(self.handle)

    async def aclose(self) -> None:
        """Publish nothing any more; see `Published.aclose`."""
        await self.handle.aclose()


def _check_replica(tensors: Mapping[str, Any]) -> None:
    """Refuse the whole state of a replica, of which readers would find each part several times."""
    cell = find_cell()
    if cell is None or not tensors or cell.spec.point.rank == 0:
        return
    if any(isinstance(one, ShardOf) or hasattr(one, "placements") for one in tensors.values()):
        return
    raise ValueError(
        f"each part of a publication is published by one rank, got whole tensors on "
        f"{place_name(cell.spec.name, cell.spec.point)}, which is not the first: of replicas the others publish "
        "ShardOf(tensor, size=tensor.shape, start=[0] * tensor.dim(), is_first=False) under the same names, and "
        "replicas that are read one by one have ShardPublisher(alone=True)"
    )


def publication_of(handles: ValueMesh[Published] | Iterable[Published]) -> Publication:
    """Return a handle on what several ranks publish as one: `publication_of(await trainers.handle.call())`.

    It may be sent to any actor. A version is there when every rank has published it, and pinned on all of them, so no
    reader ever gets parts of two. When one of the ranks has been restarted, make another one, with its new handle.

    Args:
        handles: `ShardPublisher.handle` of every rank.

    Raises:
        ProtocolError: There are none, or one of them is something else.
    """
    if not isinstance(handles, ValueMesh):
        found = list(handles)
        handles = ValueMesh(Region(Extent({"ranks": len(found)})), found)
    return rebuild(handles)
