"""Kernels of publications and checkpoints: each rank publishes, or writes and reads, its own parts of tensors."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import msgspec
import torch

from trimesh._runtime.actors import set_proc_of_task
from trimesh.rdma.publications.published import rebuild
from trimesh.rdma.publications.publisher import Publisher, publications_of
from trimesh.tensor.dtensor.sharding import assemble, box_by_placements, boxed, is_first_replica, part_on_rank
from trimesh.tensor.kernels.global_tensors import refreshed
from trimesh.tensor.protocol.placement import LAYOUT, Box, PartOfState, Stored, Wanted, read_box
from trimesh.tensor.rank.kernel import Kernel, Poison
from trimesh.tensor.rank.rank import Rank, TeamOnRank

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@attrs.define(eq=False)
class _Open:
    """Open publications of one rank, by number."""

    by_number: dict[int, Publisher] = attrs.field(factory=dict[int, Publisher])


def publication_open(rank: Rank, team: TeamOnRank, number: int, slots: int, request: int) -> None:
    """Open a publication; reply with its handle."""

    def begin() -> Any:
        made = publications_of(rank.outside.proc).open(slots)
        rank.above.setdefault(_Open, _Open()).by_number[number] = made
        return rebuild(made.number, made.board)

    _answer(rank, team, request, lambda: _in_trio(rank, begin))


def publish(
    rank: Rank, team: TeamOnRank, values: list[Any], names: tuple[str, ...], number: int, version: int, request: int
) -> None:
    """Publish this rank's parts as a version. A part that several ranks hold is published by the first of them."""
    poison = next((value for value in values if isinstance(value, Poison)), None)
    if poison is not None:
        rank.leave(team, poison)
        rank.outside.reply(request, poison)
        return

    def run() -> int:
        parts: list[PartOfState] = []
        tensors: dict[str, Any] = {}
        for name, value in zip(names, values, strict=True):
            box, local, is_own = Box.of_all(value.size()), value, True
            is_global = type(value) is not torch.Tensor
            if is_global:
                box, local, lying = part_on_rank(refreshed(rank, value))
                is_own = is_first_replica(lying)
            dtype = str(value.dtype).removeprefix("torch.")
            has_part = is_own and box.count > 0
            parts.append(PartOfState(name, is_global, dtype, tuple(value.size()), box.start, box.size, has_part))
            if has_part:
                tensors[name] = local.detach().contiguous()
        head = bytearray(msgspec.msgpack.encode(parts))
        publisher = rank.above[_Open].by_number[number]

        async def copy() -> int:
            set_proc_of_task(rank.outside.proc)
            published: int = await publisher.publish({LAYOUT: head, **tensors}, version)
            return published

        found: int = rank.outside.run_in_trio(copy)
        return found

    _answer(rank, team, request, run)


def publication_close(rank: Rank, team: TeamOnRank, number: int, request: int) -> None:
    publisher = rank.above[_Open].by_number.pop(number)

    async def close() -> None:
        set_proc_of_task(rank.outside.proc)
        await publisher.aclose()

    _answer(rank, team, request, lambda: rank.outside.run_in_trio(close))


def _in_trio(rank: Rank, function: Callable[[], Any]) -> Any:
    async def run() -> Any:
        set_proc_of_task(rank.outside.proc)
        return function()

    return rank.outside.run_in_trio(run)


def _answer(rank: Rank, team: TeamOnRank, request: int, function: Callable[[], Any]) -> None:
    """Send the result of a function, or its error, to the controller."""
    try:
        found = function()
    except Exception as error:  # noqa: BLE001 - sent to the controller, which raises it
        found = Poison(team.number, team.done, "trimesh::publish", error)
        rank.leave(team, found)
    rank.outside.reply(request, found)


KERNELS: Final = (
    Kernel("publication_open", publication_open),
    Kernel("publish", publish, takes_poison=True),
    Kernel("publication_close", publication_close),
)


# ---- checkpoints -----------------------------------------------------------------------------------------------------

# Kernels of checkpoints: each rank writes its own parts of global tensors to a file, and reads the parts that it needs.


def write_parts(
    rank: Rank, team: TeamOnRank, values: list[DTensor | Poison], path: memoryview, first: int, request: int
) -> None:
    """Write this rank's parts to a file of its own; send the controller the parts and their offsets.

    A part that several ranks hold is written by one of them; they take turns from tensor to tensor.
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
    """Write some parts; return for each the number of its tensor, and the fields of `Stored`."""
    found: list[list[Any]] = []
    with path.open("wb") as file:
        for index, box, local in own:
            begin = file.tell()
            # A copy, as `torch.save` writes the whole storage of a view.
            torch.save(local.detach().cpu().clone(memory_format=torch.contiguous_format), file)
            stored = Stored(path.name, begin, file.tell() - begin, box.start, box.size)
            found.append(
                [index, *(list(one) if type(one) is tuple else one for one in msgspec.structs.astuple(stored))]
            )
        file.flush()
        os.fsync(file.fileno())
    return found


def _is_writer(value: DTensor, index: int) -> bool:
    """Return whether this rank writes its part, among the ranks that hold the same part."""
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
    """Read global tensors from files, with the placements of others; reply to the controller when done."""
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
    if isinstance(like, Poison):  # its values are lost, its placements may be known
        if like.kept is None:
            raise like.error
        like = like.kept
    size, mesh, placements = tuple(like.size()), like.device_mesh, boxed(like.placements)
    box = box_by_placements(size, mesh, placements)
    there = read_box(Path(directory), parts, box, dtype)
    return assemble(there.to(rank.device), mesh, placements, torch.empty(size, device="meta"))


KERNELS_CHECKPOINTS: Final = (
    Kernel("write_parts", write_parts, takes_poison=True),
    Kernel("read_parts", read_parts, takes_poison=True),
)
