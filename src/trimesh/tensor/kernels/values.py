"""The kernels that every tensor program needs: bring a value in, bring one out, know the own rank."""

from __future__ import annotations

from typing import Any, Final

import torch

from trimesh.tensor.protocol.box import Box
from trimesh.tensor.rank.delivery import arrived, deliver
from trimesh.tensor.rank.kernel import Kernel
from trimesh.tensor.rank.poison import Poison
from trimesh.tensor.rank.rank import Rank, TeamOnRank


def put(
    rank: Rank,
    _: TeamOnRank,
    data: memoryview,
    move: int,
    dtype: torch.dtype,
    size: tuple[int, ...],
    stride: tuple[int, ...],
) -> torch.Tensor:
    """Return a tensor of the controller; one that has come as bytes has their memory from now on."""
    if move:
        return arrived(rank, data, move, dtype, size, Box.of_all(size))
    flat = torch.frombuffer(data, dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)
    return flat.as_strided(size, stride).to(rank.device)


def fetch(rank: Rank, team: TeamOnRank, values: list[Any], request: int, places: list[int]) -> None:
    """Send values to the controller, from the ranks at some places of the team."""
    if team.index not in places:
        return
    for value in values:
        if isinstance(value, Poison):
            rank.outside.reply(request, value)
            return
    try:  # copies: what comes next may write to them before their bytes have left
        found: Any = [value.detach().cpu().clone() for value in values]
    except RuntimeError as error:  # no memory for them: whoever waits must hear of that
        found = Poison(team.number, team.done, "trimesh::fetch", error)
    rank.outside.reply(request, found)


def fetch_large(rank: Rank, team: TeamOnRank, values: list[Any], request: int, places: list[int]) -> None:
    """Let the controller read values, from the ranks at some places of the team."""
    if team.index not in places:
        return
    poison = next((value for value in values if isinstance(value, Poison)), None)
    if poison is not None:
        rank.outside.reply(request, poison)
        return
    deliver(rank, team, request, [(index, Box.of_all(value.size()), value) for index, value in enumerate(values)])


def metadata(rank: Rank, _: TeamOnRank, request: int, *values: Any) -> None:
    """Tell the controller the metadata of tensors whose shapes follow from their values."""
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
    Kernel("fetch", fetch, takes_poison=True),
    Kernel("fetch_large", fetch_large, takes_poison=True),
    Kernel("metadata", metadata, takes_poison=True),
    Kernel("index", index),
)
