"""Global tensors on the ranks: made, laid out anew, taken apart, brought out.

Collectives are torch's own. Every rank of the team runs each of these kernels, so all of them take part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import attrs
import torch

from trimesh.tensor.copied_view import copied_views
from trimesh.tensor.groups import device_mesh
from trimesh.tensor.kernel import kernel
from trimesh.tensor.placement import WHOLE
from trimesh.tensor.rank import Poison, Rank, TeamOnRank
from trimesh.tensor.sharding import assemble, placements_by_label, shard_of, unsummed

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


@attrs.frozen
class Layout:
    """What `redistribute` changes, kept for its gradient."""

    placements: tuple[Placement, ...]


@kernel("distribute")
def distribute(
    rank: Rank, team: TeamOnRank, data: memoryview, dtype: torch.dtype, size: tuple[int, ...], cuts: tuple[int, ...]
) -> torch.Tensor:
    """Make a global tensor of its bytes, which every rank gets; each copies its own part out of them.

    All processes of a host map the one copy that the controller has written, so that a body for each rank would save
    nothing there: 64 MiB cut over 4 ranks take 0.1 s on two cores, of which the controller's copy is 0.04 s.
    """
    flat = torch.frombuffer(data, dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)
    whole = flat.view(size)
    mesh, placements = device_mesh(rank, team), placements_by_label(cuts)
    part = shard_of(whole.to(rank.device), mesh, placements)
    return assemble(part.clone(memory_format=torch.contiguous_format), mesh, placements, whole)


@kernel("distribute_like")
def distribute_like(rank: Rank, team: TeamOnRank, data: memoryview, dtype: torch.dtype, like: DTensor) -> torch.Tensor:
    """Make a global tensor of its bytes that lies as another of the same size."""
    flat = torch.frombuffer(data, dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)
    whole = flat.view(like.size())
    placements = unsummed(like.placements)
    part = shard_of(whole.to(rank.device), like.device_mesh, placements)
    return assemble(part.clone(memory_format=torch.contiguous_format), like.device_mesh, placements, whole)


@kernel("redistribute")
def redistribute(rank: Rank, team: TeamOnRank, value: DTensor, cuts: tuple[int, ...]) -> tuple[DTensor, Layout]:
    """Lay a tensor out anew; return how it lay, too."""
    placements = placements_by_label(cuts)
    return _detached(value, _fresh(rank, value).redistribute(placements=placements)), Layout(value.placements)


@kernel("redistribute_back")
def redistribute_back(rank: Rank, team: TeamOnRank, value: DTensor, layout: Layout) -> DTensor:
    """Lay a gradient out as the tensor that it is of."""
    return _detached(value, _fresh(rank, value).redistribute(placements=unsummed(layout.placements)))


@kernel("to_local")
def to_local(rank: Rank, team: TeamOnRank, value: DTensor, cuts: tuple[int, ...]) -> torch.Tensor:
    """Return this rank's part as a tensor of its own."""
    return _fresh(rank, value).redistribute(placements=placements_by_label(cuts)).to_local().clone()


@kernel("to_global")
def to_global(
    rank: Rank,
    team: TeamOnRank,
    value: torch.Tensor,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    cuts: tuple[int, ...],
) -> DTensor:
    """Make one global tensor of the tensors of the ranks."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    mesh, placements = device_mesh(rank, team), placements_by_label(cuts)
    local = value.clone(memory_format=torch.contiguous_format)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(size), stride=stride)


@kernel("placements", takes_poison=True)
def placements(rank: Rank, team: TeamOnRank, value: DTensor | Poison, request: int) -> None:
    """Tell the controller how a tensor lies."""

    def find(fresh: DTensor) -> tuple[list[int], list[str]]:
        cuts = [getattr(one, "dim", WHOLE) for one in fresh.placements]
        return cuts, [getattr(one, "reduce_op", "") for one in fresh.placements]

    _answer(rank, team, [value], request, lambda found: find(found[0]), is_asked=team.index == 0)


@kernel("fetch_full", takes_poison=True)
def fetch_full(rank: Rank, team: TeamOnRank, values: list[DTensor | Poison], request: int) -> None:
    """Bring whole tensors out: the first rank sends them, the others only say that they could."""

    def find(fresh: list[DTensor]) -> list[torch.Tensor]:
        wholes = [one.full_tensor() for one in fresh]
        return [_copy(whole) for whole in wholes] if team.index == 0 else []

    _answer(rank, team, values, request, find, is_asked=True)


@kernel("fetch_part", takes_poison=True)
def fetch_part(rank: Rank, team: TeamOnRank, value: DTensor | Poison, request: int, place: int) -> None:
    """Bring one rank's part out; all take part, because what is partial is added up first."""

    def find(fresh: list[DTensor]) -> torch.Tensor:
        return _copy(fresh[0].redistribute(placements=unsummed(fresh[0].placements)).to_local())

    _answer(rank, team, [value], request, find, is_asked=team.index == place)


def _answer(
    rank: Rank,
    team: TeamOnRank,
    values: Sequence[DTensor | Poison],
    request: int,
    find: Callable[[list[DTensor]], Any],
    *,
    is_asked: bool,
) -> None:
    """Send what `find` makes of global tensors, or why there is nothing to send."""
    poison = next((value for value in values if isinstance(value, Poison)), None)
    found: Any = None
    if poison is not None:
        rank.leave(team, poison)
    else:
        try:
            found = find([_fresh(rank, value) for value in values if not isinstance(value, Poison)])
        except Exception as error:  # noqa: BLE001 - goes to whoever fetches
            poison = Poison(team.number, team.done, "trimesh::fetch", error)
            rank.leave(team, poison)
    if is_asked:
        rank.outside.reply(request, found if poison is None else poison)


def _copy(value: torch.Tensor) -> torch.Tensor:
    return value.detach().cpu().clone(memory_format=torch.contiguous_format)


def _detached(value: DTensor, made: DTensor) -> DTensor:
    """Return what was made of a tensor, with memory of its own: torch gives the same where nothing was to be done."""
    return cast("DTensor", made.clone()) if made._local_tensor is value._local_tensor else made


def _fresh(rank: Rank, value: DTensor) -> DTensor:
    copied_views(rank).refresh(value)
    return value
