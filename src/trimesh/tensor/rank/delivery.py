"""Large tensors between the controller and a rank, on the rank: read from there, and lent to be read there."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from trimesh.tensor.protocol.box import Box
from trimesh.tensor.protocol.new_memory import new_tensor
from trimesh.tensor.rank.moves import moves_of
from trimesh.tensor.rank.parts import Part, PartReading, fill, lay_out
from trimesh.tensor.rank.poison import Poison
from trimesh.tensor.rank.rank import Rank, TeamOnRank


def arrived(rank: Rank, data: memoryview, move: int, dtype: torch.dtype, size: Sequence[int], box: Box) -> torch.Tensor:
    """Return a part of a tensor of the controller, in memory of its own.

    Args:
        rank: This one.
        data: Body of the command.
        move: Number of the move by which the tensor is lent, to be read as `data` says; 0 if `data` are its bytes.
        dtype: Of the tensor.
        size: Of the tensor.
        box: The part.
    """
    whole = Box.of_all(size)
    there = new_tensor(box.size, dtype)
    if not move:
        if box.count:
            flat = torch.frombuffer(data, dtype=dtype)
            there.copy_(flat.view(tuple(size))[whole.slices(box)])
        return there.to(rank.device)
    part = Part(whole, dtype, 0)
    reading = PartReading()
    reading.add(part, there, box)
    outside = rank.outside
    moves, key = moves_of(outside.proc), (outside.controller.proc_id, move)
    handle = msgspec.msgpack.decode(data)
    outside.run_in_trio(moves.pull, outside.controller, outside.engine, key, handle, reading.pieces, part.nbytes)
    reading.finish()
    return there.to(rank.device)


def unneeded(rank: Rank, move: int) -> None:
    """Say that a tensor that the controller has lent is not needed."""
    if move:
        outside = rank.outside
        key = outside.controller.proc_id, move
        outside.tell(moves_of(outside.proc).leave, outside.controller, outside.engine, key)


def deliver(rank: Rank, team: TeamOnRank, request: int, found: Sequence[tuple[int, Box, torch.Tensor]]) -> None:
    """Send parts of tensors to the controller: a copy of them, which it reads.

    Args:
        rank: This one.
        team: Of the command.
        request: What is answered.
        found: For each part which of the tensors that were asked for it is of, which part, and its values.
    """
    outside = rank.outside
    try:
        parts, nbytes = lay_out((box, value.dtype) for _, box, value in found)
        memory = outside.run_in_trio(moves_of(outside.proc).stage_if_room, nbytes) if nbytes else None
        is_staged = memory is not None
        if memory is None:
            memory = memoryview(bytearray(nbytes))
        for part, (_, _, value) in zip(parts, found, strict=True):
            fill(memory, part, value.detach())
    except (RuntimeError, MemoryError, OSError) as error:  # whoever waits must hear of that
        outside.reply(request, Poison(team.number, team.done, "trimesh::fetch", error))
        return
    described = [[index, *part.fields()] for (index, _, _), part in zip(found, parts, strict=True)]
    outside.reply_lent(request, described, memory, is_staged=is_staged)
