"""The kernels of a simulated rank that are not those of a real one: where values would come from, or go to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from trimesh.tensor.dtensor.sharding import assemble, box_by_placements, boxed, placements_by_label
from trimesh.tensor.kernels.table import KERNELS
from trimesh.tensor.rank.kernel import Kernel, Kernels
from trimesh.tensor.rank.rank import Rank, TeamOnRank
from trimesh.tensor.simulation import moving
from trimesh.tensor.simulation.moving import mesh_of, meter_of


def put(
    rank: Rank,
    _: TeamOnRank,
    _data: memoryview,
    _move: int,
    dtype: torch.dtype,
    size: Sequence[int],
    stride: Sequence[int],
) -> torch.Tensor:
    return meter_of(rank).made(size, dtype, stride)


def distribute(
    rank: Rank,
    team: TeamOnRank,
    _data: memoryview,
    _move: int,
    dtype: torch.dtype,
    size: tuple[int, ...],
    cuts: tuple[int, ...],
) -> torch.Tensor:
    mesh, placements = mesh_of(rank, team), placements_by_label(cuts)
    part = meter_of(rank).made(box_by_placements(size, mesh, placements).size, dtype)
    return assemble(part, mesh, placements, torch.empty(size, device="meta"))


def distribute_like(
    rank: Rank, _: TeamOnRank, _data: memoryview, _move: int, dtype: torch.dtype, like: Any
) -> torch.Tensor:
    size, mesh, placements = tuple(like.size()), like.device_mesh, boxed(like.placements)
    part = meter_of(rank).made(box_by_placements(size, mesh, placements).size, dtype)
    return assemble(part, mesh, placements, torch.empty(size, device="meta"))


def to_global(rank: Rank, team: TeamOnRank, *args: Any) -> Any:
    mesh_of(rank, team)
    return KERNELS.by_name["to_global"].function(rank, team, *args)


def keep_generators(rank: Rank, _: TeamOnRank) -> torch.Tensor:
    """Return what stands for the states of generators: nothing is drawn."""
    return meter_of(rank).made((0,), torch.uint8)


def _nothing(*_: Any) -> None:
    """Nothing: there are no values that it could change."""


def _refused(what: str) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        raise NotImplementedError(f"a simulation has no values: {what} needs processes")

    return refuse


_REFUSED: Final = {
    "get_generator": "the state of generators",
    "publication_open": "a publication",
    "publish": "a publication",
    "define_function": "a function under @trimesh.remote",
    "write_parts": "a checkpoint",
    "read_parts": "a checkpoint",
    "read_rows": "a stream of rows",
    "profile_begin": "a profile, in the place of which it has mesh.write_trace(),",
}

SIMULATED: Final = Kernels(
    {
        **KERNELS.by_name,
        **{
            one.name: one
            for one in (
                Kernel("put", put),
                Kernel("distribute", distribute),
                Kernel("distribute_like", distribute_like),
                *moving.KERNELS,
                Kernel("to_global", to_global),
                Kernel("seed", _nothing),
                Kernel("set_generator", _nothing),
                Kernel("keep_generators", keep_generators),
                Kernel("give_generators_back", _nothing),
                *(Kernel(name, _refused(what)) for name, what in _REFUSED.items()),
            )
        },
    },
    KERNELS.families,
    KERNELS.local_replay,
    KERNELS.local_sequence,
)
