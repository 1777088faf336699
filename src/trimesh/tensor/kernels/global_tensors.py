"""Global tensors on the ranks: made, laid out anew, taken apart, brought out.

Collectives are torch's own. Every rank of the team runs each of these kernels, so all of them take part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

import attrs
import torch

from trimesh.errors import ShapeError
from trimesh.tensor.dtensor.copied_view import copied_views
from trimesh.tensor.dtensor.sharding import (
    assemble,
    box_by_placements,
    boxed,
    is_first_replica,
    part_on_rank,
    placements_by_label,
    unsummed,
)
from trimesh.tensor.groups.groups import device_mesh
from trimesh.tensor.protocol.box import Box, contiguous_strides
from trimesh.tensor.protocol.placement import WHOLE
from trimesh.tensor.rank.delivery import arrived, deliver, unneeded
from trimesh.tensor.rank.kernel import Kernel
from trimesh.tensor.rank.poison import Poison
from trimesh.tensor.rank.rank import Rank, TeamOnRank

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


@attrs.frozen
class KeptPlacements:
    """What `redistribute` changes, kept for its gradient."""

    placements: tuple[Placement, ...]


def distribute(
    rank: Rank,
    team: TeamOnRank,
    data: memoryview,
    move: int,
    dtype: torch.dtype,
    size: tuple[int, ...],
    cuts: tuple[int, ...],
) -> torch.Tensor:
    """Make a global tensor of one of the controller, of which each rank takes its own part."""
    mesh, placements = device_mesh(rank, team), placements_by_label(cuts)
    part = arrived(rank, data, move, dtype, size, box_by_placements(size, mesh, placements))
    return assemble(part, mesh, placements, torch.empty(size, device="meta"))


def distribute_like(
    rank: Rank, team: TeamOnRank, data: memoryview, move: int, dtype: torch.dtype, like: DTensor | Poison
) -> torch.Tensor | Poison:
    """Make a global tensor of one of the controller that lies as another of the same size."""
    if isinstance(like, Poison):
        if like.kept is None:
            unneeded(rank, move)
            rank.leave(team, like)
            return like
        like = cast("DTensor", like.kept)
    size, mesh, placements = tuple(like.size()), like.device_mesh, boxed(like.placements)
    part = arrived(rank, data, move, dtype, size, box_by_placements(size, mesh, placements))
    return assemble(part, mesh, placements, torch.empty(size, device="meta"))


def redistribute(rank: Rank, team: TeamOnRank, value: DTensor, cuts: tuple[int, ...]) -> tuple[DTensor, KeptPlacements]:
    """Lay a tensor out anew; return how it lay, too."""
    placements = placements_by_label(cuts)
    kept = KeptPlacements(value.placements)
    return detached(value, refreshed(rank, value).redistribute(placements=placements)), kept


def redistribute_back(rank: Rank, team: TeamOnRank, value: DTensor, layout: KeptPlacements) -> DTensor:
    """Lay a gradient out as the tensor that it is of."""
    return detached(value, refreshed(rank, value).redistribute(placements=unsummed(layout.placements)))


def to_local(rank: Rank, team: TeamOnRank, value: DTensor, cuts: tuple[int, ...]) -> torch.Tensor:
    """Return this rank's part as a tensor of its own, or a part of that; never what only others have."""
    wanted = placements_by_label(cuts)
    fresh = refreshed(rank, value)
    for label, now, then in zip(list(team.extent) or ["all"], fresh.placements, wanted, strict=True):
        if now.is_shard() and now != then:
            raise ShapeError(
                f"t.local([...]) gives each rank of what it has, and along {label!r} that is a part of dimension "
                f"{getattr(now, 'dim', '?')}: write trimesh.redistribute(t, [...]).local(), which brings parts together"
            )
    return fresh.redistribute(placements=wanted).to_local().clone()


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


def placements(rank: Rank, team: TeamOnRank, value: DTensor | Poison, request: int) -> None:
    """Tell the controller how a tensor lies."""

    def find(fresh: DTensor) -> tuple[list[int], list[str]]:
        cuts = [getattr(one, "dim", WHOLE) for one in fresh.placements]
        return cuts, [getattr(one, "reduce_op", "") for one in fresh.placements]

    _answer(rank, team, [value], request, lambda found: find(found[0]), is_asked=team.index == 0)


