"""Checkpoints on the ranks: each writes its own parts of global tensors to a file, and reads those that it needs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch

from trimesh.tensor.dtensor.sharding import assemble, box_by_placements, boxed, part_on_rank
from trimesh.tensor.kernels.global_tensors import refreshed
from trimesh.tensor.protocol.box import Box
from trimesh.tensor.protocol.stored import Stored, Wanted, read_box
from trimesh.tensor.rank.kernel import Kernel
from trimesh.tensor.rank.poison import Poison
from trimesh.tensor.rank.rank import Rank, TeamOnRank

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def write_parts(
    rank: Rank, team: TeamOnRank, values: list[DTensor | Poison], path: memoryview, first: int, request: int
) -> None:
    """Write this rank's parts to a file of its own; tell the controller which they are and where.

    Of a part that several ranks have one writes it: they take turns from tensor to tensor.
    """
    poison = next((value for value in values if isinstance(value, Poison)), None)
    if poison is not None:
        rank.leave(team, poison)
        rank.outside.reply(request, poison)
        return
    try:
        parts = [part_on_rank(refreshed(rank, value)) for value in values if not isinstance(value, Poison)]
        own = [
            (index, box, local)
            for index, (box, local, lying) in enumerate(parts)
            if box.count and _is_writer(lying, index)
        ]
        found = _written(Path(bytes(path).decode()) / f"__{first + team.index}_0.distcp", own) if own else []
    except BaseException as error:
        rank.outside.reply(request, Poison(team.number, team.done, "trimesh::save_checkpoint", error))
        raise
    rank.outside.reply(request, found)


def _written(path: Path, own: Sequence[tuple[int, Box, torch.Tensor]]) -> list[list[Any]]:
    """Write some parts; return for each the number of its tensor, and what `Stored` has."""
    found: list[list[Any]] = []
    with path.open("wb") as file:
        for index, box, local in own:
            begin = file.tell()
            # A copy: of a view all that it is a view of would be written.
            torch.save(local.detach().cpu().clone(memory_format=torch.contiguous_format), file)
            stored = Stored(path.name, begin, file.tell() - begin, box.start, box.size)
            found.append(
                [index, *(list(one) if type(one) is tuple else one for one in msgspec.structs.astuple(stored))]
            )
        file.flush()
        os.fsync(file.fileno())
    return found


def _is_writer(value: DTensor, index: int) -> bool:
    """Whether this rank is the one, of those that have the same part, that writes it."""
    replica = count = 0
    places = value.device_mesh.get_coordinate() or ()
    for dim, (placement, place) in enumerate(zip(value.placements, places, strict=True)):
        if not placement.is_shard():
            extent = value.device_mesh.size(dim)
            replica, count = replica * extent + place, max(1, count) * extent
    return replica == index % max(1, count)


def read_parts(
    rank: Rank,
    team: TeamOnRank,
    data: memoryview,
    dtypes: tuple[torch.dtype, ...],
    likes: list[DTensor | Poison],
    request: int,
) -> list[torch.Tensor]:
    """Make global tensors that lie as others do, of what files have; tell the controller when they are there."""
    try:
        wanted = msgspec.msgpack.decode(data, type=Wanted)
        made = [
            _read(rank, wanted.directory, parts, dtype, like)
            for parts, dtype, like in zip(wanted.parts, dtypes, likes, strict=True)
        ]
    except BaseException as error:
        rank.outside.reply(request, Poison(team.number, team.done, "trimesh::load_checkpoint", error))
        raise
    rank.outside.reply(request, len(made))
    return made


def _read(rank: Rank, directory: str, parts: Sequence[Stored], dtype: torch.dtype, like: Any) -> torch.Tensor:
    if isinstance(like, Poison):  # what it was to be is not known; how it lies is
        if like.kept is None:
            raise like.error
        like = like.kept
    size, mesh, placements = tuple(like.size()), like.device_mesh, boxed(like.placements)
    box = box_by_placements(size, mesh, placements)
    there = read_box(Path(directory), parts, box, dtype)
    return assemble(there.to(rank.device), mesh, placements, torch.empty(size, device="meta"))


KERNELS: Final = (
    Kernel("write_parts", write_parts, takes_poison=True),
    Kernel("read_parts", read_parts, takes_poison=True),
)
