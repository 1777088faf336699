"""Kernels of values: put, fetch, rank index, moves between ranks, rows of other processes."""

from __future__ import annotations

import math
import traceback
from collections.abc import Sequence
from typing import Any, Final

import attrs
import msgspec
import torch

from trimesh import limits
from trimesh._transport.interface import Transfer, TransferKind
from trimesh.errors import ProtocolError
from trimesh.ids import ProcId
from trimesh.rdma.memory.handle import Handle, handle_of
from trimesh.rdma.memory.local import memory_of
from trimesh.tensor.dtensor.sharding import assemble, box_by_placements, placements_by_label
from trimesh.tensor.groups.groups import device_mesh
from trimesh.tensor.protocol.arguments import new_tensor, pack
from trimesh.tensor.protocol.placement import Box
from trimesh.tensor.rank.kernel import NO_COMMAND, Kernel, Poison
from trimesh.tensor.rank.moves import Part, PartReading, arrived, deliver, moves_of
from trimesh.tensor.rank.rank import Rank, TeamOnRank, lost


def put(
    rank: Rank,
    _: TeamOnRank,
    data: memoryview,
    move: int,
    dtype: torch.dtype,
    size: tuple[int, ...],
    stride: tuple[int, ...],
) -> torch.Tensor:
    """Return a tensor of the controller, sent as bytes, whose memory it uses on the host, or to be read (`move`)."""
    if move:
        return arrived(rank, data, move, dtype, size, Box.of_all(size))
    flat = torch.frombuffer(data, dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)
    return flat.as_strided(size, stride).to(rank.device)


@attrs.frozen
class FetchStep:
    """Step that sends tensors to the controller, or lends them; see `messages.Fetch`."""

    request: int
    refs: Sequence[int]
    is_large: bool = False

    def execute(self, rank: Rank, team: TeamOnRank) -> None:
        del team
        found: Any
        try:
            values = [rank.values[ref] for ref in self.refs]
            found = next((value for value in values if isinstance(value, Poison)), None)
            if found is None and self.is_large:
                deliver(rank, self.request, [(at, Box.of_all(value.size()), value) for at, value in enumerate(values)])
                return
            if found is None and (data := pack(values)) is not None:
                rank.outside.reply_packed(self.request, data)
                return
            if found is None:  # copies: later commands may write to them before they are sent
                found = [value.detach().cpu().clone() for value in values]
        except KeyError:
            found = Poison(*NO_COMMAND, "trimesh::fetch", lost())
        except RuntimeError as error:  # out of memory: the waiting controller needs a reply
            found = Poison(*NO_COMMAND, "trimesh::fetch", error)
        rank.outside.reply(self.request, found)


def metadata(rank: Rank, _: TeamOnRank, request: int, *values: Any) -> None:
    """Send the controller the metadata of tensors whose shapes depend on the data."""
    poison = next((value for value in values if isinstance(value, Poison)), None)
    if poison is not None:
        rank.outside.reply(request, poison)
        return
    found = [(list(value.size()), list(value.stride()), str(value.dtype).removeprefix("torch.")) for value in values]
    rank.outside.reply(request, found)


def index(rank: Rank, team: TeamOnRank, label: str) -> torch.Tensor:
    """Return this rank's own coordinate along a dimension of its team."""
    return torch.tensor(team.extent.point(team.place)[label], device=rank.device)


KERNELS: Final = (
    Kernel("put", put),
    Kernel("metadata", metadata, takes_poison=True),
    Kernel("index", index),
)


# ---- the two halves of a move on the ranks, and slices of a tensor's mesh --------------------------------------------

Routes = Sequence[Sequence[int]]
"""Processes that a rank sends to, or receives from, by place in the team."""


def same(_: Rank, __: TeamOnRank, value: torch.Tensor) -> torch.Tensor:
    """Return the same tensor, for a team of some of its ranks."""
    return value


def send(rank: Rank, team: TeamOnRank, value: Any, move: int, routes: Routes, waits: bool) -> None:  # noqa: FBT001
    """Offer a copy of a tensor, or its error, to the processes of some ranks; for `waits` see `Moves.stage`."""
    outside = rank.outside
    moves = moves_of(outside.proc)
    here = outside.proc.proc_id
    key = outside.controller.proc_id, move
    targets = [ProcId(target) for target in routes[team.index]]
    if here in targets:
        moves.kept[key] = value if isinstance(value, Poison) else _contiguous(value)
        targets.remove(here)
    if not targets:
        return
    what, name = value, "trimesh::send"
    if isinstance(value, Poison):
        name = value.what
    else:
        nbytes = math.prod(value.size()) * value.element_size()
        is_small = nbytes <= limits.TENSOR_INLINE_BYTES
        memory = memoryview(bytearray(nbytes)) if is_small else outside.run_in_trio(moves.stage, nbytes, waits)
        if nbytes:
            torch.frombuffer(memory, dtype=value.dtype).view(value.size()).copy_(value)
        what = bytes(memory) if is_small else memory
    outside.tell(moves.send, key, outside.engine, targets, what, outside.origin(name))


def receive(rank: Rank, team: TeamOnRank, move: int, routes: Routes, dtype: torch.dtype, size: Sequence[int]) -> Any:
    """Receive a tensor from the processes of some ranks: the sum if there are several, zeros if there is none."""
    outside = rank.outside
    moves = moves_of(outside.proc)
    key = outside.controller.proc_id, move
    total: torch.Tensor | None = None
    poison: Poison | None = None
    for source in routes[team.index]:
        if source == outside.proc.proc_id:
            found = moves.kept.pop(key)
        else:
            there = new_tensor(size, dtype)
            found = outside.run_in_trio(moves.receive, key, ProcId(source), there) or there.to(rank.device)
        if isinstance(found, Poison):
            poison = poison or found
        elif total is None:
            total = found
        else:
            total += found
    if poison is not None:
        return poison
    return torch.zeros(size, dtype=dtype, device=rank.device) if total is None else total


def _contiguous(value: torch.Tensor) -> torch.Tensor:
    return torch.empty(value.size(), dtype=value.dtype, device=value.device).copy_(value)


KERNELS_MOVES: Final = (
    Kernel("same", same),
    Kernel("send", send, takes_poison=True),
    Kernel("receive", receive),
)


# ---- kernel of `rows_of_others`: reads this rank's rows from other processes -----------------------------------------


def read_rows(
    rank: Rank,
    team: TeamOnRank,
    data: memoryview,
    dtype: torch.dtype,
    size: tuple[int, ...],
    cuts: tuple[int, ...],
    request: int,
) -> torch.Tensor | Poison:
    """Make a global tensor of rows in memory of other processes; reply when this rank has read its rows.

    Only the reply reports errors: the controller may retry, and then nothing counts as failed.
    """
    made: torch.Tensor | Poison
    try:
        made = _read(rank, team, data, dtype, size, cuts)
    except BaseException as error:  # noqa: BLE001 - sent to the controller, which raises it
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
            raise ProtocolError(f"a buffer of {rows} rows must have {part.nbytes} bytes, got {handle.nbytes}")
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
            span = memory_of(destination, "the destination of rows").span
            await bulk.move(
                handle.granted, Transfer(TransferKind.READ, handle.granted.grant, handle.offset + offset, span)
            )


KERNELS_ROWS: Final = (Kernel("read_rows", read_rows),)