def fetch_full(rank: Rank, team: TeamOnRank, values: list[DTensor | Poison], request: int) -> None:
    """Bring whole tensors out: the first rank sends them, the others only say that they could."""

    def find(fresh: list[DTensor]) -> list[torch.Tensor]:
        wholes = [one.full_tensor() for one in fresh]
        return [_copy(whole) for whole in wholes] if team.index == 0 else []

    _answer(rank, team, values, request, find, is_asked=True)


def fetch_large_full(rank: Rank, team: TeamOnRank, values: list[DTensor | Poison], request: int) -> None:
    """Let the controller read whole tensors: of each part the first rank that has it gives it."""

    def find(fresh: list[DTensor]) -> list[tuple[int, Box, torch.Tensor]]:
        found = []
        for index, value in enumerate(fresh):
            box, local, lying = part_on_rank(value)
            if is_first_replica(lying) and box.count:
                found.append((index, box, local))
        return found

    _answer(rank, team, values, request, find, is_asked=True, is_large=True)


def fetch_large_part(rank: Rank, team: TeamOnRank, value: DTensor | Poison, request: int, place: int) -> None:
    """Let the controller read one rank's part; see `fetch_part`."""

    def find(fresh: list[DTensor]) -> list[tuple[int, Box, torch.Tensor]]:
        local = _unsummed(fresh[0])
        return [(0, Box.of_all(local.size()), local)]

    _answer(rank, team, [value], request, find, is_asked=team.index == place, is_large=True)


def fetch_part(rank: Rank, team: TeamOnRank, value: DTensor | Poison, request: int, place: int) -> None:
    """Bring one rank's part out; all take part, because what is partial is added up first."""

    def find(fresh: list[DTensor]) -> torch.Tensor:
        return _copy(_unsummed(fresh[0]))

    _answer(rank, team, [value], request, find, is_asked=team.index == place)


def _answer(
    rank: Rank,
    team: TeamOnRank,
    values: Sequence[DTensor | Poison],
    request: int,
    find: Callable[[list[DTensor]], Any],
    *,
    is_asked: bool,
    is_large: bool = False,
) -> None:
    """Send what `find` makes of global tensors, or why there is nothing to send."""
    poison = next((value for value in values if isinstance(value, Poison)), None)
    found: Any = None
    if poison is not None:
        rank.leave(team, poison)
    else:
        try:
            found = find([refreshed(rank, value) for value in values if not isinstance(value, Poison)])
        except Exception as error:  # noqa: BLE001 - goes to whoever fetches
            poison = Poison(team.number, team.done, "trimesh::fetch", error)
            rank.leave(team, poison)
    if is_asked and is_large and poison is None:
        deliver(rank, team, request, found)
    elif is_asked:
        rank.outside.reply(request, found if poison is None else poison)


def _unsummed(value: DTensor) -> torch.Tensor:
    return value.redistribute(placements=unsummed(value.placements)).to_local()


def _copy(value: torch.Tensor) -> torch.Tensor:
    return value.detach().cpu().clone(memory_format=torch.contiguous_format)


def detached(value: DTensor, made: DTensor) -> DTensor:
    """Return what was made of a tensor, with memory of its own: torch gives the same where nothing was to be done.

    It is row-major, as the controller believes, whatever the strides of the tensor were.
    """
    if made._local_tensor is value._local_tensor:
        made = cast("DTensor", made.clone(memory_format=torch.contiguous_format))
    size = made.size()
    if made.stride() != contiguous_strides(size) or not made._local_tensor.is_contiguous():
        whole = torch.empty(size, device="meta")
        return assemble(made._local_tensor.contiguous(), made.device_mesh, made.placements, whole)
    return made


def refreshed(rank: Rank, value: DTensor) -> DTensor:
    """Return a tensor that has what was written to those that it is a view of."""
    copied_views(rank).refresh(value)
    return value


KERNELS: Final = (
    Kernel("distribute", distribute),
    Kernel("distribute_like", distribute_like, takes_poison=True),
    Kernel("redistribute", redistribute),
    Kernel("redistribute_back", redistribute_back),
    Kernel("to_local", to_local),
    Kernel("to_global", to_global),
    Kernel("placements", placements, takes_poison=True),
    Kernel("fetch_full", fetch_full, takes_poison=True),
    Kernel("fetch_large_full", fetch_large_full, takes_poison=True),
    Kernel("fetch_large_part", fetch_large_part, takes_poison=True),
    Kernel("fetch_part", fetch_part, takes_poison=True),
)
