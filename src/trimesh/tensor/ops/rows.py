"""Global tensors from rows of data: gathered in this process, or read from the memory of others."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import attrs
import msgspec
import torch

from trimesh import limits
from trimesh.actor.proc_mesh import ProcMesh
from trimesh.rdma.buffers.buffer import RDMABuffer
from trimesh.tensor.controller import shapes
from trimesh.tensor.controller.engine import answers
from trimesh.tensor.controller.team import Team, call_kernel
from trimesh.tensor.controller.tensor import MeshTensor
from trimesh.tensor.controller.upload import Sizes, lent
from trimesh.tensor.ops.global_tensor import checked_team, global_meta
from trimesh.tensor.protocol.placement import Cut, cuts_by_label
from trimesh.tensor.rank.moves import moves_of
from trimesh.tensor.session.opening import team_of

LyingRows = tuple[int, int, RDMABuffer]
"""First row, number of rows, and the buffer that holds them."""


def team_for_rows(mesh: ProcMesh) -> Team:
    """Return the team to put rows onto."""
    return checked_team(team_of(mesh, "rows of data are put onto"))


class RowMemory:
    """Memory for rows that this process gathers and the ranks read.

    Attributes:
        memory: Row-major; any thread may write to it before `put`.
    """

    def __init__(self, team: Team, memory: memoryview, *, is_staged: bool) -> None:
        self.memory = memory
        self._team = team
        self._is_staged = is_staged

    def put(self, size: Sequence[int], dtype: torch.dtype, placements: Sequence[Cut]) -> MeshTensor:
        """Return the written rows as a global tensor; the memory is released when the ranks have read it.

        Args:
            size: Size of all rows together.
            dtype: Dtype of the elements.
            placements: Placements of the tensor.
        """
        team = self._team
        cuts = _cuts(team, placements, len(size))
        meta = global_meta(team, tuple(size), dtype)
        body = lent(team, self.memory) if self._is_staged else nullcontext((self.memory, 0))
        self._is_staged = False
        with body as (data, move):
            [made] = call_kernel(team, "distribute", data, move, dtype, Sizes(meta.size), Sizes(cuts), outputs=[meta])
        return made

    def give_back(self) -> None:
        """Release the memory unused."""
        if self._is_staged:
            self._is_staged = False
            moves_of(self._team.engine.proc).unstage(self.memory)


@asynccontextmanager
async def row_memory(team: Team, sizes: Sequence[int]) -> AsyncGenerator[list[RowMemory]]:
    """Lend memory for columns of the given sizes in bytes; memory not `put` by the end of the block is released.

    Blocking: while ranks have not read memory lent before; cancellable.
    """
    found: list[RowMemory] = []
    try:
        for nbytes in sizes:
            if nbytes < limits.TENSOR_LENT_BYTES_MIN or team.engine.proc.is_simulated:
                found.append(RowMemory(team, memoryview(bytearray(nbytes)), is_staged=False))
            else:
                team.engine.flush()
                memory = await moves_of(team.engine.proc).stage(nbytes)
                found.append(RowMemory(team, memory, is_staged=True))
        yield found
    finally:
        for one in found:
            one.give_back()


async def rows_of_others(
    team: Team, columns: Sequence[tuple[tuple[int, ...], torch.dtype, Sequence[LyingRows]]], placements: Sequence[Cut]
) -> list[MeshTensor]:
    """Return rows in memory of other processes as global tensors, when all ranks have read what they need.

    Args:
        team: The ranks.
        columns: Size, dtype and buffers of each column; buffers in order, without gaps.
        placements: Placements of the tensors.

    Raises:
        MeshErrorGroup: A process has ended, or no carrier works between it and a rank.

    Blocking: until the ranks have read, cancellable. After a cancel they may still read: revoke the buffers, or keep
    the memory.
    """
    tensors: list[MeshTensor] = []
    requests = []
    for size, dtype, lying in columns:
        cuts = _cuts(team, placements, len(size))
        meta = global_meta(team, size, dtype)
        told: list[Any] = [[first, rows, _fields(buffer)] for first, rows, buffer in lying]
        data = memoryview(msgspec.msgpack.encode(told))

        def issue(number: int, data: memoryview = data, meta: Any = meta, cuts: tuple[int, ...] = cuts) -> None:
            operands = (data, meta.dtype, Sizes(meta.size), Sizes(cuts), number)
            tensors.extend(call_kernel(team, "read_rows", *operands, outputs=[meta]))

        requests.append(team.engine.ask(team, range(len(team.peers)), issue, shapes.READ))
    for request in requests:
        await answers(request)
    return tensors


def _fields(buffer: RDMABuffer) -> tuple[Any, ...]:
    """Return the handle of a buffer as plain values, without its point, which ranks do not need."""
    handle = buffer.handle
    origin = attrs.evolve(handle.granted.origin, point=None)
    return attrs.evolve(handle, granted=msgspec.structs.replace(handle.granted, origin=origin)).fields()


def _cuts(team: Team, placements: Sequence[Cut], ndim: int) -> tuple[int, ...]:
    return cuts_by_label([*placements, *[None] * ndim][:ndim], ndim, team.region.extent)
