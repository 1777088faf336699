"""The kernel behind `rows_of_others`: this rank's rows, read from where they lie."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import torch

from trimesh._transport.interface.mover import Transfer, TransferKind
from trimesh.errors import ProtocolError
from trimesh.rdma.memory.handle import Handle, handle_of
from trimesh.rdma.memory.local import memory_of
from trimesh.tensor.dtensor.sharding import assemble, box_by_placements, placements_by_label
from trimesh.tensor.groups.groups import device_mesh
from trimesh.tensor.protocol.box import Box
from trimesh.tensor.protocol.new_memory import new_tensor
from trimesh.tensor.rank.kernel import Kernel
from trimesh.tensor.rank.parts import Part, PartReading
from trimesh.tensor.rank.poison import Poison
from trimesh.tensor.rank.rank import Rank, TeamOnRank


def read_rows(
    rank: Rank,
    team: TeamOnRank,
    data: memoryview,
    dtype: torch.dtype,
    size: tuple[int, ...],
    cuts: tuple[int, ...],
    request: int,
) -> torch.Tensor | Poison:
    """Make a global tensor of rows in memory of other processes, and say when this rank has read its own.

    What fails is told by the answer alone: the controller may try again, and then nothing has failed.
    """
    made: torch.Tensor | Poison
    try:
        made = _read(rank, team, data, dtype, size, cuts)
    except BaseException as error:  # noqa: BLE001 - waits for whoever fetches
        traceback.clear_frames(error.__traceback__)  # they hold tensors
        made = Poison(team.number, team.done, "trimesh::read_rows", error)
    rank.outside.reply(request, made if isinstance(made, Poison) else 1)
    return made


def _read(
    rank: Rank,
    team: TeamOnRank,
    data: memoryview,
    dtype: torch.dtype,
    size: tuple[int, ...],
    cuts: tuple[int, ...],
) -> torch.Tensor:
    mesh, placements = device_mesh(rank, team), placements_by_label(cuts)
    box = box_by_placements(size, mesh, placements)
    there = new_tensor(box.size, dtype)
    readings: list[tuple[Handle, PartReading]] = []
    for first, rows, fields in msgspec.msgpack.decode(data):
        part = Part(Box((first, *[0] * (len(size) - 1)), (rows, *size[1:])), dtype, 0)
        handle = handle_of(*fields)
        if handle.nbytes != part.nbytes:
            raise ProtocolError(f"{rows} rows must be lent whole, {part.nbytes} bytes, got {handle.nbytes}")
        reading = PartReading()
        reading.add(part, there, box)
        if reading.pieces:
            readings.append((handle, reading))
    rank.outside.run_in_trio(_pull, rank, readings)
    for _, reading in readings:
        reading.finish()
    return assemble(there.to(rank.device), mesh, placements, torch.empty(size, device="meta"))


async def _pull(rank: Rank, readings: Sequence[tuple[Handle, PartReading]]) -> None:
    bulk: Any = rank.outside.proc.bulk
    for handle, reading in readings:
        for offset, destination in reading.pieces:
            span = memory_of(destination, "what rows are read into").span
            await bulk.move(
                handle.granted, Transfer(TransferKind.READ, handle.granted.grant, handle.offset + offset, span)
            )


KERNELS: Final = (Kernel("read_rows", read_rows),)
