"""The two halves of a move on the ranks, and the part of a mesh as a tensor has it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch

from trimesh import limits
from trimesh.ids import ProcId
from trimesh.tensor.protocol.new_memory import new_tensor
from trimesh.tensor.rank.kernel import Kernel
from trimesh.tensor.rank.moves import moves_of
from trimesh.tensor.rank.poison import Poison
from trimesh.tensor.rank.rank import Rank, TeamOnRank

Routes = Sequence[Sequence[int]]
"""By place in the team, the processes that a rank sends to, or receives from."""


def same(_: Rank, __: TeamOnRank, value: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a larger team for a part of its ranks: the very same."""
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
    """Return the tensor that comes from the processes of some ranks: their sum if several, zeros if none."""
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


KERNELS: Final = (
    Kernel("same", same),
    Kernel("send", send, takes_poison=True),
    Kernel("receive", receive),
)
